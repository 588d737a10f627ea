"""Plans on paper for GPUs of two kinds: all at work, against one kind alone, and all as if they were of the slowest.

Rows: 8 A100 with 16 V100, 8 H100 with 24 T4, and one or two large GPUs with some small ones, whose pipelines may run on
both kinds, for the paper's 2.5B and 8.3B models, by the constants of
``benchmarks.paper.machines``. ``bound`` is the sum of what each kind does alone with all of its GPUs, if it can.

    python -m benchmarks.mixed_gpus [--global-batch 8192]

Sailor (SOSP'25) reports 1.15 to 2.03 times the best homogeneous plan for A100s with V100s. With ``--speed`` it shows
how long planning takes for many workers of three kinds.
"""

import argparse
import time

from benchmarks.paper.calibrations import GPT2, calibrate
from benchmarks.paper.machines import A100, H100, T4, V100, Machine
from varuna.calibration.format import Calibrations
from varuna.core.devices import WorkerGroup
from varuna.planner.asking.request import PlanRequest
from varuna.planner.sweep import rank_plans

FLEETS = (
    ((A100, 8), (V100, 16)),
    ((H100, 8), (T4, 24)),
    ((A100, 1), (V100, 16)),
    ((A100, 2), (V100, 8)),
    ((H100, 1), (T4, 12)),
)
MANY = ((H100, 128), (V100, 128), (T4, 256))


def asked(model: str, fleet: tuple[tuple[Machine, int], ...], global_batch: int) -> PlanRequest:
    """The request for a fleet of some kinds."""
    known = Calibrations(classes={_name(machine): calibrate(GPT2[model], machine) for machine, _ in fleet})
    workers = tuple(WorkerGroup.of_class(_name(machine), count) for machine, count in fleet)
    return PlanRequest(calibrations=known, workers=workers, global_batch=global_batch, memory_apart=True)


def _name(machine: Machine) -> str:
    return machine.hardware.name.split("-")[0]


def row(model: str, fleet: tuple[tuple[Machine, int], ...], global_batch: int) -> str:
    """A row of the table."""
    request = asked(model, fleet, global_batch)
    best = rank_plans(request).plans[0]
    alone = {}
    for name in request.classes:
        plans = rank_plans(request.of_class(name)).plans
        alone[name] = plans[0].step_s if plans else float("inf")
    slowest = rank_plans(request.as_slowest()).plans
    slowest_s = slowest[0].step_s if slowest else float("inf")
    fits = {name: seconds for name, seconds in alone.items() if seconds < float("inf")}
    bound = f"{best.step_s * sum(1 / seconds for seconds in fits.values()):.3f}" if fits == alone else "-"
    over_alone = f"{min(fits.values()) / best.step_s:.2f}" if fits else "-"
    over_slowest = f"{slowest_s / best.step_s:.2f}" if slowest else "-"
    each = ", ".join(f"{name} {fits[name]:.1f} s" if name in fits else f"{name} too small" for name in alone)
    cuts = " + ".join(
        f"{cut.stages}x{len(replicas)} {' and '.join(dict.fromkeys(cut.stage_classes)) or cut.device_class}"
        for replicas, cut in best.kinds
    )
    gpus = " + ".join(f"{count} {_name(machine)}" for machine, count in fleet)
    return (
        f"| {gpus} | {model} | {each} | {f'{slowest_s:.1f} s' if slowest else '-'} | {cuts} | {best.step_s:.1f} s "
        f"| {over_alone} | {over_slowest} | {bound} | {request.count - best.workers} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--global-batch", type=int, default=8192)
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    if args.speed:
        for fleet in (MANY, *FLEETS):
            request = asked("2.5b", fleet, args.global_batch)
            before_s = time.process_time()
            plan = rank_plans(request).plans[0]
            took_s = time.process_time() - before_s
            print(f"{request.workers} workers of {len(fleet)} kinds: {took_s:.2f} s of one core ({plan.shape})")
        return
    print(
        "| GPUs | model | each alone | all as the slowest | plan | step | over best alone | over slowest | of bound "
        "| idle |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for fleet in FLEETS:
        for model in ("2.5b", "8.3b"):
            print(row(model, fleet, args.global_batch), flush=True)


if __name__ == "__main__":
    main()
