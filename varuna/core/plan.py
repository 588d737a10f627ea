"""A plan: the way in which P stages x D replicas run a global batch, and the part of each rank.

Index conventions, here and everywhere: all count from 0.

    section       part of the model, the same on all ranks and at every P; a stage is a range of sections
    stage k       in [0, P); with unlike pipelines, each has a P of its own
    replica d     in [0, D); the pipelines of the plan's first entry come first
    rank          d P + k: stages of a pipeline are neighbours. With P = 2, D = 3:

                      replica      0      1      2
                      stage 0      0      2      4       peers_of(2) = 0, 2, 4: they reduce gradients
                      stage 1      1      3      5       ranks_of(1) = 2, 3: they pass activations

    micro-batch j in [0, N), over all replicas of a step; its samples are [j m, (j + 1) m) of the global batch
"""

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from pydantic import Field, model_validator

from varuna.core.dealing import are_speeds, ends_of_shares, pipeline_speeds
from varuna.core.devices import WorkerGroups, by_class, speeds_of
from varuna.core.value import Value


class Copies(StrEnum):
    """The part of each stage that has a copy in the memory of another rank, or the reason why none has."""

    NONE = "none"
    """no copies were asked for, or there is no other rank"""
    STATE = "state"
    """its state, which no other rank holds, every few steps, and in long ones its sums of gradients"""
    SUMS = "sums"
    """its sums of gradients: other replicas hold its state"""
    MEMORY = "memory"
    """there is no room for it"""
    TIME = "time"
    """copies would take more of a step than they are worth, or never be ready"""

    @property
    def are_made(self) -> bool:
        """Whether there are any."""
        return self in (Copies.STATE, Copies.SUMS)


class Place(NamedTuple):
    """A rank's seat in the grid."""

    replica: int
    stage: int


class StageSlot(NamedTuple):
    """A stage of pipelines that are divided alike."""

    sections: range
    ranks: tuple[int, ...]
    """that run it, by replica"""


