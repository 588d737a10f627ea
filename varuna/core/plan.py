"""A plan: how P stages x D replicas run a global batch, and who does which part of it."""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from pydantic import Field, model_validator

from varuna.core.units import counted
from varuna.core.value import Value

SAMPLES_AHEAD = 4
"""Micro-batches whose samples a rank reads ahead of their F."""

ACTIVATIONS_COMING = 2
"""Buffers for the next activations, besides those that have arrived and wait for their F."""

GRADIENTS_COMING = 2
"""Gradients that have arrived and wait for their B, plus buffers for the next; further ones stay at their sender."""

MESSAGES_LEAVING = 3
"""The most activations that a stage has sent and the next one has not taken; at this number the next F waits."""

STASH_IN_TRANSIT = 3
"""Stash entries on the device besides those that stay: the newest, being copied out; the next; and the current one."""


class Copies(StrEnum):
    """Whether the state of each stage has a copy in the memory of another rank, or why not."""

    NONE = "none"
    """other replicas hold it, or there is no other rank"""
    KEPT = "kept"
    DEVICE = "device"
    """the state is not in host memory"""
    MEMORY = "memory"
    """there is no room for it"""
    TIME = "time"
    """a copy would take too much of a step"""


class Place(NamedTuple):
    """A rank's seat in the grid."""

    replica: int
    stage: int


