import pytest

from tests.unit.planner.models import MB, model, section
from varuna.core.calibration import NOMINAL, Calibration
from varuna.core.model import TiedParameter
from varuna.planner.predict import pipeline_costs, predict_step_s, ring_s
from varuna.schedule.policy import stash_limit
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, uniform
from varuna.simulator.step import simulate

ROUND = Calibration(
    backward_factor=2, link_latency_s=0.25, link_bytes_per_s=4 * MB, allreduce_bytes_per_s=50 * MB, action_overhead_s=1
)


def test_costs_scale_with_the_micro_batch_and_carry_the_overhead_of_every_action() -> None:
    costs = pipeline_costs(model([section(0.5)] * 4), (0, 3), replicas=1, micro_batch=2, calibration=ROUND)
    assert costs.stages[0] == StageCosts(forward_s=4, recompute_s=4, backward_s=7)
    assert costs.stages[1] == StageCosts(forward_s=2, recompute_s=2, backward_s=3)
    assert costs.links == (LinkCosts(latency_s=0.25, activation_s=1, gradient_s=1),)


def test_a_ring_sends_nearly_twice_the_buffer_and_nothing_alone() -> None:
    assert ring_s(100 * MB, 1, ROUND) == 0
    assert ring_s(100 * MB, 4, ROUND) == 6 * 0.25 + 2 * 3 / 4 * 2


def test_stages_that_share_a_parameter_pay_for_summing_its_gradient() -> None:
    tied = (TiedParameter(name="wte", sections=(0, 3), size_bytes=50 * MB),)
    apart = pipeline_costs(model([section()] * 4, tied), (0, 1, 3), replicas=1, micro_batch=1, calibration=ROUND)
    together = pipeline_costs(model([section()] * 4, tied), (0,), replicas=1, micro_batch=1, calibration=ROUND)
    assert [stage.allreduce_s for stage in apart.stages] == [1.5, 0, 1.5]
    assert [stage.allreduce_s for stage in together.stages] == [0]


@pytest.mark.parametrize("link", [LinkCosts(), LinkCosts(latency_s=0.1, activation_s=0.4, gradient_s=0.4)])
@pytest.mark.parametrize("stages", [4, 24])
def test_long_steps_are_extrapolated_within_one_percent(link: LinkCosts, stages: int) -> None:
    slow = StageCosts(forward_s=1.1, recompute_s=1.1, backward_s=2.2)
    even = uniform(stages, link=link)
    costs = PipelineCosts(stages=(*even.stages[:2], slow, *even.stages[3:]), links=even.links)
    count = 8000 // stages
    limits = [stash_limit(stages, k, count) for k in range(stages)]
    full = simulate(costs, micro_batches=count, stash_limits=limits).step_s
    assert predict_step_s(costs, micro_batches=count, policy="varuna", stash_limits=limits) == pytest.approx(
        full, rel=0.01
    )


def test_nominal_parameters_describe_ten_gigabit_ethernet() -> None:
    assert NOMINAL.allreduce_bytes_per_s < NOMINAL.link_bytes_per_s < 10e9 / 8
    assert NOMINAL.backward_factor == 2
