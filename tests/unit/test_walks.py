"""Each stop of a walk in ``docs/walks.md`` is a module that the program enters there."""

import re
from pathlib import Path

import pytest

from tests.walks import walk

PAGE = (Path(__file__).parents[2] / "docs" / "walks.md").read_text()
OF_PROCESSES = {"fleet.workers.launcher", "fleet.workers.worker_server"}
"""The walk that is traced runs workers as threads, to which the manager talks without a socket."""


@pytest.mark.parametrize(("title", "recovery"), [("One micro-batch", False), ("From SIGKILL to the next step", True)])
def test_every_stop_of_a_walk_is_entered(title: str, recovery: bool) -> None:
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    stops = set(re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE))
    assert 20 < len(stops) <= 40
    assert stops - OF_PROCESSES - set(walk(recovery=recovery)) == set()
