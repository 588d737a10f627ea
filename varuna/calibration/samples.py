"""Samples that one worker has measured, not yet statistics. No torch, so that any process can merge them."""

from typing import NamedTuple

from pydantic import Field

from varuna.core.model import ModelFacts
from varuna.core.value import Value


class Sized(NamedTuple):
    """Seconds that a transfer or an update took, and its bytes."""

    size_bytes: int
    seconds: float


class SectionSamples(Value):
    """Rounds of one section at one micro-batch size; halves of B only where it can be split."""

    section: int
    micro_batch: int = Field(ge=1, description="m, examples")
    forward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()


class RingSamples(Value):
    """All-reduces over ``ranks`` workers while ``in_flight`` rings run at once."""

    in_flight: int = Field(ge=1)
    ranks: int = Field(ge=2)
    samples: tuple[Sized, ...]


class PilotSamples(Value):
    """Seconds that a few real steps take beyond their sections: see ``varuna.measure.pilot``."""

    stages: int = Field(ge=1, description="P")
    state_bytes: int = Field(description="parameters, gradients and optimizer state of this worker's stage")
    first: int = Field(default=0, description="lowest section of this worker's stage")
    stop: int = Field(default=0, description="one past its highest section")
    micro_batch: int = Field(default=1, description="m, examples")
    whole_s: dict[str, float] = Field(default={}, description="F, R and B as they were, with all that is around them")
    inside_s: dict[str, float] = Field(default={}, description="of that, what their sections took")
    step_s: tuple[float, ...] = Field(
        description="from the last action of each step to the first of the next; stage 0 only"
    )


class Measured(Value):
    """All samples of one worker."""

    worker: int
    hardware: str = Field(description="name of the device")
    device_class: str = Field(default="", description="that workers tell; empty: unknown")
    device_bytes: int | None = Field(description="memory of the device; None for a CPU, which workers share")
    facts: ModelFacts
    kinds: tuple[int, ...] = Field(description="by section: the lowest section with the same graph")
    sections: tuple[SectionSamples, ...]
    cache: str = Field(default="", description="file in which runs of the job on this machine look for a calibration")
    sized_for: int = Field(default=0, description="global batch for which sizes were tried")
    updates: tuple[Sized, ...] = Field(default=(), description="optimizer step, by bytes of parameters, sums, state")
    snapshots: tuple[Sized, ...] = Field(default=(), description="copying state out, by its bytes")
    arrivals: tuple[Sized, ...] = Field(default=(), description="copying parameters to a GPU, by their bytes")
    messages: tuple[Sized, ...] = Field(default=(), description="between neighbours' host memories, both ways at once")
    line: tuple[Sized, ...] = Field(default=(), description="two messages, of two neighbours at once: bytes of both")
    staged: tuple[Sized, ...] = Field(default=(), description="as messages, from one GPU's memory to the other's")
    rings: tuple[RingSamples, ...] = ()
    pilots: tuple[PilotSamples, ...] = ()
