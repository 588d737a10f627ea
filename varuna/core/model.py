"""Facts of a model for the planner and the manager: costs and bytes of its sections."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field

from varuna.core.errors import UsageError
from varuna.core.precision import REDUCTIONS, Precision, Reduction
from varuna.core.value import Value

Links = Literal["host", "nccl"]
"""Paths by which activations, their gradients and sums of gradients reach other workers' GPUs."""

LINKS: tuple[Links, ...] = get_args(Links)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Options that relieve devices of state that is not always at work. Numbers stay the same.

    Attributes:
        offload_optimizer: keep it, and with half precision the fp32 parameters, in host memory; at the end of a step
            they pass through the device section by section.
        shard_optimizer: distribute it, and with half precision the fp32 parameters, over the replicas of a stage. Two
            replicas hold every part, so that a lost VM costs no step.
        stream_frozen: keep parameters that are not trained in host memory. A device has those of the section at work
            and of the next one, which is read ahead. Plans do so by themselves where nothing else fits.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    offload_optimizer: bool = False
    shard_optimizer: bool = False
    stream_frozen: bool = False


@dataclass(frozen=True, kw_only=True)
class Network:
    """Options for the transfer of tensors to other workers.

    Attributes:
        links: ``"nccl"`` sends from GPU to GPU where each has one worker; ``"host"`` through host memory.
        reduction: ``"bf16"`` sends gradients between replicas, summed in fp32, as bf16, which halves the bytes.
            Losses then depend on the number of replicas by that rounding.
        compress: what crosses a line that is waited for is compressed, where that is faster; no bit changes.

    Raises:
        UsageError: one of them is none of these.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    links: Links = "host"
    reduction: Reduction = "fp32"
    compress: bool = True

    def __post_init__(self) -> None:
        if self.links not in LINKS:
            raise UsageError(f"links={self.links!r} must be one of {', '.join(LINKS)}")
        if self.reduction not in REDUCTIONS:
            raise UsageError(f"reduction={self.reduction!r} must be one of {', '.join(REDUCTIONS)}")
        if not isinstance(self.compress, bool):
            raise UsageError(f"compress={self.compress!r} must be True or False")


class SectionBytes(Value):
    """Bytes of one section, as captured; a calibration takes them over. What is per example scales with m."""

    activation_bytes: int = Field(ge=0, description="kept between R and B, per example")
    forward_bytes: int = Field(default=0, ge=0, description="needed while F runs, per example")
    backward_bytes: int = Field(default=0, ge=0, description="needed beside activations while R or B runs, per example")
    fixed_bytes: int = Field(default=0, ge=0, description="of such, whatever the micro-batch")
    split_bytes: int | None = Field(
        default=None, ge=0, description="needed beside activations while I runs, per example; left out: as for B"
    )
    split_fixed_bytes: int = Field(default=0, ge=0, description="of such, whatever the micro-batch")
    queued_bytes: int | None = Field(
        default=None, ge=0, description="kept between I and W, per example; left out: as activation_bytes"
    )
    input_bytes: int = Field(default=0, ge=0, description="samples that the section is the first to read, per example")
    statistics_bytes: int = Field(
        default=0, ge=0, description="that a micro-batch leaves for buffers, kept until the step is applied"
    )
    boundary_bytes: int = Field(ge=0, description="activation sent to the next section, per example; 0 for the last")
    gradient_boundary_bytes: int | None = Field(
        default=None, ge=0, description="gradient sent back over the same cut, per example; left out: as boundary_bytes"
    )
    gradient_free: bool = Field(default=False, description="nothing is trained in it, nor below it: no R, no B")
    parameter_bytes: int = Field(ge=0, description="parameters that the section uses, tied ones included")
    trainable_bytes: int = Field(ge=0, description="those of them that get gradients")
    frozen_bytes: int | None = Field(
        default=None, ge=0, description="those that may be streamed; left out: parameter_bytes less trainable_bytes"
    )
    gradient_bytes: int | None = Field(
        default=None, ge=0, description="their sums, in fp32; left out: as trainable_bytes"
    )
    optimizer_bytes: int = Field(ge=0, description="optimizer state, fp32 copies of parameters included")
    update_bytes: int = Field(default=0, ge=0, description="needed while the optimizer updates its parameters")

    @property
    def summed_bytes(self) -> int:
        """Bytes of the accumulated gradients."""
        return self.trainable_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def streamable_bytes(self) -> int:
        """Bytes of parameters that may rest in host memory while other sections are at work."""
        return self.parameter_bytes - self.trainable_bytes if self.frozen_bytes is None else self.frozen_bytes


class SectionFacts(SectionBytes):
    """A section C_i.

    All facts are deterministic functions of the captured graph (never measured), so that sections are
    the same on every machine and at every P.
    """

    label: str = Field(description="where the section ends, such as 'transformer.h.3'")
    forward_s: float = Field(ge=0, description="F per example under the nominal roofline, seconds")

    def untimed(self) -> dict[str, Any]:
        """Return the fields of ``SectionBytes``."""
        return self.model_dump(include=set(SectionBytes.model_fields))


class TiedParameter(Value):
    """A parameter that several sections use; the lowest owns it."""

    name: str
    sections: tuple[int, ...] = Field(min_length=2)
    size_bytes: int = Field(ge=0, description="of the parameter itself, counted in each section that uses it")

    @property
    def owner(self) -> int:
        """The lowest section, whose copy is normed, saved and exported."""
        return self.sections[0]


class ModelFacts(Value):
    """A captured model as the planner sees it."""

    digest: str = Field(description="hash over graph, sections and parameter names")
    state_digest: str = Field(default="", description="hash over names and shapes of the sections' state")
    code_digest: str = Field(default="", description="hash over digest and the code it comes from; workers may differ")
    sections: tuple[SectionFacts, ...] = Field(min_length=1)
    tied: tuple[TiedParameter, ...] = ()
    updates_together: bool = Field(default=False, description="update_bytes of a stage add up; else the most counts")
    combines: bool = Field(default=True, description="the optimizer is not torch's own: it may ask other stages")
    batch_dependent: bool = Field(
        default=False, description="results depend on which examples share a micro-batch (batch normalisation)"
    )


class JobFacts(Value):
    """Facts of a job, which a worker tells when it joins; all workers of a run must agree on them."""

    model: ModelFacts
    global_batch: int = Field(ge=1, description="examples per step, M")
    micro_batch: int | None = Field(default=None, ge=1, description="m if the user fixed it")
    seed: int
    initialisation: str = Field(default="constructor", description="where first values come from, fixed for a run")
    steps: int = Field(ge=0, description="length of the whole run")
    metrics: tuple[str, ...] = Field(default=(), description="names that join the vote")
    checkpoint_dir: str | None = Field(default=None, description="path or URL, as all workers know it")
    rescues: bool = Field(default=False, description="checkpoints serve this run alone, and go with it")
    config: str | None = Field(default=None, description="the model's config.json, if it has one")
    samples: int = Field(default=0, ge=0, description="len(dataset), on which the order depends; 0: it has none")
    first_samples: str = Field(default="", description="digest of the run's first samples, as read on this machine")
    torch: str = Field(default="", description="its version, on which rounding depends")
    takes_other_data: bool = Field(default=False, description="resume though the dataset was another one")
    keep_last: int = Field(default=3, ge=1, description="newest checkpoints to keep")
    keep_every: int | None = Field(default=None, ge=1, description="also keep those of steps divisible by this")
    threads: int = Field(default=1, ge=1, description="intra-op threads of a worker")
    precision: Precision = Field(default="fp32", description="of computation and of what crosses links")
    compiled: str | None = Field(default=None, description="backend of torch.compile that sections go through")
    memory: Memory = Field(default=Memory(), description="where state lives")
    network: Network = Field(default=Network(), description="how tensors reach other workers")
    combines: bool = Field(default=True, description="user's code in a step may combine values over stages")
    optimizer: str = Field(default="", description="options of its groups, such as lr, as JSON; empty: unknown")
    memory_apart: bool = Field(default=False, description="devices have memory of their own, beside the host's")
    losses_per_hour: float = Field(
        default=0.0, ge=0, description="of workers, as the run has seen them; said by who plans, not by workers"
    )

    def for_comparison(self) -> "JobFacts":
        """Return the facts without the fields in which workers of one run may differ."""
        return self.model_copy(update={"model": self.model.model_copy(update={"code_digest": ""})})
