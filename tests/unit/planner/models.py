"""Models as the planner sees them."""

from collections.abc import Sequence
from typing import Any

from varuna.calibration.format import Calibration, Calibrations, Link, NetworkCosts, Ring
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import WorkerGroups, equal_workers
from varuna.core.model import ModelFacts, SectionFacts, TiedParameter
from varuna.planner.asking.ranking import Ranking
from varuna.planner.asking.request import PlanRequest
from varuna.planner.sweep import rank_plans

MB, GB = 10**6, 10**9


def section(
    forward_s: float = 0.005,
    parameter_bytes: int = 100 * MB,
    activation_bytes: int = 50 * MB,
    boundary_bytes: int = 2 * MB,
) -> SectionFacts:
    return SectionFacts(
        label="layer",
        forward_s=forward_s,
        parameter_bytes=parameter_bytes,
        trainable_bytes=parameter_bytes,
        optimizer_bytes=2 * parameter_bytes,
        activation_bytes=activation_bytes,
        boundary_bytes=boundary_bytes,
    )


def model(sections: Sequence[SectionFacts], tied: tuple[TiedParameter, ...] = ()) -> ModelFacts:
    last = sections[-1].model_copy(update={"boundary_bytes": 0})
    return ModelFacts(digest="test", sections=(*sections[:-1], last), tied=tied)


def gpt2_2_5b() -> ModelFacts:
    """54 layers, hidden 1920, sequence 1024, on V100s, fp16, as in the paper."""
    return model([section(0.00224, 2 * 44 * MB, 60 * MB, 4 * MB)] * 54)


# Where the network does not matter, further workers cannot hurt.
FAST = NetworkCosts(link=Link(latency_s=0, bytes_per_s=1e15), rings=(Ring(latency_s=0, bytes_per_s=1e15),))


def calibrated(facts: ModelFacts, **changes: object) -> Calibration:
    return nominal_calibration(facts).model_copy(update=changes)


def request(facts: ModelFacts, workers: int | WorkerGroups, global_batch: int, **rest: Any) -> PlanRequest:
    calibration = rest.pop("calibration", None) or nominal_calibration(facts)
    groups = equal_workers(workers) if isinstance(workers, int) else workers
    return PlanRequest(calibrations=Calibrations.of_one(calibration), workers=groups, global_batch=global_batch, **rest)


def rank(facts: ModelFacts, workers: int, global_batch: int, micro_batch: int, **rest: Any) -> Ranking:
    return rank_plans(request(facts, workers, global_batch, micro_batch=micro_batch, **rest))
