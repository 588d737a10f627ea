"""The picture of phases on the page about the design, and the table below it, name those that there are."""

import re
from pathlib import Path
from typing import get_args

from varuna.fleet.state.phases import Phase

DOCS = Path(__file__).parents[3] / "docs"


def test_the_picture_and_its_table_have_every_phase_and_no_other() -> None:
    phases = {phase.__name__ for phase in get_args(Phase)}
    rows = re.findall(r"^\| (\d) \| ([\w, ]+) \|", (DOCS / "design.md").read_text(), re.MULTILINE)
    assert {name for _, names in rows for name in re.split(r", | or ", names)} == phases
    picture = (DOCS / "generation-states.svg").read_text()
    assert set(re.findall(r">([A-Z]\w+)</text>", picture)) == phases
    assert set(re.findall(r">(\d)</text>", picture)) == {number for number, _ in rows}
