import math

import pytest

from tests.unit.extras.pictures.timelines import LATENCY_S, a_step
from varuna.core.clock_alignment import align, in_words


def test_clocks_that_are_seconds_apart_are_aligned_to_half_the_latency_of_messages() -> None:
    ahead_s = (0.0, 3.0, -7.0, 60.0)
    alignment = align(a_step(ahead_s))
    for error_s in ahead_s:
        assert abs(alignment.added_s[f"machine {error_s}"] + error_s) <= alignment.uncertain_s + 1e-9
    # Stages of one replica are linked by messages of 0.25 s both ways, replicas by the vote, which takes 0.5 s.
    assert LATENCY_S <= alignment.uncertain_s <= 0.5
    off_ms = f"{alignment.uncertain_s * 1e3:.2g} ms"
    assert in_words(alignment).startswith("The clocks of 4 machines are aligned by the messages of this step")
    assert in_words(alignment).endswith(f"to within ±{off_ms}.")


def test_messages_bound_two_stages_more_closely_than_the_vote() -> None:
    step = a_step((0.0, 3.0))
    assert align(step).uncertain_s == pytest.approx(LATENCY_S)
    voteless = [rank.model_copy(update={"sent": ()}) for rank in step.ranks]
    assert align(step.model_copy(update={"ranks": tuple(voteless)})).uncertain_s == pytest.approx(0.5)


def test_what_nothing_links_is_said() -> None:
    ranks = tuple(rank.model_copy(update={"sent": (), "ends": ()}) for rank in a_step((0.0, 3.0)).ranks)
    alignment = align(a_step(()).model_copy(update={"ranks": ranks}))
    assert math.isinf(alignment.uncertain_s)
    assert alignment.added_s == {"machine 0.0": 0.0, "machine 3.0": -3.0}  # as if they had begun together
    assert "could not be aligned" in in_words(alignment)


def test_ranks_of_one_machine_need_no_alignment() -> None:
    alignment = align(a_step((2.0, 2.0, 2.0, 2.0)))
    assert tuple(alignment) == ({"machine 2.0": 0.0}, 0.0)
    assert in_words(alignment) == "All ranks share one clock."
