"""Messages between workers and the manager: JSON, one message per WebSocket frame."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from varuna.core.devices import DeviceFacts, DeviceFault
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.saved import SavedShard
from varuna.core.sums import HeldSums, StepAssignment
from varuna.core.times import RankTimeline, RankTimes
from varuna.core.value import Value
from varuna.core.vote import StepTotals, Tally

MAX_FRAME_BYTES = 64 * 2**20
"""The largest message: more than any vote needs, which is 8 million numbers of 8 digits."""
MAX_KEY, MAX_VALUE_BYTES, MAX_KEYS = 200, 16 * 2**10, 4096
"""Limits on what members offer each other: an address takes 60 bytes, an NCCL identity 256."""

PROFILE_PART_BYTES, PROFILE_PARTS, PROFILE_STEPS = 2**20, 32, 20
"""Most bytes in a piece of a profile, pieces of it, and steps that it may be of."""

MAX_WORK_BYTES = 4 * 2**20
"""Most that one worker does for others may come to: a captured model of 54 layers takes 0.1 MB."""

Key = Annotated[str, Field(max_length=MAX_KEY)]

# -- values inside messages ------------------------------------------------------------------------


class Vote(Value):
    """The summed vector of a step. A rank that holds it may commit the step.

    Once another step follows, only the totals are still needed: see ``shortened``.
    """

    generation: int
    step: int
    vector: tuple[float, ...]
    wall_s: float = Field(default=0.0, description="seconds that the step took on the sender")
    tally: Tally | None = Field(default=None, description="what is written down of the step")

    @property
    def is_whole(self) -> bool:
        """Whether it has the whole vector, with which the step can be applied."""
        return bool(self.vector) or self.tally is None

    def shortened(self) -> "Vote":
        """Return the vote without its vector, which has several numbers for each micro-batch."""
        return self if self.tally is None else self.model_copy(update={"vector": ()})


class Transfer(Value):
    """Copy of one section's state, or of sums, between two ranks of a new generation."""

    section: int
    source_rank: int
    target_rank: int
    lent: bool = Field(default=False, description="without its optimizer state, which other ranks will hold")
    sums: bool = Field(
        default=False, description="in place of state, the sums of gradients of a step that was broken off"
    )
    copied: bool = Field(default=False, description="of those, the copy of another rank's that the source kept")
    follows: bool = Field(
        default=False, description="its optimizer state, which only an update needs, comes while the first step runs"
    )


class Relay(Value):
    """A machine that joins connections of workers which cannot reach each other; ``word`` shows that they may ask."""

    host: str = Field(max_length=255)
    port: int = Field(ge=1, le=65535)
    word: str = Field(pattern=r"^[0-9a-f]{16}$")


class Assignment(Value):
    """A worker's part in a generation. Ranks from P*D on are spares: they only serve transfers.

    It says what this worker needs and no more: of thousands, each gets one.
    """

    generation: int
    plan: Plan
    rank: int
    members: int = Field(ge=1, description="number of ranks; spares come last")
    next_step: int = Field(ge=0, description="first step that this generation runs")
    transfers: tuple[Transfer, ...] = Field(default=(), description="those in which this rank takes part")
    lost_replicas: tuple[int, ...] = Field(
        default=(),
        description="of the stage that this worker had in the newest generation that trained: their workers are gone, "
        "and what they have not saved falls to their peers",
    )
    rest: StepAssignment | None = Field(
        default=None, description="of the first step, if sums of gradients are kept from it"
    )
    copy_to: int | None = Field(
        default=None, description="rank that keeps copies of what this rank has, as the plan says, if any does"
    )
    copy_from: int | None = Field(default=None, description="rank of whose the same this rank keeps copies, if any")
    checkpoint: str | None = Field(default=None, description="place of the checkpoint to restore, if any")
    fresh: bool = Field(default=False, description="start from the model's own initialisation")
    from_memory: bool = Field(
        default=False, description="from the memory checkpoint of ``next_step``, not from the newest state"
    )
    memory_steps: tuple[int, ...] = Field(
        default=(), description="of memory checkpoints that members have among them and may need: no other is"
    )
    losses_per_hour: float = Field(
        default=0.0, ge=0, description="of workers, as the plan was made for; 0: none was seen"
    )
    secret: str = Field(default="", description="that members know and others do not; empty: it is not asked for")
    relays: tuple[Relay, ...] = Field(default=(), description="for members that cannot reach each other")

    @property
    def is_spare(self) -> bool:
        """Whether this rank is outside of the pipeline grid."""
        return self.rank >= self.plan.workers

    @property
    def goes_on(self) -> bool:
        """Whether it begins with the state that workers hold; else steps that they contain may run again."""
        return not self.fresh and self.checkpoint is None and not self.from_memory


# -- worker to manager -------------------------------------------------------------------------------


