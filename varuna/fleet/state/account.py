"""The account of what a run has used up in its earlier starts."""

from pydantic import Field

from varuna.core.value import Value


class Account(Value):
    """Sums over all starts that have ended; the run folder keeps them, so that the next start goes on from there."""

    wall_s: float = Field(default=0.0, ge=0, description="from each start to its end")
    worker_s: float = Field(default=0.0, ge=0, description="of all workers, from joining to leaving")
    unpriced_s: float = Field(default=0.0, ge=0, description="of worker_s: nobody had said what a worker costs")
    dollars: float = Field(default=0.0, ge=0)
    steps: int = Field(default=0, ge=0, description="that count")
    worked_s: float = Field(default=0.0, ge=0, description="that workers spent in these steps")
    saving_s: float | None = Field(
        default=None, ge=0, description="from the end of a step until its checkpoint was complete, the longest seen"
    )
