"""Pipelines of different depth: workers die in each of them, and the losses are those of one process."""

import pytest

from tests.depth import nightly_rows
from tests.unit.testing import work
from tests.unit.testing.work import CAPTURES
from varuna.core.errors import VarunaError
from varuna.testing import fail_at, run
from varuna.testing.faults import Phase
from varuna.testing.ranks import Stages

STEPS, MICRO_BATCHES = 3, 12
SHAPES: dict[int, Stages] = {5: (3, 2), 4: (3, 1), 3: (2, 1), 2: 1, 1: 1}


script = work.script(STEPS, MICRO_BATCHES)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("rank", "phase", "after"),
    [
        (4, "B", 2),
        (0, "sum", 0),
        *nightly_rows((1, "F", 3), (2, "B", 2), (3, "vote", 0), (4, "apply", 0)),
    ],
)
def test_one_dies(alone: tuple[float, ...], rank: int, phase: Phase, after: int) -> None:
    """Its section is also in the other pipeline, cut otherwise: no step is lost, and what that one has added stays."""
    outcome = run(
        script,
        workers=5,
        stages=SHAPES,
        faults=[fail_at(rank=rank, step=1, phase=phase, after=after)],
        captures=CAPTURES,
    )
    assert outcome.plans == ("3x1+2x1", "3x1+1x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not any("ROLLBACK" in text for text in outcome.warnings)
    if phase == "vote":  # whoever gets there has summed all of its sections with those that run them, too
        assert outcome.kept[1] > 0


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_another_dies_while_the_first_ones_work_is_handed_over(alone: tuple[float, ...]) -> None:
    faults = [fail_at(rank=4, step=1, phase="B", after=2), fail_at(rank=3, step=1, phase="form")]
    outcome = run(script, workers=5, stages=SHAPES, faults=faults, captures=CAPTURES)
    assert outcome.plans[-1] == "2x1+1x1"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


def test_depths_that_cannot_be_are_refused() -> None:
    with pytest.raises(VarunaError, match=r"stages=\(13, 1\) does not fit: the model has \d+ sections"):
        run(script, workers=14, stages=(13, 1), captures=CAPTURES)
    with pytest.raises(VarunaError, match=r"stages=\(90, 1\) needs 91 workers, and there are 2"):
        run(script, workers=2, stages=(90, 1), captures=CAPTURES)
