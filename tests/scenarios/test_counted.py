"""A worker is killed in the middle of a step of 64 micro-batches: what runs again is what nobody has any more."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.depth import of_depth
from tests.scenarios.counted import COPIED_AFTER_S, MICRO_BATCHES, SLOW_STEP, STEPS
from tests.scenarios.launch import Done, run, varuna_command

pytestmark = pytest.mark.timeout(300)
SCRIPT = str(Path(__file__).with_name("counted.py"))


class Entry(NamedTuple):
    """A line of a worker's diary."""

    at_s: float
    name: str
    generation: int
    stage: int
    number: int


def diary(path: Path) -> list[Entry]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [Entry(float(at), name, int(form), int(stage), int(number)) for at, name, form, _, stage, number in lines]


def lacking(dead: Path, others: Iterable[Path]) -> int:
    """Micro-batches of which some stage has no gradients any more when ``dead`` dies, by what all have done until then.

    The copies of its sums contain what it had done when their round began, at least.
    """
    last = diary(dead)
    end_s, stage = last[-1].at_s, last[-1].stage
    copies_s = max(entry.at_s + COPIED_AFTER_S for entry in last if entry.name in ("apply", "send-kept"))
    done: dict[int, set[int]] = defaultdict(set)
    if any(entry.name == "copy-sum" for entry in last):
        done[stage] = {entry.number for entry in last if entry.name == "B" and entry.at_s < copies_s}
    for path in others:
        for entry in diary(path):
            if entry.name == "B" and entry.at_s < end_s:
                done[entry.stage].add(entry.number)
    return MICRO_BATCHES - len(set[int].intersection(*done.values()))


@pytest.fixture(scope="module")
def alone() -> Done:
    return run([sys.executable, SCRIPT])


@pytest.mark.parametrize(
    ("stages", "victim", "micro_batch_s"), of_depth(((1, 2, 0.2), (2, 1, 0.25), (4, 2, 0.12)), {(1, 2, 0.2)})
)
def test_what_runs_again_is_what_nobody_has(
    tmp_path: Path, alone: Done, stages: int, victim: int, micro_batch_s: float
) -> None:
    flags = ["--stages", str(stages)]
    more = ["--folder", str(tmp_path), "--victim", str(victim), "--micro-batch-s", str(micro_batch_s)]
    done = run(varuna_command(4, flags, *more, script=SCRIPT))
    assert done.code == 0, done.err
    assert len(alone.losses) == STEPS
    assert done.losses == pytest.approx(alone.losses, rel=1e-6)
    assert "ROLLBACK" not in done.err
    dead = tmp_path / f"diary-{(tmp_path / 'dead').read_text()}"
    others = [path for path in tmp_path.glob("diary-*") if path != dead]
    again = {entry.number for path in others for entry in diary(path) if entry.name == "F" and entry.generation > 0}
    assert f"kept {MICRO_BATCHES - len(again)} of {MICRO_BATCHES} micro-batches of step {SLOW_STEP}" in done.err
    replicas = 3 // stages or 1
    assert len(again) <= max(replicas, lacking(dead, others))
    print(f"{stages} stages: {len(again)} of {MICRO_BATCHES} ran again, {lacking(dead, others)} were lacking")
