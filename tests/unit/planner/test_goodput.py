"""The cost of a loss under a plan, and the plan that is best at a rate of losses."""

import pytest

from tests.unit.planner.models import MB, calibrated, model, section
from varuna.calibration.format import Calibrations, Link, NetworkCosts, Ring
from varuna.core.devices import equal_workers
from varuna.core.model import JobFacts
from varuna.core.plan import Copies, Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import plan_run, run_request
from varuna.planner.copy_costs import (
    copied_rounds,
    copies_take_s,
    memory_checkpoint_s,
    memory_checkpoints_every_s,
)
from varuna.planner.goodput import expected, loss_cost_s
from varuna.schedule.copy_pace import PROCESSOR_S_PER_BYTE

FACTS = model([section()] * 8)
NETWORK = NetworkCosts(link=Link(latency_s=0, bytes_per_s=0.5e9), rings=(Ring(latency_s=0, bytes_per_s=1e9),))
KNOWN = calibrated(FACTS, across_vms=NETWORK)


def job(global_batch: int = 4096, *, per_hour: float = 0.0) -> JobFacts:
    return JobFacts(
        model=FACTS,
        global_batch=global_batch,
        micro_batch=1,
        seed=0,
        steps=1,
        losses_per_hour=per_hour,
    )


def asked(workers: int, *, per_hour: float = 6.0) -> PlanRequest:
    return run_request(job(per_hour=per_hour), workers=equal_workers(workers), calibrations=Calibrations.of_one(KNOWN))


def made(stages: int, workers: int, global_batch: int = 4096) -> Plan:
    return plan_run(
        job(global_batch), workers=equal_workers(workers), stages=stages, calibrations=Calibrations.of_one(KNOWN)
    )


def with_copies(plan: Plan, copies: Copies = Copies.STATE) -> Plan:
    return plan.model_copy(update={"copies": copies})


def test_a_loss_costs_least_with_copies_and_most_with_one_holder_alone() -> None:
    single, double = made(8, 8), made(4, 8)
    request = asked(8)
    assert loss_cost_s(with_copies(single), request) < loss_cost_s(double, request) < loss_cost_s(single, request)


def test_with_memory_checkpoints_a_loss_costs_what_came_since_the_newest() -> None:
    fast = NetworkCosts(link=Link(latency_s=0, bytes_per_s=5e9), rings=NETWORK.rings)
    request = run_request(
        job(), workers=equal_workers(8), calibrations=Calibrations.of_one(calibrated(FACTS, across_vms=fast))
    )
    plan = made(8, 8, 64)
    often = with_copies(plan)
    every_s, takes_s = memory_checkpoints_every_s(often, request), memory_checkpoint_s(often, request)
    saved_s = loss_cost_s(plan, request) - loss_cost_s(often, request)
    assert every_s >= max(takes_s, plan.step_s)
    assert saved_s == pytest.approx(60 / 2 - every_s / 2 - takes_s, rel=0.01)
    assert copies_take_s(often, request) <= 0.01 * plan.step_s, "of a processor, where stages compute on one"


def test_with_copies_the_length_of_a_step_hardly_matters_to_a_loss() -> None:
    short, long = (with_copies(made(8, 8, batch)) for batch in (8192, 65536))
    request = asked(8)
    assert long.step_s > 7 * short.step_s
    assert loss_cost_s(long, request) - loss_cost_s(short, request) < 0.1 * (long.step_s - short.step_s)


def test_copies_take_their_processor_time_of_state_and_each_round_of_sums() -> None:
    plan = with_copies(made(8, 8, 65536))
    request = asked(8)
    rounds = copied_rounds(plan, request)
    assert rounds.number >= 2
    assert memory_checkpoints_every_s(plan, request) == plan.step_s
    assert copies_take_s(plan, request) == pytest.approx(
        300 * MB / 5e9 + PROCESSOR_S_PER_BYTE * (300 * MB + rounds.number * 100 * MB), rel=1e-6
    )
    assert expected(plan, request).step_s > plan.step_s


def test_an_idle_worker_costs_nothing_when_it_is_lost() -> None:
    plan = made(8, 8)
    assert expected(plan, asked(16)).losses_per_hour == pytest.approx(expected(plan, asked(8)).losses_per_hour / 2)


def test_losses_change_no_plan_where_there_are_copies() -> None:

    def plan(per_hour: float) -> Plan:
        return plan_run(
            job(2048, per_hour=per_hour),
            workers=equal_workers(8),
            stages=8,
            calibrations=Calibrations.of_one(KNOWN),
            copies=True,
            micro_batch=1,
        )

    quiet, stormy = plan(0.0), plan(20.0)
    assert quiet.same_work(stormy)
    assert (quiet.copies, stormy.copies) == (Copies.STATE, Copies.STATE)


def test_more_losses_never_make_a_plan_that_costs_more_of_them() -> None:
    costs = []
    for per_hour in (0.0, 1.0, 10.0, 100.0):
        plan = plan_run(
            job(16384, per_hour=per_hour),
            workers=equal_workers(9),
            calibrations=Calibrations.of_one(KNOWN),
            copies=True,
        )
        costs.append(loss_cost_s(plan, asked(9, per_hour=10.0)))
    assert costs == sorted(costs, reverse=True)
