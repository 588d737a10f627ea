"""Predicts the configurations that the paper names as it ran them: its own schedule, whole layers, fixed P x D."""

from dataclasses import dataclass
from functools import lru_cache

from benchmarks.paper.calibrations import Transformer, calibrate
from benchmarks.paper.machines import Machine
from varuna.calibration.format import Calibration, OptimizerCosts
from varuna.core.plan import Pipeline, Plan
from varuna.planner.balance import balance
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.network import network_of, reduce_s
from varuna.planner.pricing.predict import predict
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spans import Spans
from varuna.planner.pricing.stage_size import Size, Sizer
from varuna.schedule.policy import stash_limit
from varuna.simulator.costs import PipelineCosts


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A predicted step of a fixed configuration."""

    plan: Plan
    costs: PipelineCosts

    @property
    def examples_per_s(self) -> float:
        return self.plan.global_batch / self.plan.step_s

    @property
    def per_gpu(self) -> float:
        return self.examples_per_s / self.plan.workers


@lru_cache(maxsize=64)
def calibration_of(
    model: Transformer, machine: Machine, *, whole_layers: bool = True, optimizer: OptimizerCosts | None = None
) -> Calibration:
    return calibrate(model, machine, whole_layers=whole_layers, optimizer=optimizer)


def configured(
    model: Transformer,
    machine: Machine,
    stages: int,
    replicas: int,
    *,
    micro_batch: int = 4,
    global_batch: int = 8192,
    policy: str = "varuna",
    optimizer: OptimizerCosts | None = None,
) -> Outcome:
    """Predict P x D; memory is counted, not enforced."""
    calibration = calibration_of(model, machine, whole_layers=stages <= model.layers + 2, optimizer=optimizer)
    at = profile(calibration, micro_batch)
    seconds = zip(at.work_s.values, at.recompute_s.values, strict=True)
    whole = [work + recompute for work, recompute in seconds]
    starts = balance(whole, at.work_s.values, stages)
    micro_batches = -(-global_batch // micro_batch)
    longest = -(-micro_batches // replicas)
    limits = tuple(stash_limit(stages, k, longest, policy) for k in range(stages))
    sizer = Sizer([Spans(at)] * len(limits), wanted=limits, least=limits, may_keep=False)
    ends = (*starts[1:], at.sections)
    plan = Plan(
        micro_batch=micro_batch,
        global_batch=global_batch,
        pipelines=(
            Pipeline(
                replicas=replicas,
                bounds=(*starts, at.sections),
                stash_limits=limits,
                memory_bytes=tuple(
                    (sizer.detail(k, starts[k], ends[k], Size(limit, 0)).total for k, limit in enumerate(limits))
                ),
            ),
        ),
        policy=policy,
    )
    costs = pipeline_costs(at, plan, gpus_per_vm=machine.hardware.gpus_per_vm)
    return Outcome(plan=plan.model_copy(update={"step_s": predict(costs, plan).step_s}), costs=costs)


def intra_layer_s(
    model: Transformer, machine: Machine, *, ways: int, replicas: int, micro_batch: int, global_batch: int
) -> float:
    """Seconds of a Megatron step: every layer split ``ways`` wide, two all-reduces in each of F, R and B.

    The all-reduces are synchronous, and all groups of a VM run theirs at once.
    """
    calibration = calibration_of(model, machine)
    at = profile(calibration, micro_batch)
    compute_s = (at.work_s.before[-1] + at.recompute_s.before[-1]) / ways
    size_bytes = 2 * model.sequence * model.hidden * micro_batch
    per_vm = machine.hardware.gpus_per_vm
    crosses = ways > per_vm
    rings = network_of(calibration, crosses=crosses).rings
    in_flight = max(1, per_vm // ways)
    ring = min(rings, key=lambda each: abs(each.in_flight - in_flight))
    share = 1.0 if not crosses else min(ways, per_vm) / ways  # ranks of a VM follow each other in the ring
    once_s = 2 * (ways - 1) * (ring.latency_s + size_bytes / ways / ring.bytes_per_s * max(share, 1 / ways))
    steps = -(-global_batch // (micro_batch * replicas))
    gradients_s = reduce_s(
        calibration,
        at.gradient_bytes.before[-1] / ways,
        stages=ways,
        replicas=replicas,
        gpus_per_vm=per_vm,
        members=replicas,
    )
    return steps * (compute_s + 6 * model.layers * once_s) + gradients_s + machine.optimizer.fixed_s


def tflops_per_gpu(model: Transformer, examples_per_s_per_gpu: float) -> float:
    """Useful TFLOP/s: recompute not counted, as in the paper."""
    return model.useful_flops * examples_per_s_per_gpu / 1e12
