"""Words of a log on how well steps were predicted."""

import pytest

from tests.unit.extras.doctor.test_sample_ledger import eventful
from varuna.core.times import RankTimes
from varuna.fleet.state.run_events import GenerationTimed, RunEnded, RunEvent
from varuna.observe.predictions import CheckedPrediction, checked_predictions


def times(steps: int, step_s: float) -> RankTimes:
    return RankTimes(steps=steps, step_s=step_s, waited_s=0.0, reduced_s=0.0, actions={})


def timed(predicted_s: float, *stages: RankTimes, generation: int = 0, is_nominal: bool = False) -> GenerationTimed:
    return GenerationTimed(generation=generation, predicted_s=predicted_s, is_nominal=is_nominal, stages=stages)


def test_a_prediction_is_compared_with_the_steps_that_followed_it() -> None:
    # 10 steps of 1 s, 10 more of 2 s: what was known after the first ten was 1.9 s.
    events = [*eventful(), timed(9.0, times(10, 1.0), times(10, 0.8)), timed(1.9, times(20, 1.5), times(20, 1.3))]
    [checked] = checked_predictions(events)
    assert (checked.generation, checked.first, checked.steps) == (0, 10, 10)
    assert checked.predicted_s == 1.9
    assert checked.measured_s == pytest.approx(2.0)
    assert checked.deviation == "5.3% more than predicted"


def test_each_generation_has_its_own() -> None:
    events = [*eventful(), timed(1.0, times(5, 1.1)), timed(2.0, times(6, 2.2), generation=1)]
    assert [(each.generation, each.predicted_s, each.measured_s) for each in checked_predictions(events)] == [
        (0, 1.0, 1.1),
        (1, 2.0, 2.2),
    ]


def test_what_was_a_guess_says_nothing_and_what_follows_does() -> None:
    guess = timed(9.0, times(5, 1.0), is_nominal=True)
    assert checked_predictions([*eventful(), guess]) == ()
    [checked] = checked_predictions([*eventful(), guess, timed(1.0, times(10, 1.0))])
    assert (checked.first, checked.steps) == (5, 5)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [timed(1.0, times(5, 1.0))],  # of a generation that the log does not have
        [*eventful(), timed(1.0)],
        [*eventful(), timed(0.0, times(5, 1.0))],
    ],
)
def test_a_log_that_says_too_little_has_none(events: list[RunEvent]) -> None:
    assert checked_predictions(events) == ()


def test_times_that_are_told_twice_change_nothing() -> None:
    once = [*eventful(), timed(1.0, times(5, 1.1))]
    assert checked_predictions([*once, once[-1]]) == checked_predictions(once)


def test_of_several_runs_in_a_folder_the_newest_counts() -> None:
    first: list[RunEvent] = [*eventful(), timed(1.0, times(5, 1.0)), RunEnded(exit_code=0, text="over")]
    assert [type(each) for each in checked_predictions(first)] == [CheckedPrediction]
    assert checked_predictions([*first, *eventful()]) == ()