class Hello(Value):
    """A warm worker asks to join: its model is captured and it could run at once."""

    kind: Literal["hello"] = "hello"
    worker: str
    pid: int
    version: str
    job: JobFacts
    device: DeviceFacts | None = Field(default=None, description="if it has memory of its own")
    device_class: str = Field(default="", max_length=255, description="workers of one are as fast; empty: unknown")
    measured: str = Field(default="", description="JSON of what its sections take, for plans; empty: not measured")
    training: int = Field(default=0, ge=0, description="which of the script's trainings it is, in their order")


class WorkerPhase(StrEnum):
    """The phase of a worker's training thread, by which others decide or show something."""

    FORMS = "forms"
    """it gets ready for its generation, and runs no step of it yet"""
    CHECKS = "checks"
    """the same, before step 0: it makes first values, and compares the model with plain PyTorch"""
    STEPS = "steps"
    LOOP = "loop"
    """it runs the user's code between two steps"""
    OTHER = "other"

    @property
    def is_forming(self) -> bool:
        """Whether its generation has not begun."""
        return self in (WorkerPhase.FORMS, WorkerPhase.CHECKS)

    @property
    def is_running(self) -> bool:
        """Whether all members of its generation have had their state: it began after that."""
        return self in (WorkerPhase.STEPS, WorkerPhase.LOOP)


class Beat(Value):
    """Sign of life, once a second; ``activity`` is what the training thread does or waits for, in words for people."""

    kind: Literal["beat"] = "beat"
    generation: int
    step: int
    activity: str
    phase: WorkerPhase = WorkerPhase.OTHER
    at_work: bool = Field(default=False, description="it waits for no other rank")
    waits_s: float = Field(default=0.0, description="for how long it has been in its wait for other ranks")
    whole: bool = Field(default=True, description="no optimizer state is on its way to it from other ranks")
    forward_s: float | None = Field(default=None, description="compute of a forward, mean since the last beat")
    backward_s: float | None = Field(default=None, description="compute of a backward, recomputation included")
    times: RankTimes | None = Field(default=None, description="what the steps since the last beat took")


class HeldCheckpoint(Value):
    """A worker's parts of a memory checkpoint."""

    generation: int = Field(ge=0, description="in which it was made")
    step: int = Field(ge=0, description="steps that the state contains")
    sections: tuple[int, ...]


class StopReport(Value):
    """Report of a worker that has stopped generation ``generation``, with what it holds.

    ``next_step`` counts the steps that its parameters contain (None: it has no state); ``sections`` are those that
    it holds whole, ``lent`` those whose optimizer state is with other replicas; ``votes`` are the newest vote results
    that it knows, so that no committed step goes unrecorded; ``sums`` what it has of a step that was broken off,
    ``wrong_sums`` that a vote has shown those of all ranks, and copies of them, to be wrong; ``copies`` are sections of
    another rank that it keeps, whole and at the same step; ``checkpoints`` what it has of memory checkpoints, its
    own and another rank's part.
    """

    kind: Literal["held"] = "held"
    generation: int
    next_step: int | None
    sections: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    votes: tuple[Vote, ...] = ()
    sums: HeldSums | None = None
    wrong_sums: bool = False
    copies: tuple[int, ...] = ()
    checkpoints: tuple[HeldCheckpoint, ...] = Field(default=(), max_length=16)


class Voted(Value):
    """Rank 0 of a generation reports a committed step."""

    kind: Literal["voted"] = "voted"
    vote: Vote


class Offered(Value):
    """A value by which other members of ``generation`` find this one, or know of it; a newer one may follow."""

    kind: Literal["offered"] = "offered"
    generation: int
    key: Key
    value: bytes = Field(max_length=MAX_VALUE_BYTES)


class Sought(Value):
    """Keys that this member needs of others: what is offered by then is answered at once, the rest once it is."""

    kind: Literal["sought"] = "sought"
    generation: int
    keys: tuple[Key, ...] = Field(max_length=MAX_KEYS)


class WorkSought(Value):
    """Question for what others of the run need, too, such as the captured model. Asked again until it is answered.

    There is an answer each time, and one more when it is done.
    """

    kind: Literal["work_sought"] = "work_sought"
    key: Key


class WorkOffered(Value):
    """Work that this worker has done for others; empty: each of them has to do it."""

    kind: Literal["work_offered"] = "work_offered"
    key: Key
    data: bytes = Field(max_length=MAX_WORK_BYTES)


class Suspect(Value):
    """A link broke or a bound passed: evidence, not a verdict. Or this worker cannot do its part, and says why."""

    kind: Literal["suspect"] = "suspect"
    generation: int
    reason: str
    fault: DeviceFault | None = Field(default=None, description="that no other rank has caused: too little memory")
    peer: int | None = Field(default=None, ge=0, description="the rank to which nothing gets through")


class Saved(Value):
    """Report that a shard is durable."""

    kind: Literal["saved"] = "saved"
    shard: SavedShard


class Unsaved(Value):
    """Report that the worker's part of a checkpoint is not written; the run continues, and tries the next one."""

    kind: Literal["unsaved"] = "unsaved"
    reason: str


