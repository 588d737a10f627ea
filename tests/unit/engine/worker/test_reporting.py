import pytest

from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup
from tests.unit.schedule.validator import parse_row
from varuna.core.times import Carried, Compressed, Interval, Typical
from varuna.engine.pipeline.timeline import StepTimes, interval_of
from varuna.engine.worker.reporting import STEPS_KEPT, WARM_STEPS, Reporter


def step(*seconds: float) -> StepTimes:
    ends = [sum(seconds[: i + 1]) for i in range(len(seconds))]
    row = parse_row("0F0 0F1 0B0")[: len(seconds)]
    took = tuple(interval_of(action, end - s, end) for action, s, end in zip(row, seconds, ends, strict=True))
    return StepTimes(0, 0.0, ends[-1], took, (), (Interval("reduce", -1, ends[-1], ends[-1] + 0.5),))


def test_the_first_steps_of_a_generation_are_not_told() -> None:
    reporter = Reporter()
    for _ in range(2):
        for _ in range(WARM_STEPS):
            reporter.add_times(step(1.0), step_s=9.0, messages=[], reductions=[], voters=1, compressed=Compressed())
        assert reporter.drain() is None
        reporter.begin()


def test_a_report_holds_medians_since_the_last_one() -> None:
    reporter = Reporter()
    for number in range(WARM_STEPS + 3):
        voted = step(1.0, 3.0, 5.0)
        voted = voted._replace(phases=(*voted.phases, Interval("vote", -1, 0.0, 3.0 - number / 2)))
        reporter.add_times(
            voted,
            step_s=10.0 + number,
            messages=[(100, 0.25)],
            reductions=[(7, 2.0)],
            voters=3,
            compressed=Compressed(),
        )
    told = reporter.drain()
    assert told is not None
    assert (told.steps, told.step_s, told.reduced_s) == (3, 13.0, 0.5)
    assert told.actions == {"F": Typical(6, 2.0), "B": Typical(3, 5.0)}
    assert told.messages == Carried(3, 100, 0.25)
    assert told.reductions == Carried(3, 7, 2.0)
    assert told.round_s == pytest.approx((3.0 - (WARM_STEPS + 2) / 2) / 4), "four rounds of the shortest vote"
    assert reporter.drain() is None


def test_what_compression_did_is_told_once_and_for_told_steps_only() -> None:
    """A rank counts from the begin of its generation; the warm steps are in no report."""
    reporter = Reporter()
    for number in range(WARM_STEPS + 2):
        done = Compressed(300 * (number + 1), 200 * (number + 1))
        reporter.add_times(step(1.0), step_s=1.0, messages=[], reductions=[], voters=1, compressed=done)
    told = reporter.drain()
    assert told is not None
    assert told.compressed == Compressed(600, 400)
    reporter.add_times(step(1.0), step_s=1.0, messages=[], reductions=[], voters=1, compressed=done)
    told = reporter.drain()
    assert told is not None
    assert told.compressed == Compressed()


def test_what_nobody_drains_does_not_grow() -> None:
    reporter = Reporter()
    for _ in range(WARM_STEPS + 3 * STEPS_KEPT):
        reporter.add_times(
            step(1.0), step_s=1.0, messages=[(1, 1.0)] * 10, reductions=[], voters=1, compressed=Compressed()
        )
    told = reporter.drain()
    assert told is not None
    assert told.steps == STEPS_KEPT
    assert told.messages is not None
    assert told.messages == Carried(2 * 10 * STEPS_KEPT, 1, 1.0)
    assert told.round_s is None


def test_every_rank_of_a_run_tells_what_its_steps_took() -> None:
    setup = Setup(SmallLanguage)
    setup.run(2, 2, steps=5)
    for session in setup.finished:
        assert session.current is not None
        stage, told = session.current.stage, session.heartbeat.beat().times
        assert told is not None
        assert told.steps == 3
        assert set(told.actions) >= {"F", "B"}
        assert (told.messages is None) == stage.is_last, "whoever has a next stage tells of that link"
        assert told.messages is None or (told.messages.size_bytes > 0 and told.messages.seconds > 0)
        assert told.round_s is not None
        assert told.reductions is not None
        assert 0 < told.compute_s < told.step_s
