"""Threads, descriptors and memory of two workers that live through 200 morphs, compared with morph 20.

The plan changes between 1 stage x 2 replicas and 2 x 1 each time, so every morph forms other groups and copies state.
Exit code 1 if anything grew by more than 10 %.

    python benchmarks/morph_leaks.py [--morphs 200]
"""

import argparse
import json
import re
import tempfile
import threading
import time
from pathlib import Path

from varuna.core.devices import WorkerGroups
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.service.local_workers import LocalLaunch
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import MorphRequested, StopRequested
from varuna.fleet.state.phases import Ended
from varuna.planner.choose import plan_run

JOB = Path(__file__).with_name("elastic_job.py")
BASE, ALLOWED, BOUND_S = 20, 1.10, 60.0


def measure(pid: int) -> dict[str, int]:
    """Of one process, from /proc."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    return {
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "resident_kib": int(resident[1]) if resident else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--morphs", type=int, default=200)
    args = parser.parse_args()
    turns = iter(range(10**9))

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, stages=1 + next(turns) % 2, micro_batch=micro_batch)

    rows: dict[int, list[dict[str, int]]] = {}
    with tempfile.TemporaryDirectory() as name:
        run = ManagerService(
            ServiceConfig(run_dir=Path(name)),
            LocalLaunch(JOB, (), {"PYTHONPATH": str(JOB.parents[1])}),
            config=FleetConfig(workers=2, replace=False),
            planner=plan,
            write=lambda line: None,
        )
        thread = threading.Thread(target=run.manage)
        thread.start()
        begin_s = time.monotonic()
        try:
            for generation in range(args.morphs + 1):
                deadline_s = time.monotonic() + BOUND_S
                while not (run.manager.fleet.generation >= generation and run.manager.fleet.formed):
                    if isinstance(run.manager.fleet.phase, Ended) or time.monotonic() > deadline_s:
                        raise TimeoutError(f"generation {generation} does not train: {run.manager.fleet.phase}")
                    time.sleep(0.01)
                if generation in (BASE, args.morphs):
                    time.sleep(1.0)  # what is being let go of may take a moment
                    rows[generation] = [measure(run.workers.pid(worker) or 0) for worker in ("w0", "w1")]
                run.mailbox.post(MorphRequested())
        finally:
            run.mailbox.post(StopRequested("measured", 0))
            thread.join()
    ratios = {
        key: max(after[key] / before[key] for before, after in zip(rows[BASE], rows[args.morphs], strict=True))
        for key in rows[BASE][0]
    }
    seconds = time.monotonic() - begin_s
    print(json.dumps({"morphs": args.morphs, "seconds": round(seconds, 1), "rows": rows, "ratios": ratios}, indent=2))
    raise SystemExit(any(ratio > ALLOWED for ratio in ratios.values()))


if __name__ == "__main__":
    main()
