"""The interval of saves because of losses is the one that costs least in all, by trying."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from varuna.core.plan import Pipeline, Plan
from varuna.core.saved import ALONE_EVERY_S, paying_every_s


def plan(replicas: int) -> Plan:
    return Plan(
        micro_batch=1,
        global_batch=8192,
        pipelines=(Pipeline(replicas=replicas, bounds=(0, 1, 2), stash_limits=(1, 1)),),
    )


def cost(every_s: float, stall_s: float, per_hour: float) -> float:
    """Of each second of training: stops for checkpoints, and half an interval that each loss undoes."""
    return stall_s / every_s + per_hour / 3600 * every_s / 2


@given(st.floats(0.1, 100.0), st.floats(0.01, 60.0))
def test_no_other_interval_costs_less(stall_s: float, per_hour: float) -> None:
    every_s = paying_every_s(stall_s, per_hour, plan(1))
    others = [every_s * factor for factor in (0.5, 0.9, 1.1, 2.0) if every_s * factor >= 10.0]
    assert all(cost(every_s, stall_s, per_hour) <= cost(other, stall_s, per_hour) + 1e-9 for other in others)


def test_what_costs_nothing_is_not_done_all_the_time() -> None:
    assert paying_every_s(0.0, 60.0, plan(1)) == 10.0
    assert paying_every_s(0.0, 60.0, plan(1), usual_s=2.0) == 2.0, "a state that is kept on this machine's disk"


def test_other_replicas_make_what_a_loss_undoes_rarer() -> None:
    assert paying_every_s(0.5, 36.0, plan(1)) == 10.0
    assert paying_every_s(0.5, 36.0, plan(2)) == 20.0, "of four workers, two that go together"
    assert paying_every_s(0.5, 36.0, plan(3)) == 60.0
    assert paying_every_s(0.5, 36.0, plan(4096)) > 1e9


def test_while_no_loss_was_seen_checkpoints_are_rare() -> None:
    assert paying_every_s(0.1, 0.0, plan(1)) == ALONE_EVERY_S
    assert paying_every_s(30.0, 0.0, plan(1)) == 600.0
    assert paying_every_s(0.1, 0.0, plan(2)) == inf
