"""Plans by number of workers, each made once."""

from varuna.calibration.format import Calibration
from varuna.core.errors import NoPlanError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.planner.choose import plan_run


class Plans:
    """The planner for one job; m is chosen once, for the largest cluster of the trace, and kept.

    Raises:
        NoPlanError: not even the largest number of workers can run the job.
    """

    def __init__(self, job: JobFacts, calibration: Calibration, most_workers: int) -> None:
        self._job, self._calibration = job, calibration
        self._known: dict[int, Plan | NoPlanError] = {}
        first = plan_run(job, workers=most_workers, calibration=calibration, micro_batch=job.micro_batch)
        self.micro_batch = first.micro_batch
        self._known[most_workers] = first

    def __call__(self, job: JobFacts, workers: int, micro_batch: int | None) -> Plan:
        """The best plan for at most this many workers.

        Raises:
            NoPlanError: none fits.
        """
        if workers not in self._known:
            try:
                self._known[workers] = plan_run(
                    self._job, workers=workers, calibration=self._calibration, micro_batch=self.micro_batch
                )
            except NoPlanError as error:
                self._known[workers] = error
        found = self._known[workers]
        if isinstance(found, NoPlanError):
            raise found
        return found

    def step_s(self, workers: int) -> float:
        """Seconds of a step of the best plan; infinite if there is none."""
        try:
            return self(self._job, workers, None).step_s if workers else float("inf")
        except NoPlanError:
            return float("inf")
