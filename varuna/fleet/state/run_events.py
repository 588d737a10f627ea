"""The events of a run that are worth a line in the journal, on the terminal and on the web page."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from varuna.core.messages import LastStep, Vote
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.sums import RemainingWork
from varuna.core.times import RankTimes, StepParts
from varuna.core.value import Value


class GenerationRecord(Value):
    """One generation: why it began, what it cost, and what it runs."""

    generation: int
    training: int = Field(default=0, description="of the script, from 0")
    began: int = Field(default=0, description="the first generation of that training")
    plan: Plan
    members: tuple[str, ...] = Field(description="worker of each rank; spares come last")
    cause: str = Field(description="why the generation before it ended, in words")
    first_step: int
    steps_redone: int = Field(default=0, description="a step in flight that was lost, and steps undone by a rollback")
    kept_micro_batches: int = Field(default=0, description="of the step in flight: those that do not run again")
    remainder: RemainingWork | None = Field(
        default=None, description="what of the step in flight has to run, until it is recorded; None: all of it"
    )
    keepers: tuple[int | None, ...] = Field(
        default=(), description="by rank of the grid: who keeps copies of what it has; (): nobody, for none"
    )
    moved_sections: int = Field(default=0, description="section states copied between workers")
    losses_per_hour: float = Field(default=0.0, description="that the plan was made for, as seen; 0: nothing was")
    rollback: bool = Field(
        default=False, description="state came from a checkpoint, in a store or in memory, or from the beginning"
    )
    checkpoint: str | None = None
    from_memory: bool = Field(default=False, description="of a rollback: to a memory checkpoint, and to no other")
    memory_steps: tuple[int, ...] = Field(default=(), description="of memory checkpoints that it may go back to")
    recovery_seconds: float | None = Field(default=None, description="from the loss to the first recorded step")

    @cached_property
    def grid(self) -> tuple[str, ...]:
        """The members that run a stage; the others are spares."""
        return self.members[: self.plan.workers]

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Rank of each member; below ``plan.workers`` in the grid."""
        return {name: rank for rank, name in enumerate(self.members)}

    @cached_property
    def _owners(self) -> Mapping[int, int]:
        return {keeper: rank for rank, keeper in enumerate(self.keepers) if keeper is not None}

    def copied_from(self, rank: int) -> int | None:
        """The rank whose state or sums a rank keeps copies of, if any."""
        return self._owners.get(rank)

    def copied_to(self, rank: int) -> int | None:
        """The rank that keeps copies of a rank's state or sums, if any does."""
        return self.keepers[rank] if rank < len(self.keepers) else None

    def has_seat(self, name: str) -> bool:
        """Return whether a worker is in the grid."""
        return self.ranks.get(name, self.plan.workers) < self.plan.workers


class WorkerJoined(Value):
    """A warm worker has joined."""

    kind: Literal["worker_joined"] = "worker_joined"
    worker: str
    pid: int


class WorkerLost(Value):
    """A worker is gone, or was fenced off."""

    kind: Literal["worker_lost"] = "worker_lost"
    worker: str
    rank: int | None
    cause: str


class WorkerLeft(Value):
    """A worker that the run did not need any more has ended, as when its machine is drained."""

    kind: Literal["worker_left"] = "worker_left"
    worker: str


class Priced(Value):
    """The price of a worker from now on."""

    kind: Literal["priced"] = "priced"
    per_hour: float = Field(ge=0, description="dollars per worker and hour")
    on_demand_per_hour: float | None = Field(default=None, ge=0, description="the same of one that is not taken back")


class Budgeted(Value):
    """Limits on what the run may use up, all its starts together; None: as much as it takes."""

    kind: Literal["budgeted"] = "budgeted"
    max_dollars: float | None = Field(default=None, gt=0)
    max_hours: float | None = Field(default=None, gt=0)


