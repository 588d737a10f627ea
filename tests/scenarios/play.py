"""A run of ``job.py`` in this process' own manager, which tests and benchmarks look into."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.scenarios.launch import JOB
from tests.waiting import wait_for
from varuna.core.devices import WorkerGroups, size_of
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.service.local_workers import LocalLaunch
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import RunEvent
from varuna.planner.choose import plan_run, run_request
from varuna.planner.sweep import rank_depths

E = TypeVar("E", bound=RunEvent)


class Play:
    """A run of job.py in the background."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        planner: Callable[[int], int | tuple[int, ...]],
        config: FleetConfig,
        calibrator: Calibrator | None = None,
    ) -> None:
        self.events: list[RunEvent] = []
        self.ended: Ended | None = None
        self.folder = folder

        def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
            stages = planner(size_of(workers))
            if isinstance(stages, int):
                return plan_run(job, workers=workers, stages=stages, micro_batch=micro_batch)
            request = run_request(job, workers=workers, micro_batch=micro_batch)
            return rank_depths(request, stages).plans[0]

        self.run = ManagerService(
            ServiceConfig(run_dir=folder / "run", json_log=folder / "log.jsonl"),
            LocalLaunch(Path(JOB), args),
            config=config,
            planner=plan if calibrator is None else calibrator.plan,
            calibrator=calibrator,
            on_event=self.events.append,
            write=lambda line: None,
        )
        self.thread = threading.Thread(target=self._go)
        self.thread.start()

    def _go(self) -> None:
        self.ended = self.run.manage()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def trains(self, generation: int, bound_s: float = 60.0) -> None:
        """Wait until a generation has recorded a step."""

        def trains() -> bool:
            fleet = self.run.manager.fleet
            return isinstance(fleet.phase, Ended) or (fleet.generation >= generation and fleet.formed)

        wait_for(trains, bound_s)

    def finish(self) -> None:
        self.thread.join(60)
        if self.thread.is_alive():
            self.run.stop("the test took too long", 99)
            self.thread.join()
        assert self.ended is not None
        assert self.ended.exit_code == 0, self.ended.text
