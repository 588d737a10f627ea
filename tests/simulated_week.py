"""A run of 300 workers and a week, of which some are lost each hour, as a page sees it; its texts are hostile."""

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette

from varuna.core.plan import Pipeline, Plan
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.net.serving import Serving
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.page.live_feed import LiveFeed
from varuna.fleet.page.logins import Logins
from varuna.fleet.page.status import shown_plan
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.state.run_events import (
    CheckpointCommitted,
    GenerationRecord,
    GenerationStarted,
    Morphed,
    Notice,
    StepRecorded,
    WorkerLost,
)

HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
WEEK_S = 7 * 86400
STEPS = 60_000
STEPS_BETWEEN_MORPHS = 40
STEPS_BETWEEN_CHECKPOINTS = 60
WORKERS = tuple(f"n{index}.0" for index in range(300))


def plan_of(replicas: int) -> Plan:
    return Plan(
        micro_batch=4,
        global_batch=2400,
        pipelines=(Pipeline(replicas=replicas, bounds=(*tuple(range(6)), 6), stash_limits=(4,) * 6),),
    )


class Week:
    """The chronicle at the end of ``weeks`` weeks, and the run's status."""

    def __init__(self, weeks: float = 1) -> None:
        self.chronicle, self._drawn = Chronicle(), random.Random(0)
        self._now_s, self._generation, self._plan = time.time() - weeks * WEEK_S, 0, plan_of(50)
        self.seconds = 0
        """That the status has gone on."""
        for step in range(int(weeks * STEPS)):
            self._now_s += WEEK_S / STEPS
            if step % STEPS_BETWEEN_MORPHS == 0:
                self._morph(step)
            loss = 2 + 8 * math.exp(-step / 9000) + self._drawn.gauss(0, 0.1)
            self._take(
                StepRecorded(step=step, generation=self._generation, loss=loss, examples_per_s=700.0, plan=self._plan)
            )
            if step % STEPS_BETWEEN_CHECKPOINTS == 0:
                self._take(CheckpointCommitted(step=step))
        self._take(Notice(text=HOSTILE, warning=True))

    def _take(self, event: Any, after_s: float = 0.0) -> None:
        self.chronicle.add_event(event, self._now_s + after_s)

    def _morph(self, step: int) -> None:
        old, self._plan = self._plan, plan_of(self._drawn.randrange(30, 51))
        self._generation += step > 0
        begun = GenerationRecord(
            generation=self._generation,
            plan=self._plan,
            members=WORKERS,
            cause="a machine was preempted",
            first_step=step,
        )
        done = begun.model_copy(update={"recovery_seconds": 2.0, "steps_redone": 1})
        self._take(WorkerLost(worker="n3.0", rank=3, cause=HOSTILE))
        self._take(GenerationStarted(record=begun))
        self._take(Morphed(record=done, old_plan=old), 2)

    def status(self) -> dict[str, Any]:
        """As the manager's; every second each worker does something else."""
        return {
            "state": f"training: {HOSTILE}",
            "steps": 10**6,
            "checkpoint_dir": HOSTILE,
            "lease_s": 6.0,
            "generation": self._generation,
            "plan": shown_plan(self._plan),
            "members": list(WORKERS[: self._plan.workers]),
            "nodes": [HOSTILE],
            "workers": [self._worker(rank, name) for rank, name in enumerate(WORKERS)],
            "failures": [{"worker": "n3.0", "cause": HOSTILE}],
            "lost_workers": 1500,
        }

    def _worker(self, rank: int, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "node": name[:-2],
            "state": "joined",
            "rank": rank,
            "pid": 1,
            "activity": f"{HOSTILE} in step {STEPS + self.seconds}",
            "silent_s": 9.0 if rank == 7 else 0.2 + self.seconds % 2 / 10,
            "device": HOSTILE,
            "compute_s": 0.05 if rank != 8 else 0.2,
            "slow": None,
            "condition": "silent" if rank == 7 else "slow" if rank == 8 else "ok",
            "words": f"silent for 9.0 s {HOSTILE}" if rank == 7 else "works",
        }


class Served(NamedTuple):
    """A week's page."""

    serving: Serving
    logins: Logins
    feed: LiveFeed

    @property
    def link(self) -> str:
        """A link that lets a browser in once."""
        return f"http://127.0.0.1:{self.serving.port}/#login={self.logins.invite()}"


@contextmanager
def served(week: Week, logs: Path) -> Iterator[Served]:
    """Serve the page of a week, as the manager does.

    Args:
        week: what happened.
        logs: folder of the workers' logs.
    """
    logins, feed = Logins(), LiveFeed(week.chronicle, week.status)
    api = OperatorApi(
        status=week.status,
        logs=logs,
        ask=lambda event: False,
        audit=Audit(lambda event: None),
        feed=feed,
        logins=logins,
    )
    serving = Serving(port=0, max_frame_bytes=4096)
    serving.start(Starlette(routes=api.routes()))
    try:
        yield Served(serving, logins, feed)
    finally:
        feed.close()
        serving.stop()
