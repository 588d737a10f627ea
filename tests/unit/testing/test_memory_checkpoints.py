"""With one holder for each section, a loss costs the steps since the newest memory checkpoint."""

from collections.abc import Callable, Sequence

import pytest

from tests.unit.testing import work
from tests.unit.testing.keepers import Kept, Waiting
from tests.unit.testing.work import disturbed, went_back
from varuna.core.plan import Copies, Plan
from varuna.engine.base.spans import Span
from varuna.engine.copies.memory_checkpoints import CheckpointMaker
from varuna.engine.worker import generation
from varuna.planner.choose import plan_run
from varuna.testing import RunResult, ranks
from varuna.testing.faults import Fault, Phase

STEPS, MICRO_BATCHES = 8, 4

script = work.script(STEPS, MICRO_BATCHES)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Makes a memory checkpoint after every step whose last one has come to all keepers."""

    def often(*arguments: object, **options: object) -> Plan:
        plan = plan_run(*arguments, **options)  # type: ignore[arg-type]
        return plan.model_copy(update={"copies": Copies.STATE}) if plan.workers > 1 else plan

    monkeypatch.setattr(ranks, "plan_run", often)
    monkeypatch.setattr(generation, "checkpoint_every_s", lambda *_, **__: 0.001)
    return Kept()


def without_replicas(kept: Kept, faults: Sequence[Fault], workers: int = 3) -> RunResult:
    kept.waiting = workers, 0  # so that there is one of step 1, however long the first one takes
    return disturbed(script, kept.hear, {each: each for each in range(1, workers + 1)}, faults)


def test_a_worker_dies_and_all_go_back_to_the_newest_memory_checkpoint(kept: Kept, alone: tuple[float, ...]) -> None:
    outcome = without_replicas(kept, [Waiting(1, 5, "F", kept.on(2, step=1))])
    assert outcome.losses == alone
    assert outcome.plans == ("3x1", "2x1")
    assert not went_back(outcome), "to the beginning"


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", ["keep", "send-kept", "kept", "F", "vote", "apply"])
def test_a_worker_dies_while_one_is_made_or_sent_or_has_just_come(
    kept: Kept, alone: tuple[float, ...], phase: Phase, rank: int
) -> None:
    """The one before is dropped only when all know that the newer one is everywhere."""
    before = kept.on(0, 1, 2, step=1)
    outcome = without_replicas(kept, [Sometime(rank, phase, before)])
    assert outcome.losses == alone
    assert outcome.plans == ("3x1", "2x1")
    assert not went_back(outcome)


class Sometime(Waiting):
    """The first time in a step from 3 on."""

    def __init__(self, rank: int, phase: Phase, ready: Callable[[], bool]) -> None:
        super().__init__(rank, 3, phase, ready)

    def on_span(self, span: Span) -> None:
        if span.step > self.step and not self.happened and span.step < STEPS - 1:
            self.step = span.step
        super().on_span(span)


@pytest.mark.parametrize("second", [0, 1])
def test_a_second_worker_dies_while_the_others_go_back(kept: Kept, alone: tuple[float, ...], second: int) -> None:
    ready = kept.on(0, 1, 2, 3, step=1)
    faults = [Waiting(1, 5, "F", ready), Forming(second)]
    outcome = without_replicas(kept, faults, workers=4)
    assert outcome.losses == alone
    assert outcome.plans[0] == "4x1"
    assert outcome.plans[-1] == "2x1"


class Forming(Fault):
    """A worker dies as it forms the second generation."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, -1, "form", None)

    def is_here(self, span: Span) -> bool:
        is_it = (span.name, span.phase, span.rank) == ("form", "begin", self.rank) and span.index == 1
        self.happened = self.happened or is_it
        return is_it


def test_an_owner_and_then_the_keeper_of_its_state_die(kept: Kept, alone: tuple[float, ...]) -> None:
    """Nobody has that state any more: without a checkpoint on disk the run begins anew."""
    outcome = without_replicas(kept, [Waiting(1, 5, "F", kept.on(0, 1, 2, step=1)), Forming(1)])
    assert outcome.losses == alone
    assert outcome.plans[-1] == "1x1"
    assert went_back(outcome)


def test_a_worker_dies_just_after_all_went_back(kept: Kept, alone: tuple[float, ...]) -> None:
    """The checkpoint that they went back to is still there; rank 0 and the one that is left keep each other's."""
    ready = kept.on(0, 1, 2, 3, step=1)
    outcome = without_replicas(kept, [Waiting(1, 5, "F", ready), After(0)], workers=4)
    assert outcome.losses == alone
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert not went_back(outcome)


class After(Fault):
    """A worker dies in the first forward after the first loss, or in that of a later step."""

    def __init__(self, rank: int, step: int = 0) -> None:
        super().__init__(rank, step, "F", None)
        self._formed = False

    def is_here(self, span: Span) -> bool:
        self._formed = self._formed or (span.name == "form" and span.index == 1)
        is_it = self._formed and (span.name, span.phase, span.rank) == ("F", "begin", self.rank)
        is_it = is_it and span.step >= self.step and not self.happened
        self.happened = self.happened or is_it
        return is_it


def test_the_run_goes_back_twice_to_the_same_checkpoint(
    kept: Kept, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after the first loss have not changed what it began from, also where a worker goes on from its own copy."""
    flags, asked = CheckpointMaker.flags, iter([2.0])
    monkeypatch.setattr(CheckpointMaker, "flags", lambda maker: flags(maker) | {"keep": next(asked, 0.0)})
    outcome = without_replicas(kept, [Waiting(1, 3, "F", kept.on(0, 1, 2, 3, step=1)), After(0, 4)], workers=4)
    assert outcome.losses == alone
    assert outcome.plans == ("4x1", "3x1", "2x1")
    assert not went_back(outcome)
