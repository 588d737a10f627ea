"""The diagram of phases in docs/design.md names those that there are."""

import re
from pathlib import Path
from typing import get_args

from varuna.fleet.state.fleet import Phase

DESIGN = Path(__file__).parents[3] / "docs" / "design.md"


def test_the_diagram_has_every_phase_and_no_other() -> None:
    drawn = {name for pair in re.findall(r"^    (\w+) --> (\w+):", DESIGN.read_text(), re.MULTILINE) for name in pair}
    assert drawn == {phase.__name__ for phase in get_args(Phase)}
