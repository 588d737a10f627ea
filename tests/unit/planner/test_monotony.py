"""More of anything never makes the chosen plan worse by more than 1 %.

How rarely that fails, and where, is told in docs/planning.md (Limits): these examples are fixed ones.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from tests.unit.planner.models import GB, MB, calibrated, model, request, section
from varuna.calibration.format import Calibration, Jitter, Link, NetworkCosts, Ring
from varuna.core.model import ModelFacts, TiedParameter
from varuna.planner.sweep import rank_plans


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    layer = st.builds(
        section,
        forward_s=st.floats(0.001, 0.1),
        parameter_bytes=st.integers(1, 500 * MB),
        activation_bytes=st.integers(0, 200 * MB),
        boundary_bytes=st.integers(0, 20 * MB),
    )
    layers = draw(st.lists(layer, min_size=1, max_size=10))
    if draw(st.booleans()):
        layers = [layers[0], *[draw(layer)] * draw(st.integers(1, 10)), layers[-1]]
    ends_are_tied = len(layers) > 1 and draw(st.booleans())
    size_bytes = min(layers[0].parameter_bytes, layers[-1].parameter_bytes)
    tied = (TiedParameter(name="wte", sections=(0, len(layers) - 1), size_bytes=size_bytes),)
    return model(layers, tied if ends_are_tied else ())


def network(latency_s: float, speed: float, jitter_s: float) -> NetworkCosts:
    return NetworkCosts(
        link=Link(latency_s=latency_s, bytes_per_s=1.1e9 * speed, jitter=Jitter(mean_s=jitter_s)),
        rings=(Ring(latency_s=latency_s, bytes_per_s=0.47e9 * speed),),
    )


def best_s(calibration: Calibration, workers: int, global_batch: int, micro_batch: int, memory_bytes: int) -> float:
    asked = request(
        model([section()]),
        workers,
        global_batch,
        calibration=calibration,
        micro_batch=min(micro_batch, global_batch),
        memory_bytes=memory_bytes,
    )
    plans = rank_plans(asked).plans
    return plans[0].step_s if plans else float("inf")


@given(
    facts=models(),
    workers=st.integers(1, 12),
    global_batch=st.integers(1, 96),
    micro_batch=st.integers(1, 4),
    memory_bytes=st.sampled_from([GB, 2 * GB, 4 * GB, 16 * GB, 64 * GB]),
    latency_s=st.sampled_from([0.0, 0.0003, 0.005]),
    speed=st.floats(0.03, 30.0),
    jitter_s=st.sampled_from([0.0, 0.002]),
    more_workers=st.integers(1, 8),
    more=st.floats(1.1, 4.0),
)
@settings(max_examples=by_depth(6, 30), deadline=None, derandomize=True)
def test_more_workers_memory_or_bandwidth_never_make_the_plan_worse(
    facts: ModelFacts,
    workers: int,
    global_batch: int,
    micro_batch: int,
    memory_bytes: int,
    latency_s: float,
    speed: float,
    jitter_s: float,
    more_workers: int,
    more: float,
) -> None:
    now, faster = (calibrated(facts, across_vms=network(latency_s, rate, jitter_s)) for rate in (speed, speed * more))
    at_most_s = 1.01 * best_s(now, workers, global_batch, micro_batch, memory_bytes)
    assert best_s(now, workers + more_workers, global_batch, micro_batch, memory_bytes) <= at_most_s
    assert best_s(now, workers, global_batch, micro_batch, int(memory_bytes * more)) <= at_most_s
    assert best_s(faster, workers, global_batch, micro_batch, memory_bytes) <= at_most_s
