"""A plan: how P stages x D replicas run a global batch, and who does which part of it."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

from pydantic import Field, model_validator

from varuna.core.dealing import are_speeds, ends_of_shares, pipeline_speeds
from varuna.core.value import Value


class Copies(StrEnum):
    """What of each stage has a copy in the memory of another rank, or why nothing has."""

    NONE = "none"
    """nobody asked for copies, or there is no other rank"""
    STATE = "state"
    """its state, which no other rank holds, in every step, and then its sums of gradients"""
    CHECKPOINTS = "checkpoints"
    """its state, which no other rank holds, every few steps: if a worker is lost, all go back to that step"""
    SUMS = "sums"
    """its sums of gradients: other replicas hold its state"""
    MEMORY = "memory"
    """there is no room for it"""
    TIME = "time"
    """copies would take more of a step than they are worth, or never be ready"""

    @property
    def are_made(self) -> bool:
        """Whether there are any."""
        return self.are_of_state or self is Copies.SUMS

    @property
    def are_of_state(self) -> bool:
        """Whether there are any of state."""
        return self in (Copies.STATE, Copies.CHECKPOINTS)


class Place(NamedTuple):
    """A rank's seat in the grid."""

    replica: int
    stage: int


class StageSlot(NamedTuple):
    """A stage of pipelines that are cut alike."""

    sections: range
    ranks: tuple[int, ...]
    """that run it, by replica"""


class Cut(NamedTuple):
    """How a pipeline is divided into stages, and what each of them keeps."""

    sections: int
    """of the model"""
    starts: tuple[int, ...]
    stash_limits: tuple[int, ...]
    kept: tuple[int, ...]
    stash_on_device: tuple[int, ...]
    split_last: int
    memory_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    device_class: str
    stage_classes: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """P."""
        return len(self.starts)

    def class_of(self, stage: int) -> str:
        """Class of the devices that run ``stage``; empty: any."""
        return self.stage_classes[stage] if self.stage_classes else self.device_class

    def sections_of(self, stage: int) -> range:
        """Sections that ``stage`` runs."""
        ends = (*self.starts, self.sections)
        return range(ends[stage], ends[stage + 1])

    def kept_sections_of(self, stage: int) -> range:
        """Those of ``sections_of(stage)`` that keep their activations from F; R runs the others only."""
        sections = self.sections_of(stage)
        return sections[len(sections) - self.kept[stage] :] if self.kept else sections[len(sections) :]

    def keeps_all(self, stage: int) -> bool:
        """Whether ``stage`` has nothing to recompute, so that its micro-batches need no R."""
        return len(self.kept_sections_of(stage)) == len(self.sections_of(stage))

    def stage_of(self, section: int) -> int:
        """Stage that runs ``section``."""
        return bisect_right(self.starts, section) - 1

    def check(self) -> None:
        """Raise ValueError if the parts do not belong together."""
        ends = (*self.starts, self.sections)
        if not self.starts or self.starts[0] != 0 or any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"starts {self.starts} do not divide {self.sections} sections into {self.stages} stages")
        if len(self.stash_limits) != self.stages or min(self.stash_limits) < 1:
            raise ValueError(f"stash_limits {self.stash_limits} must give each of {self.stages} stages at least 1")
        if self.kept and len(self.kept) != self.stages:
            raise ValueError(f"kept {self.kept} must give a number for each of {self.stages} stages, or none at all")
        for stage, kept in enumerate(self.kept):
            if not 0 <= kept <= len(self.sections_of(stage)):
                raise ValueError(f"stage {stage} has {len(self.sections_of(stage))} sections and cannot keep {kept}")
        if self.stage_classes and (len(self.stage_classes) != self.stages or self.device_class):
            raise ValueError(f"stage_classes {self.stage_classes} must name each of {self.stages} stages, or none")
        if self.stash_on_device and len(self.stash_on_device) != self.stages:
            raise ValueError(
                f"stash_on_device {self.stash_on_device} must give a number for each of {self.stages} stages, or none"
            )
        for stage, (stay, limit) in enumerate(zip(self.stash_on_device, self.stash_limits, strict=False)):
            if not 0 <= stay <= limit:
                raise ValueError(f"stage {stage} has a stash of {limit} and cannot leave {stay} of it on the device")


