"""Plans for models of 200 and 405 billion parameters, with the memory of each stage and the seconds planning takes.

    python -m benchmarks.real_plans           # a table
    python -m benchmarks.real_plans --json    # memory of every stage as well

The calibrations are files of examples/calibrations, whose notes say where each constant comes from. Global batches:
512 sequences of 1,024 tokens for GPT-2 200B, as in the paper; 2,048 of 8,192 for Llama-3 405B, as in its report.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from varuna.calibration.file import read_calibration
from varuna.core.devices import equal_workers
from varuna.planner.asking.request import PlanRequest
from varuna.planner.sweep import rank_plans

FOLDER = Path(__file__).parents[1] / "examples" / "calibrations"
BATCHES = {"gpt2-200b-v100": 512, "gpt2-200b-h100": 512, "llama3-405b-h100": 2048}
GPUS = (102, 1024)


def planned(name: str, gpus: int) -> dict[str, Any]:
    """The best plan, or the closest miss; memory in bytes, by stage."""
    begin_s = time.process_time()
    calibration = read_calibration(FOLDER / f"{name}.json")
    request = PlanRequest(
        calibrations=calibration, workers=equal_workers(gpus), global_batch=BATCHES[name], memory_apart=True
    )
    ranking = rank_plans(request)
    found: dict[str, Any] = {"model": name, "gpus": gpus, "cpu_s": round(time.process_time() - begin_s, 2)}
    if not ranking.plans:
        return {**found, "reason": min(ranking.rejected, key=lambda each: each.missing_bytes or 0).reason}
    plan = ranking.plans[0]
    return {
        **found,
        "stages": plan.stages,
        "replicas": plan.replicas,
        "micro_batch": plan.micro_batch,
        "step_time_s": round(plan.step_s, 2),
        "memory_bytes": plan.first.memory_bytes,
        "host_bytes": plan.first.host_bytes,
        "in_flight": plan.first.stash_limits,
        "stash_on_device": plan.first.stash_on_device or plan.first.stash_limits,
    }


def row(found: dict[str, Any]) -> str:
    """One line for people."""
    head = f"{found['model']:18} {found['gpus']:5} GPUs  planned in {found['cpu_s']:5.2f} s  "
    if "reason" in found:
        return f"{head}{found['reason']}"
    gib = [each / 2**30 for each in found["memory_bytes"]]
    inner = sorted(gib[1:-1]) or gib
    host = f"; host at most {max(found['host_bytes']) / 2**30:.0f} GiB" if found["host_bytes"] else ""
    return (
        f"{head}{found['stages']:3} x {found['replicas']:<2} m={found['micro_batch']}  {found['step_time_s']:7.1f} s  "
        f"memory: first stage {gib[0]:.1f}, inner {inner[0]:.1f} to {inner[-1]:.1f}, last {gib[-1]:.1f} GiB{host}"
    )


def main() -> None:
    """All models on all numbers of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per plan")
    args = parser.parse_args()
    for name in BATCHES:
        for gpus in GPUS:
            found = planned(name, gpus)
            print(json.dumps(found) if args.json else row(found), flush=True)


if __name__ == "__main__":
    main()
