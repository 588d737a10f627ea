"""With one holder for each section, the loss of a worker costs the step in flight and no more: same losses."""

import threading
from collections.abc import Sequence

import pytest

from tests.depth import by_depth
from tests.unit.testing import work
from tests.unit.testing.keepers import Kept, Waiting
from tests.unit.testing.work import disturbed, went_back
from varuna.engine.copies import sending, wire
from varuna.engine.stage.sums import Sums, SumWanted
from varuna.engine.worker import generation
from varuna.schedule.copy_pace import SumsPace
from varuna.testing import RunResult
from varuna.testing.faults import Fault, Phase

STEPS, MICRO_BATCHES = 3, by_depth(16, 32)


script = work.script(STEPS, MICRO_BATCHES)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """States have a copy in each step, as in long ones."""
    monkeypatch.setattr(generation, "checkpoint_every_s", lambda *_, **__: 0.0)
    return Kept()


def without_replicas(kept: Kept, faults: Sequence[Fault], workers: int = 3) -> RunResult:
    return disturbed(script, kept.hear, {each: each for each in range(1, workers + 1)}, faults)


@pytest.mark.timeout(200)
def test_two_workers_die_in_the_middle_of_steps(kept: Kept, alone: tuple[float, ...]) -> None:
    """Their neighbours have copies of what only they had; the second death comes in the first step of a new plan."""
    faults = [
        Waiting(1, 1, "B", kept.on(3, step=1), by_depth(7, 15)),
        Waiting(0, 2, "F", kept.on(1, step=2), by_depth(9, 20)),
    ]
    outcome = without_replicas(kept, faults, workers=4)
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not went_back(outcome)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_worker_dies_while_the_next_plan_forms(kept: Kept, alone: tuple[float, ...]) -> None:
    """The first one's sections are on their way from their copy, and the second one's copy is still there, too."""
    faults = [Waiting(1, 2, "B", kept.on(3, 0, step=2), 5), Waiting(1, 2, "form", lambda: True)]
    outcome = without_replicas(kept, faults, workers=4)
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert not went_back(outcome)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("phase", "back"), [pytest.param("vote", False, marks=pytest.mark.nightly), ("apply", True)])
def test_a_death_around_the_vote(kept: Kept, alone: tuple[float, ...], phase: Phase, back: bool) -> None:
    """Before the vote the step runs again. After it nobody has what was applied: the step before runs again, too."""
    copied, voted = kept.on(0, 1, 2, step=1), kept.voted(0, 2, step=1)
    outcome = without_replicas(kept, [Waiting(1, 1, phase, lambda: copied() and (not back or voted()))])
    assert outcome.plans == ("3x1", "2x1")
    assert not went_back(outcome), "to the beginning"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_death_while_a_copy_is_sent(kept: Kept, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the copy that has come is thrown away: all go on from the one before."""
    begun = threading.Event()

    def stuck(part_s: float, since_s: float, step_s: float) -> float:
        begun.set()
        return 100.0

    monkeypatch.setattr(wire, "SMALL_PART_BYTES", 1024)
    monkeypatch.setattr(sending, "state_pause_s", stuck)
    outcome = without_replicas(kept, [Waiting(1, 1, "B", lambda: begun.wait(20), 3)])
    assert went_back(outcome), "to the beginning, as nothing has ever come"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_sums_of_a_lost_worker_are_kept_as_they_were_copied(
    kept: Kept, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Only what it has added since runs again, and what was in flight."""
    want = Sums.request_copy

    def noted(sums: Sums, wanted: SumWanted) -> None:
        want(sums, wanted)
        kept.wants(wanted)

    monkeypatch.setattr(sending, "sums_pace", lambda *_: SumsPace(1, 0.0))
    monkeypatch.setattr(Sums, "request_copy", noted)
    kept.slow = (rank, 2)
    outcome = without_replicas(kept, [Waiting(rank, 2, "B", kept.added(20, step=2), 25)])
    assert not went_back(outcome)
    assert outcome.plans == ("3x1", "2x1")
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert 15 <= outcome.kept[1] <= 25
