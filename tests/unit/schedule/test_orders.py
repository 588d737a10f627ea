from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from tests.unit.schedule.validator import validate
from varuna.schedule.actions import Kind, Orders
from varuna.schedule.orders import gpipe, one_f_one_b, varuna
from varuna.schedule.policy import stash_limit
from varuna.schedule.usage import usage

shapes = given(stages=st.integers(1, 9), micro_batches=st.integers(1, 24))
quick = settings(max_examples=by_depth(10, 60), deadline=None)


def show(orders: Orders) -> list[str]:
    return [" ".join(map(str, row)) for row in orders]


def test_gpipe_runs_backwards_last_first_and_spares_the_last_recompute() -> None:
    assert show(gpipe(2, 3)) == ["0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0", "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0"]


def test_1f1b_fills_to_its_depth_then_alternates_and_the_last_stage_never_recomputes() -> None:
    assert show(one_f_one_b(2, 3)) == ["0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_varuna_spreads_forwards_over_the_step_as_in_the_papers_figure() -> None:
    rows = show(varuna(4, 5))
    assert rows[2] == "2F0 2F1 2F2 2R0 2B0 2R1 2B1 2R2 2B2 2F3 2F4 2R3 2B3 2R4 2B4"
    assert rows[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4"


@shapes
@quick
def test_gpipe_is_valid_for_every_shape(stages: int, micro_batches: int) -> None:
    validate(gpipe(stages, micro_batches), micro_batches=micro_batches, backward_order=range(micro_batches)[::-1])


@shapes
@quick
def test_1f1b_is_valid_within_its_depth(stages: int, micro_batches: int) -> None:
    limits = [min(stages - k, micro_batches) for k in range(stages)]
    validate(one_f_one_b(stages, micro_batches), micro_batches=micro_batches, stash_limits=limits)


@shapes
@quick
def test_varuna_is_valid_within_the_default_stash_limits(stages: int, micro_batches: int) -> None:
    limits = [stash_limit(stages, k, micro_batches) for k in range(stages)]
    validate(varuna(stages, micro_batches), micro_batches=micro_batches, stash_limits=limits)


@pytest.mark.parametrize("order", [gpipe, one_f_one_b, varuna])
def test_no_order_holds_two_sets_of_activations(order: Callable[[int, int], Orders]) -> None:
    assert {usage(row).live for row in order(6, 20)} == {1}


def test_the_papers_largest_order_has_every_action() -> None:
    assert [sum(action.kind is Kind.BACKWARD for action in row) for row in varuna(36, 682)] == [682] * 36