_PARTS = Cut._fields[1:]
"""Fields of a cut, by which plans and further pipelines say the same."""
_parts_of = attrgetter(*_PARTS)  # asked for at every turn of the manager's


class Pipelines(Value):
    """Replicas of a plan that are cut otherwise than its first ones, all alike: as the fields of ``Plan``."""

    replicas: int = Field(ge=1, description="how many of the plan's")
    pace: float = Field(gt=0, le=1, description="micro-batches that one runs while one of the plan's first runs 1")
    starts: tuple[int, ...]
    stash_limits: tuple[int, ...]
    kept: tuple[int, ...] = ()
    stash_on_device: tuple[int, ...] = ()
    split_last: int = Field(default=0, ge=0)
    memory_bytes: tuple[int, ...] = ()
    host_bytes: tuple[int, ...] = ()
    device_class: str = ""
    stage_classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, cut: Cut, *, replicas: int, pace: float) -> "Pipelines":
        """So many, each divided as ``cut`` says."""
        return cls(replicas=replicas, pace=pace, **{name: getattr(cut, name) for name in _PARTS})

    def cut(self, sections: int) -> Cut:
        """How each of them is divided, in a model of so many sections."""
        return Cut(sections, *_parts_of(self))


class Plan(Value):
    """D pipelines that run a global batch: micro-batches of m examples, the sections of each stage, and a prediction.

    Mostly all are cut alike, into P stages; those in ``more`` are cut otherwise, so that no worker is left over, or
    run on devices of another class. All that is said by stage is of the first pipelines.

    Global micro-batch j is samples [j*m, (j+1)*m) of the global batch; the last may be short.
    Replica d runs a contiguous block of them: all as many, or one more on the first ones; or, with ``speeds`` or
    ``more``, the more the faster it is.
    """

    stages: int = Field(ge=1, description="P")
    replicas: int = Field(ge=1, description="D, those in more included")
    micro_batch: int = Field(ge=1, description="m, examples")
    global_batch: int = Field(ge=1, description="M, examples per step")
    speeds: tuple[float, ...] = Field(
        default=(),
        description="by replica, fastest first among those that are cut alike: what its slowest worker computes while "
        "one of full speed computes 1; () where all are as fast",
    )
    starts: tuple[int, ...] = Field(description="first section of each stage, ascending from 0")
    sections: int = Field(ge=1, description="number of sections of the model")
    policy: str = "varuna"
    stash_limits: tuple[int, ...] = Field(description="most micro-batches in flight, by stage (n_k)")
    kept: tuple[int, ...] = Field(
        default=(), description="by stage: how many of its last sections keep their activations; () for none"
    )
    stash_on_device: tuple[int, ...] = Field(
        default=(),
        description="by stage: of the stash_limits inputs that wait for R, how many stay on the device, while the "
        "others wait in host memory; () for all",
    )
    split_last: int = Field(default=0, ge=0, description="backwards at a replica's end that run as I and W")
    more: tuple[Pipelines, ...] = Field(default=(), description="the last replicas, if they are cut otherwise")
    copies: Copies = Field(default=Copies.NONE, description="of each stage's state or sums, in another rank's memory")
    step_s: float = Field(default=0.0, ge=0, description="predicted seconds per step, nominal hardware")
    memory_bytes: tuple[int, ...] = Field(default=(), description="predicted peak, by stage")
    host_bytes: tuple[int, ...] = Field(
        default=(), description="predicted peak of host memory: optimizer state and stash, by stage; () for none"
    )
    device_class: str = Field(default="", description="of the workers that run it; empty: any")
    stage_classes: tuple[str, ...] = Field(
        default=(), description="the same by stage, where a pipeline runs on several classes; () where it does not"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Plan":
        if len(self.starts) != self.stages:
            raise ValueError(f"starts {self.starts} do not divide {self.sections} sections into {self.stages} stages")
        self.first_cut.check()
        for each in self.more:
            each.cut(self.sections).check()
        if self.replicas > self.micro_batches:
            raise ValueError(f"{self.replicas} replicas cannot share {self.micro_batches} micro-batches")
        if self._alike < 1:
            raise ValueError(f"{self.replicas - self._alike} of {self.replicas} replicas cannot be more pipelines")
        alike = [self.speeds[replicas.start : replicas.stop] for replicas, _ in self.cuts]
        if self.speeds and (len(self.speeds) != self.replicas or not all(map(are_speeds, alike))):
            raise ValueError(f"{self.replicas} speeds, more than 0 and at most 1, fastest first, are not {self.speeds}")
        return self

    @property
    def holders(self) -> int:
        """How many workers have the state of each section, of the newest step or of a memory checkpoint."""
        return self.replicas + (self.copies is Copies.CHECKPOINTS)

    # -- who is where ----------------------------------------------------------------------------------------------

    @property
    def _alike(self) -> int:
        """Replicas that are cut as ``stages`` and ``starts`` say."""
        return self.replicas - sum(each.replicas for each in self.more) if self.more else self.replicas

    @property
    def workers(self) -> int:
        """Ranks in use: P * D, if all pipelines are as deep."""
        return self.stages * self._alike + sum(len(each.starts) * each.replicas for each in self.more)

    @property
    def is_cut(self) -> bool:
        """Whether any pipeline has more than one stage."""
        return self.workers > self.replicas

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step over all replicas: ceil(M / m)."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def shape(self) -> str:
        """``"2x3"``: P x D; ``"4x1+3x2"``: one pipeline of 4 stages and two of 3."""
        parts = [(self.stages, self._alike), *((len(each.starts), each.replicas) for each in self.more)]
        return "+".join(f"{stages}x{replicas}" for stages, replicas in parts)

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of stages, by replica."""
        more = (len(each.starts) for each in self.more for _ in range(each.replicas))
        return (*(self.stages,) * self._alike, *more)

    def same_work(self, other: "Plan") -> bool:
        """Whether two plans are equal but for their predictions, and for copies."""
        return self._unpredicted() == other._unpredicted()

    def _unpredicted(self) -> "Plan":
        nothing: dict[str, object] = {"memory_bytes": (), "host_bytes": ()}
        more = tuple(each.model_copy(update=nothing) for each in self.more)
        return self.model_copy(update={"step_s": 0.0, "copies": Copies.NONE, "more": more, **nothing})

    @property
    def first_cut(self) -> Cut:
        """How the first pipelines are divided: all of them, unless there are ``more``."""
        return Cut(self.sections, *_parts_of(self))

    @property
    def cuts(self) -> tuple[tuple[range, Cut], ...]:
        """Replicas that are divided alike, and how."""
        found, first = [(range(self._alike), self.first_cut)], self._alike
        for each in self.more:
            found.append((range(first, first + each.replicas), each.cut(self.sections)))
            first += each.replicas
        return tuple(found)

    def cut_of(self, replica: int) -> Cut:
        """How the pipeline of ``replica`` is divided."""
        if not self.more:
            return self.first_cut
        return next((cut for replicas, cut in self.cuts if replica in replicas), self.first_cut)

    def rank_of(self, replica: int, stage: int) -> int:
        """Rank: replica * P + stage where all are cut alike; stages are neighbours (paper §"Varuna Manager")."""
        if not self.more or replica < self._alike:
            return replica * self.stages + stage
        return sum(self.depths[:replica]) + stage

    def place_of(self, rank: int) -> Place:
        """Replica and stage of ``rank``: the inverse of ``rank_of``. A spare would be there if D were greater."""
        alike = self.stages * self._alike
        if rank < alike or not self.more:
            return Place(*divmod(rank, self.stages))
        replica, rest = self._alike, rank - alike
        for each in self.more:
            stages = len(each.starts)
            if rest < stages * each.replicas:
                return Place(replica + rest // stages, rest % stages)
            replica, rest = replica + each.replicas, rest - stages * each.replicas
        return Place(replica + rest // self.stages, rest % self.stages)

    def class_of(self, rank: int) -> str:
        """Class of the device that ``rank`` computes on; empty: any."""
        replica, stage = self.place_of(rank)
        return self.cut_of(replica).class_of(stage)

    def on_class(self, name: str) -> "Plan":
        """This plan, for workers whose devices are of one class."""
        more = tuple(each.model_copy(update={"device_class": name}) for each in self.more)
        return self.model_copy(update={"device_class": name, "more": more})

    @property
    def is_by_class(self) -> bool:
        """Whether its pipelines are for certain classes of devices."""
        return any(self.classes)

    @property
    def classes(self) -> dict[str, int]:
        """Workers by class of device, in the order of ranks."""
        found: dict[str, int] = {}
        for replicas, cut in self.cuts:
            for name in cut.stage_classes or (cut.device_class,) * cut.stages:
                found[name] = found.get(name, 0) + len(replicas)
        return found

    def ranks_of(self, replica: int) -> range:
        """Ranks of a pipeline, by stage."""
        first = self.rank_of(replica, 0)
        return range(first, first + self.cut_of(replica).stages)

    def sections_at(self, rank: int) -> range:
        """Sections that ``rank`` runs."""
        replica, stage = self.place_of(rank)
        return self.cut_of(replica).sections_of(stage)

    @property
    def slots(self) -> tuple[StageSlot, ...]:
        """Stages of all pipelines, those of equal ones together."""
        return tuple(
            StageSlot(cut.sections_of(stage), tuple(self.rank_of(replica, stage) for replica in replicas))
            for replicas, cut in self.cuts
            for stage in range(cut.stages)
        )

    def slot_of(self, rank: int) -> int:
        """Index in ``slots`` of the one that ``rank`` has: its stage, if all pipelines are cut alike."""
        replica, stage = self.place_of(rank)
        before = () if not self.more else (cut.stages for replicas, cut in self.cuts if replica >= replicas.stop)
        return stage + sum(before)

    def peers_of(self, rank: int) -> Sequence[int]:
        """Ranks that do the same as ``rank``, itself included: its stage of the pipelines that are cut alike."""
        if not self.more:
            return range(rank % self.stages, self.workers, self.stages)
        return self.slots[self.slot_of(rank)].ranks

    def as_if_all(self, cut: Cut) -> "Plan":
        """This plan, if all its pipelines were divided so: for what is said of one."""
        return self.model_copy(update={**cut._asdict(), "stages": cut.stages, "more": ()})

    def home_of(self, replica: int, section: int) -> int:
        """Rank of ``replica`` that runs ``section``."""
        return self.rank_of(replica, self.cut_of(replica).stage_of(section))

    def homes_of(self, section: int) -> Sequence[int]:
        """Ranks that run ``section``, by replica."""
        if not self.more:
            return range(self.first_cut.stage_of(section), self.workers, self.stages)
        return [self.home_of(replica, section) for replica in range(self.replicas)]

    # -- who runs how much -----------------------------------------------------------------------------------------

    @property
    def rates(self) -> tuple[float, ...]:
        """By replica: micro-batches that it runs while the fastest one runs 1; () if all run as many."""
        if not self.more:
            return self.speeds
        paces = (*(1.0,) * self._alike, *(each.pace for each in self.more for _ in range(each.replicas)))
        return tuple(pace * self.speed_of(replica) for replica, pace in enumerate(paces))

    def at_speeds(self, speeds: Mapping[str, Sequence[float]]) -> "Plan":
        """This plan for workers of these speeds, by class of device, fastest first; all others are of full speed."""
        known = speeds if self.is_by_class else {"": sorted(chain(*speeds.values()), reverse=True)}
        seats = (map(cut.class_of, range(cut.stages)) for replicas, cut in self.cuts for _ in replicas)
        return self.model_copy(update={"speeds": pipeline_speeds(known, seats)})

    def rate_of(self, replica: int) -> float:
        """Micro-batches that ``replica`` runs while the fastest one runs 1."""
        return self.rates[replica] if self.rates else 1.0

    def ends_of(self, micro_batches: int) -> tuple[int, ...]:
        """Where each replica's share of so many micro-batches ends, after a 0: of a step, or of what is left of one."""
        return ends_of_shares(micro_batches, self.replicas, self.rates, self.depths if self.more else self.stages)

    def micro_batches_of(self, replica: int) -> range:
        """Global micro-batch numbers of ``replica``, N_m of them; no replica of its cut has more than its first one."""
        ends = self.ends_of(self.micro_batches)
        return range(ends[replica], ends[replica + 1])

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches by replica."""
        return tuple(b - a for a, b in pairwise(self.ends_of(self.micro_batches)))

    def speed_of(self, replica: int) -> float:
        """Relative speed of a replica's slowest worker, 1 for the fastest."""
        return self.speeds[replica] if self.speeds else 1.0

    def samples_of(self, micro_batch: int) -> range:
        """Offsets within the global batch of global micro-batch ``micro_batch``."""
        first = micro_batch * self.micro_batch
        return range(first, min(first + self.micro_batch, self.global_batch))
