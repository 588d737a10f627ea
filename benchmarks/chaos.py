"""A seeded script of kills, freezes, drains and returns against real workers; every loss must be the undisturbed one.

`make chaos` runs it for five minutes. Four workers train a small model (benchmarks/elastic_job.py) as 2 stages x 2
replicas while the script takes them away and brings others. Afterwards one process trains as many steps with nobody
disturbing it: losses are compared, the sample ledger is audited, and no process may be left. Exit code 1 if not.

    python benchmarks/chaos.py [--seconds 300] [--seed 0]
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.scenarios.launch import json_log, processes_with
from varuna.core.devices import WorkerGroups, size_of
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.extras.doctor.sample_ledger import audit
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.service.local_workers import LocalLaunch, LocalWorkers
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import DrainRequested, FinishRequested, SpawnRequested
from varuna.fleet.state.phases import Ended, Running
from varuna.planner.choose import plan_run

JOB = Path(__file__).with_name("elastic_job.py")
WORKERS, TOLERANCE = 4, 1e-5
LEASE_S = 3.0


class Chaos:
    """Takes workers away and brings them back, as a seeded script says."""

    def __init__(self, run: ManagerService[LocalWorkers], seed: int) -> None:
        self._run, self._choose = run, random.Random(seed)
        self.acts: Counter[str] = Counter()

    def play(self, until_s: float) -> None:
        """Act until then, with pauses between two acts."""
        while time.monotonic() < until_s:
            time.sleep(self._choose.uniform(1.0, 6.0))
            if isinstance(self._run.manager.fleet.phase, Ended):
                return
            self._act()

    def _act(self) -> None:
        live = [name for name in self._run.manager.fleet.joined if self._run.workers.pid(name) is not None]
        if len(live) < 2 or (len(live) < WORKERS and self._choose.random() < 0.6):
            missing = WORKERS - len(live)
            self._note("return", missing)
            self._run.mailbox.post(SpawnRequested(self._choose.randint(1, max(1, missing))))
            return
        act = self._choose.choice(("kill", "kill", "kill two", "freeze", "hiccup", "drain"))
        victims = self._choose.sample(live, 2 if act == "kill two" else 1)
        self._note(act, victims)
        for name in victims:
            if act == "drain":
                self._run.mailbox.post(DrainRequested(name))
            else:
                self._signal(name, signal.SIGSTOP if act in ("freeze", "hiccup") else signal.SIGKILL)
        if act == "hiccup":  # shorter than the lease: nothing may happen
            time.sleep(0.4)
            self._signal(victims[0], signal.SIGCONT)

    def _signal(self, name: str, number: int) -> None:
        pid = self._run.workers.pid(name)
        if pid is not None:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                return

    def _note(self, act: str, what: object) -> None:
        self.acts[act] += 1
        print(f"{act}: {what}", file=sys.stderr)


def disturbed(folder: Path, seconds: float, seed: int) -> tuple[dict[int, float], Counter[str], Ended]:
    """Losses by step, with their newest values; what was done; how it ended."""
    log = folder / "steps.jsonl"

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, stages=min(2, size_of(workers)), micro_batch=micro_batch)

    args = ("--pause", "0.2", "--checkpoints", str(folder / "checkpoints"))
    run = ManagerService(
        ServiceConfig(run_dir=folder / "run", json_log=log),
        LocalLaunch(JOB, args, {"PYTHONPATH": str(JOB.parents[1])}),
        config=FleetConfig(workers=WORKERS, replace=False, lease_s=LEASE_S),
        planner=plan,
        on_event=lambda event: (
            print(getattr(event, "cause", "") or getattr(event, "text", ""), file=sys.stderr)
            if type(event).__name__ in ("WorkerLost", "Notice")
            else None
        ),
        write=lambda line: None,
    )
    chaos = Chaos(run, seed)

    def direct() -> None:
        while not (isinstance(run.manager.fleet.phase, Running) and run.manager.fleet.formed):
            time.sleep(0.1)
        chaos.play(time.monotonic() + seconds)
        run.mailbox.post(SpawnRequested(1))  # whatever is left, somebody can finish
        run.mailbox.post(FinishRequested("the script is over"))

    director = threading.Thread(target=direct, daemon=True)
    director.start()
    ended = run.manage()
    assert ended is not None
    return {row["step"]: row["loss"] for row in json_log(log)}, chaos.acts, ended


def undisturbed(steps: int) -> dict[int, float]:
    """The same job in one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(JOB), "--steps", str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", done.stdout, re.MULTILINE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        losses, acts, ended = disturbed(Path(name), args.seconds, args.seed)
        ledger = audit(read_events(Path(name) / "run"))
        remaining = processes_with(name)
    expected = undisturbed(len(losses))
    worst = max((abs(losses[step] - expected[step]) / abs(expected[step]) for step in expected), default=float("nan"))
    faults = [*ledger.faults]
    if ended.exit_code:
        faults.append(f"the run ended with exit code {ended.exit_code}: {ended.text}")
    if sorted(losses) != sorted(expected) or not expected:
        faults.append(f"{len(losses)} steps, undisturbed {len(expected)}")
    if not worst <= TOLERANCE:
        faults.append(f"losses differ by up to {worst:.1e} relative, more than {TOLERANCE}")
    if remaining:
        faults.append(f"processes are left: {remaining}")
    figures = {
        "seconds": args.seconds,
        "seed": args.seed,
        "steps": len(losses),
        "undone": ledger.undone,
        "acts": dict(acts),
        "worst_relative_difference": worst,
        "faults": faults,
    }
    print(json.dumps(figures, indent=2))
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