class VerdictReached(Value):
    """COMMIT of the step in flight: it is binding once it is on disk, whoever dies next."""

    kind: Literal["verdict_reached"] = "verdict_reached"
    generation: int
    vote: Vote
    laggards: tuple[str, ...]


class GenerationStarted(Value):
    """A generation begins; its members are about to get their parts."""

    kind: Literal["generation_started"] = "generation_started"
    record: GenerationRecord


class Morphed(Value):
    """A generation after the first one recorded its first step: the morph is over."""

    kind: Literal["morphed"] = "morphed"
    record: GenerationRecord
    old_plan: Plan


class StepRecorded(Value):
    """A step is committed and known to the manager."""

    kind: Literal["step_recorded"] = "step_recorded"
    step: int
    generation: int
    loss: float
    examples_per_s: float
    plan: Plan
    weight: float = Field(default=0.0, description="target tokens, or examples, that the step counted")
    counted: int | None = Field(default=None, description="micro-batches that put a weight into the vote")
    training: int = Field(default=0, description="of the script, from 0")


class GenerationTimed(Value):
    """Times of a generation's steps so far, by stage."""

    kind: Literal["generation_timed"] = "generation_timed"
    generation: int
    predicted_s: float = Field(description="of a step, by what was known when the times were told")
    is_nominal: bool = Field(default=False, description="that was operation counts alone, and nothing measured")
    predicted: StepParts | None = Field(default=None, description="the same in parts, where times were measured")
    stages: tuple[RankTimes, ...]


class WaitsSplit(Value):
    """Waits of one step by their reasons and by stage: means over the replicas, in seconds of that step."""

    kind: Literal["waits_split"] = "waits_split"
    generation: int
    step: int
    transfer_s: tuple[float, ...] = Field(description="while the message was on its way")
    idle_s: tuple[float, ...] = Field(
        description="for any other reason: it was not made yet, or samples were not there"
    )
    uncertain_s: float = Field(description="how far apart clocks of machines may be; 0 where all ranks share one")


class CheckpointCommitted(Value):
    """A checkpoint is complete: all its parts are in the store, and so is the manifest that makes them one."""

    kind: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: int = Field(description="steps that it contains")


class Notice(Value):
    """Something that a person should read."""

    kind: Literal["notice"] = "notice"
    text: str
    warning: bool = False
    departs: bool = Field(default=False, description="a machine will leave, or may be taken away: marked on curves")


class Audited(Value):
    """A change of the run from outside, or one that was refused."""

    kind: Literal["audited"] = "audited"
    action: str
    address: str
    allowed: bool
    why: str = ""


class Asked(Value):
    """A request that was accepted: it binds managers to come, too."""

    kind: Literal["asked"] = "asked"
    what: Literal["stop", "drain", "morph"]
    node: str = ""
    reason: str = ""


class Answered(Value):
    """The answer to what was asked for: it is done, or cannot be; of a morph, a new generation says the same."""

    kind: Literal["answered"] = "answered"
    what: Literal["drain", "morph"]
    node: str = ""


class TrainingEnded(Value):
    """A training of the script is over, and workers begin the next one."""

    kind: Literal["training_ended"] = "training_ended"
    training: int = Field(description="of the script, from 0")
    job: JobFacts = Field(description="what it trained")
    steps: int = Field(description="that it has made")
    last: LastStep | None = Field(default=None, description="what a worker's loop lacks that comes later")


class RunEnded(Value):
    """The run is over; no event follows."""

    kind: Literal["run_ended"] = "run_ended"
    exit_code: int
    text: str
    worker: str | None = Field(default=None, description="whose failure ended it")


RunEvent = Annotated[
    WorkerJoined
    | WorkerLost
    | WorkerLeft
    | Priced
    | Budgeted
    | VerdictReached
    | GenerationStarted
    | Morphed
    | StepRecorded
    | GenerationTimed
    | WaitsSplit
    | CheckpointCommitted
    | Notice
    | Audited
    | Asked
    | Answered
    | TrainingEnded
    | RunEnded,
    Field(discriminator="kind"),
]