class Failed(Value):
    """Report that the worker's own code raised, or its device failed; the process ends after this."""

    kind: Literal["failed"] = "failed"
    summary: str
    traceback: str
    exit_code: int = 1
    fault: DeviceFault | None = Field(default=None, description="of its device, which another worker need not meet")
    accused: int | None = Field(default=None, ge=0, description="rank that has read another sample than the sender")


class Leaving(Value):
    """Report that the worker's loop is over: all steps ran, or the stop flag was voted."""

    kind: Literal["leaving"] = "leaving"
    step: int = Field(description="steps committed")
    training: int = Field(default=0, ge=0, description="of the script")


class StepShown(Value):
    """The answer to ``ShowStep``, once the step is over."""

    kind: Literal["step_shown"] = "step_shown"
    step: int
    timeline: RankTimeline | None = Field(description="None: the worker has not run the step, or not kept it")


class ProfilePart(Value):
    """A piece of what ``ProfileSteps`` asked for; or why there is nothing, in the only piece."""

    kind: Literal["profile_part"] = "profile_part"
    first: int
    number: int = Field(ge=0)
    count: int = Field(ge=1)
    data: bytes = Field(default=b"", max_length=2 * PROFILE_PART_BYTES, description="of a Chrome trace, gzipped")
    failure: str | None = Field(default=None, max_length=1000)


Shown = StepShown | ProfilePart
"""Answers that workers give only if they are asked; they change nothing in the run."""

FromWorker = Annotated[
    Hello
    | Beat
    | StopReport
    | Voted
    | Offered
    | Sought
    | WorkSought
    | WorkOffered
    | Suspect
    | Saved
    | Unsaved
    | Failed
    | Leaving
    | StepShown
    | ProfilePart,
    Field(discriminator="kind"),
]

# -- manager to worker -------------------------------------------------------------------------------


class Hold(Value):
    """Order to stop generation ``generation`` at the next safe point, and to answer ``StopReport``."""

    kind: Literal["hold"] = "hold"
    generation: int


Flag = Literal["stop", "regroup", "checkpoint"]
"""Requests that the manager may make of all ranks at once, through the vote of a step."""


class RaiseFlag(Value):
    """Order to rank 0 to raise ``flag`` in the next vote, so that all ranks act on it after the same step."""

    kind: Literal["raise_flag"] = "raise_flag"
    generation: int
    flag: Flag = "regroup"


class Apply(Value):
    """Order to apply the step in flight with this vote, since the verdict is COMMIT, and to answer ``StopReport``."""

    kind: Literal["apply"] = "apply"
    generation: int
    vote: Vote


class Assign(Value):
    """Order to take this part in a new generation."""

    kind: Literal["assign"] = "assign"
    assignment: Assignment


class Found(Value):
    """Values that other members of ``generation`` have published, by key."""

    kind: Literal["found"] = "found"
    generation: int
    values: dict[str, bytes]


class WorkFound(Value):
    """Work that another worker has done; empty: this one is to do and offer it, unless ``doer`` does it now."""

    kind: Literal["work_found"] = "work_found"
    key: Key
    data: bytes = b""
    doer: str = Field(default="", description="worker that does it now, if any does")


class Recorded(Value):
    """Report that all votes up to ``step`` are on the manager's disk."""

    kind: Literal["recorded"] = "recorded"
    step: int


class Finish(Value):
    """Order to end: the run is over for this worker."""

    kind: Literal["finish"] = "finish"
    failure: str | None = Field(default=None, description="how it failed, if it did")
    training: int = Field(default=0, ge=0, description="the newest of the script's trainings that has begun")


class LastStep(Value):
    """The last step of a training, which the loop of a worker that comes later is given."""

    step: int = Field(ge=0)
    totals: StepTotals
    wall_s: float


class TrainingOver(Value):
    """Order to continue behind the loop of this training, which others have ended, with what it has left."""

    kind: Literal["training_over"] = "training_over"
    training: int = Field(ge=0)
    steps: int = Field(ge=0, description="that it has made")
    last: LastStep | None = Field(
        default=None, description="the last of them; None: the loop has had all turns that count, or nothing is known"
    )
    is_main: bool = Field(default=False, description="you were rank 0 when it ended")


class ShowStep(Value):
    """Order to tell what this worker did in ``step``, once that is over."""

    kind: Literal["show_step"] = "show_step"
    step: int


class ProfileSteps(Value):
    """Order to run PyTorch's profiler around steps ``first`` to ``last``, and to tell what it saw."""

    kind: Literal["profile_steps"] = "profile_steps"
    first: int
    last: int


ShowRequest = ShowStep | ProfileSteps

ToWorker = Annotated[
    Hold | RaiseFlag | Apply | Assign | Found | WorkFound | Recorded | Finish | TrainingOver | ShowStep | ProfileSteps,
    Field(discriminator="kind"),
]

from_worker: TypeAdapter[FromWorker] = TypeAdapter(FromWorker)
to_worker: TypeAdapter[ToWorker] = TypeAdapter(ToWorker)