class Plan(Value):
    """P stages x D replicas, micro-batches of m examples, the sections of each stage, and what was predicted.

    Global micro-batch j is samples [j*m, (j+1)*m) of the global batch; the last may be short.
    Replica d runs a contiguous block of them: all as many, or one more on the first ones, or with ``speeds`` the more
    the faster it is.
    """

    stages: int = Field(ge=1, description="P")
    replicas: int = Field(ge=1, description="D")
    micro_batch: int = Field(ge=1, description="m, examples")
    global_batch: int = Field(ge=1, description="M, examples per step")
    speeds: tuple[float, ...] = Field(
        default=(),
        description="by replica, fastest first: what its slowest worker computes while one of full speed computes 1; "
        "() where all are as fast",
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
    copies: Copies = Field(default=Copies.NONE, description="of each stage's state, in another rank's memory")
    step_s: float = Field(default=0.0, ge=0, description="predicted seconds per step, nominal hardware")
    memory_bytes: tuple[int, ...] = Field(default=(), description="predicted peak, by stage")
    host_bytes: tuple[int, ...] = Field(
        default=(), description="predicted peak of host memory: optimizer state and stash, by stage; () for none"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Plan":
        ends = (*self.starts, self.sections)
        if len(self.starts) != self.stages or self.starts[0] != 0 or any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"starts {self.starts} do not divide {self.sections} sections into {self.stages} stages")
        if self.replicas > self.micro_batches:
            raise ValueError(f"{self.replicas} replicas cannot share {self.micro_batches} micro-batches")
        if self.speeds and (len(self.speeds) != self.replicas or not are_speeds(self.speeds)):
            raise ValueError(
                f"speeds {self.speeds} must give each of {self.replicas} replicas more than 0 and at most 1, "
                "fastest first"
            )
        if len(self.stash_limits) != self.stages or min(self.stash_limits) < 1:
            raise ValueError(f"stash_limits {self.stash_limits} must give each of {self.stages} stages at least 1")
        if self.kept and len(self.kept) != self.stages:
            raise ValueError(f"kept {self.kept} must give a number for each of {self.stages} stages, or none at all")
        for stage, kept in enumerate(self.kept):
            if not 0 <= kept <= len(self.sections_of(stage)):
                raise ValueError(f"stage {stage} has {len(self.sections_of(stage))} sections and cannot keep {kept}")
        if self.stash_on_device and len(self.stash_on_device) != self.stages:
            raise ValueError(
                f"stash_on_device {self.stash_on_device} must give a number for each of {self.stages} stages, or none"
            )
        for stage, (stay, limit) in enumerate(zip(self.stash_on_device, self.stash_limits, strict=False)):
            if not 0 <= stay <= limit:
                raise ValueError(f"stage {stage} has a stash of {limit} and cannot leave {stay} of it on the device")
        return self

    @property
    def workers(self) -> int:
        """Ranks in use: P * D."""
        return self.stages * self.replicas

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step over all replicas: ceil(M / m)."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def shape(self) -> str:
        """``"2x3"``: P x D."""
        return f"{self.stages}x{self.replicas}"

    def same_work(self, other: "Plan") -> bool:
        """Whether two plans are equal but for their predictions, and for copies of state."""
        unpredicted = {"step_s": 0.0, "memory_bytes": (), "host_bytes": (), "copies": Copies.NONE}
        return self.model_copy(update=unpredicted) == other.model_copy(update=unpredicted)

    def rank_of(self, replica: int, stage: int) -> int:
        """Rank = replica * P + stage: a pipeline's stages are neighbours (paper §"Varuna Manager")."""
        return replica * self.stages + stage

    def place_of(self, rank: int) -> Place:
        """Replica and stage of ``rank``: the inverse of ``rank_of``."""
        return Place(*divmod(rank, self.stages))

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
        return sum(start <= section for start in self.starts) - 1

    def micro_batches_of(self, replica: int) -> range:
        """Global micro-batch numbers of ``replica``, N_m of them; no replica has more than the first one."""
        ends = ends_of_shares(self.micro_batches, self.replicas, self.speeds, self.stages)
        return range(ends[replica], ends[replica + 1])

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches by replica."""
        return tuple(
            b - a for a, b in pairwise(ends_of_shares(self.micro_batches, self.replicas, self.speeds, self.stages))
        )

    def speed_of(self, replica: int) -> float:
        """Relative speed of a replica, 1 for the fastest."""
        return self.speeds[replica] if self.speeds else 1.0

    def samples_of(self, micro_batch: int) -> range:
        """Offsets within the global batch of global micro-batch ``micro_batch``."""
        first = micro_batch * self.micro_batch
        return range(first, min(first + self.micro_batch, self.global_batch))


def are_speeds(speeds: Sequence[float]) -> bool:
    """Whether these are relative speeds, fastest first: more than 0 and at most 1."""
    return all(a >= b for a, b in pairwise((1.0, *speeds))) and speeds[-1] > 0


# -- how many micro-batches each replica runs ----------------------------------------------------------------------


# A pipeline of P stages takes about N + P - 1 of its micro-batches' times for N of them. So a replica that is half as
# fast gets less than half as many, and all end together.
_DEALINGS_KNOWN = 1024


@lru_cache(maxsize=_DEALINGS_KNOWN)
def ends_of_shares(micro_batches: int, replicas: int, speeds: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Where the contiguous share of each replica ends, after a 0: one number more than replicas.

    Every replica gets a micro-batch, as long as there are enough; the first ones get what is left over.

    Args:
        micro_batches: of all replicas.
        replicas: D.
        speeds: relative, by replica, fastest first; () if all are the same.
        stages: P.
    """
    if not speeds:
        base, extra = divmod(micro_batches, replicas)
        return tuple(replica * base + min(replica, extra) for replica in range(replicas + 1))
    return _ends(micro_batches, speeds, stages - 1)


def _ends(micro_batches: int, speeds: tuple[float, ...], fill: int) -> tuple[int, ...]:
    """The shares for which the last replica ends first: most of each at once, the rest one by one."""
    if micro_batches <= len(speeds):
        return (*range(micro_batches + 1), *(micro_batches,) * (len(speeds) - micro_batches))
    together = (micro_batches + fill * len(speeds)) / sum(speeds)  # when all would end, if micro-batches had parts
    shares = [max(1, int(together * speed - fill)) for speed in speeds]
    while sum(shares) > micro_batches:  # slow replicas have one each, which is more than they would have got
        latest = max(range(len(shares)), key=lambda d: (shares[d] > 1, (shares[d] + fill) / speeds[d], d))
        shares[latest] -= 1
    waiting = [((shares[d] + 1 + fill) / speed, d) for d, speed in enumerate(speeds)]
    heapify(waiting)
    for _ in range(micro_batches - sum(shares)):
        _, d = waiting[0]
        shares[d] += 1
        heapreplace(waiting, ((shares[d] + 1 + fill) / speeds[d], d))
    return tuple(accumulate(shares, initial=0))


def shares_text(shares: Sequence[int]) -> str:
    """``"2 replicas of 16, 1 replica of 8"``."""
    return ", ".join(f"{counted(replicas, 'replica')} of {share}" for share, replicas in Counter(shares).items())


def pipeline_speeds(speeds: Sequence[float], stages: int, replicas: int) -> tuple[float, ...]:
    """Speeds of replicas that take workers in this order, each as fast as its slowest; () if nobody is slower than 1.

    Args:
        speeds: of workers, fastest first; () if all are of full speed.
        stages: P.
        replicas: D.
    """
    found = tuple(speeds[(replica + 1) * stages - 1] for replica in range(replicas)) if speeds else ()
    return () if all(speed == 1.0 for speed in found) else found