class Pipeline(Value):
    """Pipelines of a plan that are divided alike: what each stage runs and keeps, and how many of them there are."""

    replicas: int = Field(default=1, ge=1, description="how many of them")
    pace: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="micro-batches that one runs while one of the plan's first runs 1, both of full speed",
    )
    speeds: tuple[float, ...] = Field(
        default=(),
        description="by pipeline, fastest first: what its slowest worker computes while one of full speed computes 1; "
        "() where all are as fast",
    )
    bounds: tuple[int, ...] = Field(
        description="first section of each stage, ascending from 0, and the number of sections of the model"
    )
    stash_limits: tuple[int, ...] = Field(description="most micro-batches in flight, by stage (n_k)")
    kept: tuple[int, ...] = Field(
        default=(), description="by stage: how many of its last sections keep their activations; () for none"
    )
    stash_on_device: tuple[int, ...] = Field(
        default=(),
        description="by stage: of the stash_limits inputs that wait for R, how many stay on the device, while the "
        "others wait in host memory; () for all",
    )
    split_last: int = Field(default=0, ge=0, description="backwards at a pipeline's end that run as I and W")
    empties: bool = Field(
        default=False, description="the stage before the last runs empty again and again, and needs fewer R's"
    )
    memory_bytes: tuple[int, ...] = Field(default=(), description="predicted peak, by stage")
    host_bytes: tuple[int, ...] = Field(
        default=(), description="predicted peak of host memory: optimizer state and stash, by stage; () for none"
    )
    device_class: str = Field(default="", description="of the workers that run it; empty: any")
    stage_classes: tuple[str, ...] = Field(
        default=(), description="the same by stage, where a pipeline runs on several classes; () where it does not"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Pipeline":
        stages, names = self.stages, ("stash_limits", "kept", "stash_on_device", "stage_classes")
        if stages < 1 or self.bounds[0] != 0 or any(a >= b for a, b in pairwise(self.bounds)):
            raise ValueError(f"bounds {self.bounds} do not ascend from 0 to the number of sections")
        for name in names:
            values = getattr(self, name)
            if len(values) != stages and (values or name == "stash_limits"):
                raise ValueError(f"{name} {values} must give a value for each of {stages} stages")
        if min(self.stash_limits) < 1:
            raise ValueError(f"stash_limits {self.stash_limits} must give each of {stages} stages at least 1")
        for stage, kept in enumerate(self.kept):
            if not 0 <= kept <= len(self.sections_of(stage)):
                raise ValueError(f"stage {stage} has {len(self.sections_of(stage))} sections and cannot keep {kept}")
        for stage, (stay, limit) in enumerate(zip(self.stash_on_device, self.stash_limits, strict=False)):
            if not 0 <= stay <= limit:
                raise ValueError(f"stage {stage} has a stash of {limit} and cannot leave {stay} of it on the device")
        if self.stage_classes and self.device_class:
            raise ValueError(
                f"stage_classes {self.stage_classes} and device_class {self.device_class!r} exclude each other"
            )
        if self.speeds and (len(self.speeds) != self.replicas or not are_speeds(self.speeds)):
            raise ValueError(f"{self.replicas} speeds, more than 0 and at most 1, fastest first, are not {self.speeds}")
        return self

    @property
    def stages(self) -> int:
        """P."""
        return len(self.bounds) - 1

    @property
    def starts(self) -> tuple[int, ...]:
        """First section of each stage."""
        return self.bounds[:-1]

    @property
    def sections(self) -> int:
        """Sections of the model."""
        return self.bounds[-1]

    @property
    def strength(self) -> float:
        """Number of pipelines of full speed that are as fast."""
        return sum(self.speeds) or self.replicas

    def class_of(self, stage: int) -> str:
        """Return the class of the devices that run ``stage``; empty: any."""
        return self.stage_classes[stage] if self.stage_classes else self.device_class

    def sections_of(self, stage: int) -> range:
        """Return the sections that ``stage`` runs."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def kept_sections_of(self, stage: int) -> range:
        """Return those of ``sections_of(stage)`` that keep their activations from F; R runs the others only."""
        sections = self.sections_of(stage)
        return sections[len(sections) - self.kept[stage] :] if self.kept else sections[len(sections) :]

    def keeps_all(self, stage: int) -> bool:
        """Return whether ``stage`` has nothing to recompute, so that its micro-batches need no R."""
        return len(self.kept_sections_of(stage)) == len(self.sections_of(stage))

    def stage_of(self, section: int) -> int:
        """Return the stage that runs ``section``."""
        # ``bounds`` ascend from 0, so the last one at or below the section is its stage's first.
        return bisect_right(self.bounds, section) - 1


class Plan(Value):
    """D pipelines that run a global batch: micro-batches of m examples, the sections of each stage, and a prediction.

    Mostly all are divided alike, into P stages: then ``pipelines`` has one entry. It has more where they are unlike, so
    that no worker is left over, or run on devices of several classes; those of the first entry come first.

    Global micro-batch j is samples [j*m, (j+1)*m) of the global batch; the last may be short.
    Replica d runs a contiguous block of them: all as many, or one more on the first ones; or, with speeds or several
    entries, the more the faster it is.
    """

    micro_batch: int = Field(ge=1, description="m, examples")
    global_batch: int = Field(ge=1, description="M, examples per step")
    pipelines: tuple[Pipeline, ...] = Field(min_length=1)
    policy: str = "varuna"
    streams_frozen: bool = Field(
        default=False, description="parameters that are not trained rest in host memory, until their section is next"
    )
    copies: Copies = Field(default=Copies.NONE, description="of each stage's state or sums, in another rank's memory")
    step_s: float = Field(default=0.0, ge=0, description="predicted seconds per step, nominal hardware")

    @model_validator(mode="after")
    def _consistent(self) -> "Plan":
        if len({each.sections for each in self.pipelines}) > 1:
            raise ValueError("pipelines of one plan divide the same sections")
        if self.replicas > self.micro_batches:
            raise ValueError(f"{self.replicas} replicas cannot share {self.micro_batches} micro-batches")
        return self

    @property
    def first(self) -> Pipeline:
        """The first pipelines: all of them, where ``is_uniform``."""
        return self.pipelines[0]

    @property
    def is_uniform(self) -> bool:
        """Whether all pipelines are divided alike."""
        return len(self.pipelines) == 1

    @property
    def stages(self) -> int:
        """P, of the first pipelines."""
        return self.first.stages

    @property
    def replicas(self) -> int:
        """D, of all kinds."""
        return sum(each.replicas for each in self.pipelines)

    @property
    def sections(self) -> int:
        """Sections of the model."""
        return self.first.sections

    @property
    def holders(self) -> int:
        """Number of workers that have the state of each section, of the newest step or of a memory checkpoint."""
        return self.replicas + (self.copies is Copies.STATE)

    # -- the same, otherwise ----------------------------------------------------------------------------------------

    def with_each_pipeline(self, **changes: object) -> "Plan":
        """Make this plan with changes to each of its pipelines."""
        return self.model_copy(update={"pipelines": tuple(p.model_copy(update=changes) for p in self.pipelines)})

    def as_if_all(self, pipeline: Pipeline) -> "Plan":
        """Make this plan as if all its pipelines were divided so: for what is said of one."""
        alike = pipeline.model_copy(update={"replicas": self.replicas, "pace": 1.0, "speeds": self.speeds})
        return self.model_copy(update={"pipelines": (alike,)})

    def at_speeds(self, workers: WorkerGroups) -> "Plan":
        """Make this plan for workers of these speeds; all others are of full speed."""
        groups = by_class(workers) if self.is_by_class else {"": workers}
        known = {name: speeds_of(each) for name, each in groups.items()}
        seats = (map(one.class_of, range(one.stages)) for replicas, one in self.kinds for _ in replicas)
        by_replica = pipeline_speeds(known, seats)

        def dealt(replicas: range, one: Pipeline) -> Pipeline:
            its = by_replica[replicas.start : replicas.stop]
            return one.model_copy(update={"speeds": its if min(its, default=1.0) < 1 else ()})

        return self.model_copy(update={"pipelines": tuple(dealt(*kind) for kind in self.kinds)})

    def same_work(self, other: "Plan") -> bool:
        """Return whether two plans are equal but for their predictions, and for copies."""
        return self._unpredicted() == other._unpredicted()

    def _unpredicted(self) -> "Plan":
        unpromised = self.with_each_pipeline(memory_bytes=(), host_bytes=())
        return unpromised.model_copy(update={"step_s": 0.0, "copies": Copies.NONE})

    # -- who is where ----------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[tuple[range, Pipeline], ...]:
        """Replicas that are divided alike, and how."""
        ends = tuple(accumulate((each.replicas for each in self.pipelines), initial=0))
        return tuple((range(a, b), each) for (a, b), each in zip(pairwise(ends), self.pipelines, strict=True))

    def pipeline_of(self, replica: int) -> Pipeline:
        """Return the pipeline of ``replica``, with its division into stages."""
        if self.is_uniform:
            return self.first
        # A spare is in none: the first stands for its own.
        return next((pipeline for replicas, pipeline in self.kinds if replica in replicas), self.first)

    @property
    def workers(self) -> int:
        """Ranks in use: P * D, if all pipelines are as deep."""
        return sum(each.stages * each.replicas for each in self.pipelines)

    @property
    def is_cut(self) -> bool:
        """Whether any pipeline has more than one stage."""
        return self.workers > self.replicas

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step over all replicas: ceil(M / m)."""
        # Rounded up: the last micro-batch may be short, so that the global batch is exact (paper: M_total).
        return -(-self.global_batch // self.micro_batch)

    @property
    def shape(self) -> str:
        """``"2x3"``: P x D; ``"4x1+3x2"``: one pipeline of 4 stages and two of 3."""
        return "+".join(f"{each.stages}x{each.replicas}" for each in self.pipelines)

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of stages, by replica."""
        return tuple(each.stages for each in self.pipelines for _ in range(each.replicas))

    def rank_of(self, replica: int, stage: int) -> int:
        """Return the rank: replica * P + stage where all are divided alike; neighbours, as in §"Varuna Manager"."""
        first = 0
        for each in self.pipelines[:-1]:
            if replica < each.replicas:
                return first + replica * each.stages + stage
            # Pipelines of each entry take a block of ranks, one entry after another.
            first, replica = first + each.replicas * each.stages, replica - each.replicas
        return first + replica * self.pipelines[-1].stages + stage

    def place_of(self, rank: int) -> Place:
        """Return replica and stage of ``rank``: the inverse of ``rank_of``. A spare would be there if D were larger."""
        replica = 0
        for each in self.pipelines[:-1]:
            if rank < each.stages * each.replicas:
                break
            replica, rank = replica + each.replicas, rank - each.stages * each.replicas
        else:
            each = self.pipelines[-1]
        return Place(replica + rank // each.stages, rank % each.stages)

    def class_of(self, rank: int) -> str:
        """Return the class of the device that ``rank`` computes on; empty: any."""
        replica, stage = self.place_of(rank)
        return self.pipeline_of(replica).class_of(stage)

    @property
    def is_by_class(self) -> bool:
        """Whether its pipelines are for certain classes of devices."""
        return any(self.classes)

    @property
    def classes(self) -> dict[str, int]:
        """Workers by class of device, in the order of ranks."""
        found: dict[str, int] = {}
        for each in self.pipelines:
            for name in map(each.class_of, range(each.stages)):
                found[name] = found.get(name, 0) + each.replicas
        return found

    def ranks_of(self, replica: int) -> range:
        """Return the ranks of a pipeline, by stage."""
        first = self.rank_of(replica, 0)
        return range(first, first + self.pipeline_of(replica).stages)

    def sections_at(self, rank: int) -> range:
        """Return the sections that ``rank`` runs."""
        replica, stage = self.place_of(rank)
        return self.pipeline_of(replica).sections_of(stage)

    @property
    def slots(self) -> tuple[StageSlot, ...]:
        """Stages of all pipelines, those of equal ones together."""
        return tuple(
            StageSlot(each.sections_of(stage), tuple(self.rank_of(replica, stage) for replica in replicas))
            for replicas, each in self.kinds
            for stage in range(each.stages)
        )

    def slot_of(self, rank: int) -> int:
        """Return the index in ``slots`` of the one that ``rank`` has: its stage, if all pipelines are divided alike."""
        replica, stage = self.place_of(rank)
        return stage + sum(each.stages for replicas, each in self.kinds[:-1] if replica >= replicas.stop)

    def peers_of(self, rank: int) -> Sequence[int]:
        """Return the ranks that do the same as ``rank``, itself included: its stage of all pipelines divided alike."""
        if self.is_uniform:
            # From rank = d P + k: the same k is every P-th rank.
            return range(rank % self.stages, self.workers, self.stages)
        return self.slots[self.slot_of(rank)].ranks

    def home_of(self, replica: int, section: int) -> int:
        """Return the rank of ``replica`` that runs ``section``."""
        return self.rank_of(replica, self.pipeline_of(replica).stage_of(section))

    def homes_of(self, section: int) -> Sequence[int]:
        """Return the ranks that run ``section``, by replica."""
        if self.is_uniform:
            # As in ``peers_of``, from the stage's rank in replica 0 on.
            return range(self.first.stage_of(section), self.workers, self.stages)
        return [self.home_of(replica, section) for replica in range(self.replicas)]

    # -- who runs how much -----------------------------------------------------------------------------------------

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speed of each replica's slowest worker, 1 for the fastest; () where all are as fast."""
        if not any(each.speeds for each in self.pipelines):
            return ()
        return tuple(chain(*(each.speeds or (1.0,) * each.replicas for each in self.pipelines)))

    @property
    def rates(self) -> tuple[float, ...]:
        """By replica: micro-batches that it runs while the fastest one runs 1; () if all run as many."""
        if self.is_uniform:
            return self.first.speeds
        return tuple(each.pace * speed for each in self.pipelines for speed in each.speeds or (1.0,) * each.replicas)

    def rate_of(self, replica: int) -> float:
        """Return the micro-batches that ``replica`` runs while the fastest one runs 1."""
        return self.rates[replica] if self.rates else 1.0

    def ends_of(self, micro_batches: int) -> tuple[int, ...]:
        """Return where each replica's share of these micro-batches, of a step or of its rest, ends, after a 0."""
        # A deeper pipeline takes longer to fill, so it gets fewer of them (core.dealing).
        fills = self.stages if self.is_uniform else self.depths
        return ends_of_shares(micro_batches, self.replicas, self.rates, fills)

    def micro_batches_of(self, replica: int) -> range:
        """Return the global micro-batch numbers of ``replica``, N_m of them; of a kind the first have the most."""
        ends = self.ends_of(self.micro_batches)
        return range(ends[replica], ends[replica + 1])

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches by replica."""
        return tuple(b - a for a, b in pairwise(self.ends_of(self.micro_batches)))

    def speed_of(self, replica: int) -> float:
        """Return the relative speed of a replica's slowest worker, 1 for the fastest."""
        return self.speeds[replica] if self.speeds else 1.0

    def samples_of(self, micro_batch: int) -> range:
        """Return the offsets of global micro-batch ``micro_batch`` in the global batch: m, or fewer in the last."""
        first = micro_batch * self.micro_batch
        return range(first, min(first + self.micro_batch, self.global_batch))
