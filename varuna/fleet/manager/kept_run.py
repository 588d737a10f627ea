"""A run that has no manager any more, from what its folder keeps: the same page, for reading only."""

from pathlib import Path

from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.page.live_feed import LiveFeed
from varuna.fleet.page.logins import Logins
from varuna.fleet.page.status import shown_plan
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.past_events import kept_job


class KeptRun:
    """The newest run in a folder.

    Raises:
        UsageError: there is none, or it is another version's.
    """

    def __init__(self, folder: Path) -> None:
        self.chronicle, self._job = Chronicle(), kept_job(folder)
        self.chronicle.read(folder)
        self.folder = folder
        self.logs = folder / "logs" if (folder / "logs").is_dir() else folder

    @property
    def has_ended(self) -> bool:
        """Whether it ended; otherwise its manager is gone, or cannot be reached."""
        return self.chronicle.exit_code is not None

    def status(self) -> dict[str, object]:
        """As a manager's, of a run that nobody works for."""
        job, record, exit_code = self._job, self.chronicle.record, self.chronicle.exit_code
        steps = job.steps if job is not None else 0
        return {
            "state": "without a manager" if exit_code is None else f"ended with exit code {exit_code}",
            "read_only": True,
            "steps": steps,
            "checkpoint_dir": job.checkpoint_dir if job is not None else None,
            "rescues": job is not None and job.rescues,
            "generation": -1 if record is None else record.generation,
            "plan": None if record is None else shown_plan(record.plan),
            "members": [] if record is None else list(record.members),
            "nodes": [],
            "workers": [],
            **self.chronicle.reckoned(steps, self.chronicle.newest_s),
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
