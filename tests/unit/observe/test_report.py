import math

import pytest

from tests.unit.observe.recorded_events import generation, morphed, recorded
from varuna.observe.report import RunHistory, largest_relative_difference


def test_the_first_generation_is_no_morph() -> None:
    history = RunHistory()
    assert history.add_event(generation(0, (2, 2))) is None
    assert history.add_event(recorded(0)) is None
    assert [str(row.plan) for row in history.generations] == ["2x2"]
    assert history.morphs == 0


def test_a_morph_is_told_when_its_first_step_ends() -> None:
    history = RunHistory()
    history.add_event(generation(0, (2, 2)))
    history.add_event(recorded(0))
    assert history.add_event(generation(1, (3, 1))) is None
    morph = history.add_event(morphed(1, (3, 1), recovery_seconds=1.25))
    assert morph is not None
    assert (str(morph.before.plan), str(morph.after.plan)) == ("2x2", "3x1")
    assert history.generations[-1].recovery_seconds == 1.25
    assert history.morphs == 1


def test_a_morph_that_is_overtaken_is_told_by_the_next() -> None:
    history = RunHistory()
    history.add_event(generation(0, (2, 2)))
    history.add_event(generation(1, (3, 1)))
    overtaken = history.add_event(generation(2, (2, 1)))
    assert overtaken is not None
    assert overtaken.after.generation == 1
    assert overtaken.after.recovery_seconds is None


def test_steps_that_run_again_replace_their_losses() -> None:
    history = RunHistory()
    history.add_event(generation(0, (2, 2)))
    for loss in (5.0, 4.0, 4.0):
        history.add_event(recorded(1, loss))
    assert history.losses == {1: 4.0}
    curve = history.curve(2)
    assert math.isnan(curve[0])
    assert curve[1] == 4.0


def test_the_difference_is_relative_to_the_reference() -> None:
    assert largest_relative_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)


def test_a_nan_differs_infinitely() -> None:
    assert largest_relative_difference([math.nan, 1.0], [1.0, 1.0]) == math.inf


def test_curves_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 and 2"):
        largest_relative_difference([1.0, 1.0, 1.0], [1.0, 1.0])
