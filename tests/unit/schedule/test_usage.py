import pytest

from tests.unit.schedule.validator import parse_row, validate
from varuna.schedule.actions import Orders
from varuna.schedule.usage import kept, usage


def orders(*rows: str) -> Orders:
    return tuple(map(parse_row, rows))


@pytest.mark.parametrize(
    ("rows", "micro_batches", "complaint"),
    [
        (["1F0 1B0"], 1, "1F0 is in the row of stage 0"),
        (["0F1 0F0 0R0 0B0 0R1 0B1"], 2, "0F1 is out of order: 0F0 is next"),
        (["0F0 0F1 0B1 0R0 0B0"], 2, "0B1 is out of order: 0B0 is next"),
        (["0F0 0B0 0F1"], 2, "0B1 is missing"),
        (["0F0 0B0 0F1 0B1"], 1, "0F1 is one too many"),
        (["0F0 0F1 0B0 0B1"], 2, "0F1 makes one set of activations too many beside that of micro-batch 0"),
        (["0F0 0F1 0B0 0R0 0R1 0B1"], 2, "0B0 has no activations: its R is missing"),
        (["0R0 0F0 0B0"], 1, "0R0 has no stashed input"),
        (["0F0 0R0 0B0 0R0"], 1, "0R0 has no stashed input"),
        (["0F0 0F1 0R0 0R1 0B0 0B1"], 2, "0R1 makes one set of activations too many beside that of micro-batch 0"),
        (["0F0 0R0 0R0 0B0"], 1, "0R0 makes one set of activations too many beside that of micro-batch 0"),
        (["0F0 0W0 0I0"], 1, "0W0 is half a backward whose I is missing"),
        (["0F0 0I0 0F1 0R1 0B1"], 2, "0B1 is out of order: 0B0 is next"),
        (["0F0 0I0 0F1 0R1 0I1 0W1 0W0"], 2, "0W1 is out of order: 0B0 is next"),
        (["0F0 0I0 0B0 0W0"], 1, "0B0 is one too many"),
        (["0F0 0I0 0F1 0R1 0I1 0W0 0W1"], 2, "0R1 makes one set of activations too many"),
        (["0F0 0R0 0F1 0B1 0B0"], 2, "0B1 is out of order"),
        (["0F0 0R0 0B0 0F1 0R1 0B1", "1F0 1F1 1R0 1B0 1R1 1B1"], 2, "0B0 can never run: the order deadlocks"),
    ],
)
def test_every_broken_rule_is_named_with_its_action(rows: list[str], micro_batches: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        validate(orders(*rows), micro_batches=micro_batches)


def test_the_stash_limit_counts_forwards_without_their_backward() -> None:
    row = orders("0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2")
    validate(row, micro_batches=3, stash_limits=[2])
    with pytest.raises(ValueError, match="0F1 puts 2 micro-batches in flight, above the stash limit of 1"):
        validate(row, micro_batches=3, stash_limits=[1])


def test_gradients_leave_and_add_up_in_one_order_whether_backwards_are_split_or_not() -> None:
    validate(orders("0F0 0F1 0B0 0R1 0I1 0W1", "1F0 1B0 1F1 1I1 1W1"), micro_batches=2)
    with pytest.raises(ValueError, match="1F1 makes one set of activations too many beside that of micro-batch 0"):
        validate(orders("0F0 0B0 0F1 0B1", "1F0 1I0 1F1 1I1 1W0 1W1"), micro_batches=2)


def test_a_stage_that_keeps_everything_may_hold_as_many_sets_as_it_is_allowed() -> None:
    row = orders("0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2")
    validate(row, micro_batches=3, live_limits=[3])
    assert usage(row[0]) == (3, 3)
    with pytest.raises(ValueError, match="0F2 makes one set of activations too many beside that of micro-batch 0, 1"):
        validate(row, micro_batches=3, live_limits=[2])


def test_a_half_done_backward_counts_as_in_flight() -> None:
    with pytest.raises(ValueError, match="0F1 puts 2 micro-batches in flight, above the stash limit of 1"):
        validate(orders("0F0 0I0 0F1 0W0 0R1 0B1"), micro_batches=2, stash_limits=[1])


def test_a_forward_may_run_between_a_recompute_and_its_backward() -> None:
    validate(orders("0F0 0R0 0F1 0B0 0R1 0B1"), micro_batches=2)


def test_usage_counts_kept_and_recomputed_sets() -> None:
    assert usage(parse_row("0F0 0F1 0B1 0R0 0B0")) == (2, 1)
    assert usage(parse_row("0F0 0F1 0R0 0R1 0B0 0B1")) == (2, 2)


def test_what_has_no_recompute_was_kept() -> None:
    assert kept(parse_row("0F0 0F1 0B1 0R0 0B0")) == {1}
