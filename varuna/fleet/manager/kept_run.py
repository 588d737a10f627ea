"""A run that has no manager any more, from what its folder keeps: the same page, for reading only."""

from pathlib import Path

from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.page.live_feed import LiveFeed
from varuna.fleet.page.logins import Logins
from varuna.fleet.page.status import shown_plan
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.past_events import PastStep, carried, events_and_steps, kept_job
from varuna.fleet.state.run_events import GenerationStarted


class KeptRun:
    """The newest run in a folder.

    Raises:
        UsageError: there is none, or it is another version's.
    """

    def __init__(self, folder: Path) -> None:
        self.chronicle = Chronicle()
        self._plan: dict[str, object] | None = None
        self._generation = -1
        self._job, self._newest_s = kept_job(folder), 0.0
        self.chronicle.carry(carried(folder))
        for time_s, event in events_and_steps(folder):
            self._newest_s = time_s
            if isinstance(event, PastStep):
                self.chronicle.take_step(event)
                continue
            self.chronicle.take(event, time_s)
            if isinstance(event, GenerationStarted):
                self._plan, self._generation = shown_plan(event.record.plan), event.record.generation
        self.folder = folder
        self.logs = folder / "logs" if (folder / "logs").is_dir() else folder

    @property
    def has_ended(self) -> bool:
        """Whether it ended; otherwise its manager is gone, or cannot be reached."""
        return self.chronicle.exit_code is not None

    def status(self) -> dict[str, object]:
        """As a manager's, of a run that nobody works for."""
        job, exit_code = self._job, self.chronicle.exit_code
        steps = job.steps if job is not None else 0
        return {
            "state": "without a manager" if exit_code is None else f"ended with exit code {exit_code}",
            "read_only": True,
            "steps": steps,
            "checkpoint_dir": job.checkpoint_dir if job is not None else None,
            "rescues": job is not None and job.rescues,
            "generation": self._generation,
            "plan": self._plan,
            "members": list(self.chronicle.members),
            "nodes": [],
            "workers": [],
            **self.chronicle.reckoned(steps, self._newest_s),
        }


def kept_api(run: KeptRun, feed: LiveFeed, logins: Logins) -> OperatorApi:
    """Return the API to a run without a manager. It reads only: without an operator's token nothing is changed."""
    return OperatorApi(
        status=run.status,
        logs=run.logs,
        run_dir=run.folder,
        ask=lambda event: False,
        audit=Audit(lambda event: None),
        feed=feed,
        logins=logins,
    )
