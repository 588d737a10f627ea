"""Plans by number of workers and rate of losses, each made once."""

from varuna.calibration.format import Calibration
from varuna.core.devices import WorkerGroups, equal_workers
from varuna.core.errors import NoPlanError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.planner.choose import plan_run


class Plans:
    """The planner for one job; m is chosen once, for the largest cluster of the trace, and kept.

    Raises:
        NoPlanError: not even the largest number of workers can run the job.
    """

    def __init__(self, job: JobFacts, calibration: Calibration, most_workers: int, *, copies: bool = False) -> None:
        self._job, self._calibration, self._copies = job, calibration, copies
        self._known: dict[tuple[WorkerGroups, float], Plan | NoPlanError] = {}
        first = plan_run(
            job, workers=equal_workers(most_workers), calibration=calibration, micro_batch=job.micro_batch, copies=True
        )
        self.micro_batch = first.micro_batch

    def __call__(self, job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        """The best plan for at most these workers, at the job's rate of losses.

        Raises:
            NoPlanError: none fits.
        """
        asked = workers, job.losses_per_hour
        if asked not in self._known:
            try:
                self._known[asked] = plan_run(
                    self._job.model_copy(update={"losses_per_hour": job.losses_per_hour}),
                    workers=workers,
                    calibration=self._calibration,
                    micro_batch=self.micro_batch,
                    copies=self._copies,
                )
            except NoPlanError as error:
                self._known[asked] = error
        found = self._known[asked]
        if isinstance(found, NoPlanError):
            raise found
        return found

    def step_s(self, workers: int) -> float:
        """Seconds of a step of the fastest plan; infinite if there is none."""
        try:
            return self(self._job, equal_workers(workers), None).step_s if workers else float("inf")
        except NoPlanError:
            return float("inf")
