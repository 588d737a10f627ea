import pytest

from varuna.core.times import Carried, Compressed, RankTimes, Typical, merged, of_stage


def times(steps: int, step_s: float, forward_s: float, messages: Carried | None = None) -> RankTimes:
    return RankTimes(
        steps=steps,
        step_s=step_s,
        waited_s=0.1,
        reduced_s=0.2,
        actions={"F": Typical(2 * steps, forward_s)},
        messages=messages,
    )


def test_reports_are_merged_by_what_each_has_seen() -> None:
    whole = merged([times(1, 4.0, 1.0), times(3, 8.0, 2.0, Carried(5, 100.0, 0.5))])
    assert whole.steps == 4
    assert whole.step_s == 7.0
    assert whole.actions["F"] == Typical(8, 1.75)
    assert whole.messages == Carried(5, 100.0, 0.5)
    assert whole.reductions is None
    assert whole.compressed.ratio == 1.0
    with pytest.raises(ValueError, match="no times"):
        merged([])


def test_bytes_that_compression_saved_add_up() -> None:
    some, none = times(1, 4.0, 1.0).model_copy(update={"compressed": Compressed(300, 200)}), times(1, 4.0, 1.0)
    assert merged([some, none, some]).compressed == Compressed(600, 400)
    assert of_stage([some, none]).compressed.ratio == 1.5


def test_what_is_neither_action_wait_nor_reduction_ends_the_step() -> None:
    assert times(2, 4.0, 1.0).compute_s == 2.0
    assert times(2, 4.0, 1.0).ending_s == pytest.approx(4.0 - 2.0 - 0.1 - 0.2)
    assert times(2, 1.0, 1.0).ending_s == 0.0
