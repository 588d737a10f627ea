"""Costs of a model on some hardware, measured once, independent of P, D and N_m (paper Table "Primitive parameters").

A calibration is one JSON file, short enough to be written by hand: sections that run the same graph are one
*kind*, listed with a count. ``docs/calibration-file.md`` explains each field; all times are seconds, all sizes bytes,
all rates bytes per second. Everything that scales with the micro-batch is given per example.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from varuna.core.devices import device_of
from varuna.core.model import SectionBytes, TiedParameter
from varuna.core.value import Value

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Dollars = Annotated[float, Field(ge=0)]
VERSION: Literal[2] = 2
_MOST_SECTIONS = 100_000  # far beyond any model; a slip of the pen must not fill the memory


class Finite(Value):
    """A value whose numbers are all finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class Hardware(Finite):
    """One GPU and the VM that contains it."""

    name: str = Field(min_length=1, description="such as 'V100-16GB, 10 Gb/s'; another name is other hardware")
    memory_bytes: Annotated[int, Field(gt=0)] | None = Field(default=None, description="of one GPU; None: unlimited")
    reserved_bytes: Bytes = Field(default=0, description="of it, what the job never gets: context, allocator, links")
    host_memory_bytes: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="of one VM, for what its GPUs keep there; None: unlimited"
    )
    gpus_per_vm: int = Field(default=1, ge=1, description="neighbouring ranks that share a VM and its network card")
    price_per_hour: Dollars | None = Field(default=None, description="of one GPU, in dollars")


class ModelIdentity(Finite):
    """The model that was measured, and the precision of its computation."""

    name: str = Field(min_length=1)
    digest: str | None = Field(default=None, description="ModelFacts.digest; None in files written by hand")
    precision: str = Field(default="fp32", description="of the computation, for people")
    batch_dependent: bool = Field(default=False, description="no plan may lower its micro-batch")


class SectionTimes(Finite):
    """Seconds of one section, measured at ``micro_batches`` examples."""

    micro_batches: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        min_length=1, description="m of each time below, ascending; between them times are interpolated"
    )
    forward_s: tuple[Seconds, ...] = Field(description="F_i(m), keeping nothing")
    backward_s: tuple[Seconds, ...] = Field(description="B_i(m), whole")
    recompute_s: tuple[Seconds, ...] = Field(default=(), description="R_i(m), with a graph; left out: as forward_s")
    input_s: tuple[Seconds, ...] = Field(default=(), description="I_i(m), the input-gradient half of B")
    weight_s: tuple[Seconds, ...] = Field(default=(), description="W_i(m), the weight-gradient half of B")

    @model_validator(mode="after")
    def _one_time_per_size(self) -> "SectionTimes":
        if any(a >= b for a, b in pairwise(self.micro_batches)):
            raise ValueError(f"micro_batches {list(self.micro_batches)} must ascend")
        for name in ("forward_s", "backward_s", "recompute_s", "input_s", "weight_s"):
            times = getattr(self, name)
            if len(times) != len(self.micro_batches) and (times or name in ("forward_s", "backward_s")):
                raise ValueError(f"{name} has {len(times)} times for {len(self.micro_batches)} micro_batches")
        if bool(self.input_s) != bool(self.weight_s):
            raise ValueError("input_s and weight_s are halves of B: give both, or none")
        return self

    @property
    def splits(self) -> bool:
        """Whether B may run as I and W."""
        return bool(self.input_s)

    def at(self, times: tuple[float, ...], micro_batch: int) -> float:
        """Seconds of one of the section's ``times`` for a micro-batch of m examples.

        Linear between the sizes measured. Beyond the largest, per example as there; below the smallest as
        well, for a lone size, else on the line through the first two, but never below that.
        """
        sizes = self.micro_batches
        for (a, low), (b, high) in pairwise(zip(sizes, times, strict=True)):
            if micro_batch <= b:
                line = low + (high - low) * (micro_batch - a) / (b - a)
                return line if micro_batch >= a else max(line, low * micro_batch / a)
        return times[-1] * micro_batch / sizes[-1]


class SectionKind(SectionBytes, SectionTimes):
    """Sections that run the same graph."""

    reduced_bytes: Bytes | None = Field(default=None, description="all-reduced; left out: as gradient_bytes")


class SectionRun(Finite):
    """Consecutive sections whose kinds repeat."""

    kinds: tuple[str, ...] = Field(min_length=1, description="keys of 'kinds', one for each section, in order")
    count: int = Field(default=1, ge=1, le=_MOST_SECTIONS, description="how often they repeat")


class Jitter(Finite):
    """Delay of a message beyond the latency, as measured."""

    mean_s: Seconds = 0.0
    quantiles_s: tuple[Seconds, ...] = Field(
        default=(),
        description="at evenly spaced probabilities from 0 to 1 (11 numbers: least, deciles, most); empty: exponential",
    )

    @model_validator(mode="after")
    def _ascending(self) -> "Jitter":
        if len(self.quantiles_s) == 1 or any(a > b for a, b in pairwise(self.quantiles_s)):
            raise ValueError(f"quantiles_s {list(self.quantiles_s)} must be at least two numbers that ascend")
        return self


class Link(Finite):
    """One directed link between neighbouring stages, measured with both directions busy."""

    latency_s: Seconds = Field(description="of a message without its serialisation")
    bytes_per_s: Rate = Field(description="at which messages leave")
    line_bytes_per_s: Rate | None = Field(
        default=None, description="of all messages that leave a host, or come to one; left out: as of one link"
    )
    staged_s: Seconds = Field(default=0.0, description="further latency: copies between GPU and host at both ends")
    staged_bytes_per_s: Rate | None = Field(default=None, description="of both copies; left out: they take no time")
    jitter: Jitter = Jitter()

    def latency_of(self, size_bytes: float) -> float:
        """Seconds of latency of a message, including copies between GPU and host (other messages leave meanwhile)."""
        copied_s = 0.0 if self.staged_bytes_per_s is None else size_bytes / self.staged_bytes_per_s
        return self.latency_s + self.staged_s + copied_s

    @property
    def line_share(self) -> float:
        """Share of a message's time on its link for which it occupies the lines of both hosts."""
        return 1.0 if self.line_bytes_per_s is None else min(1.0, self.bytes_per_s / self.line_bytes_per_s)

    def at(self, *, latency_s: float, bytes_per_s: float) -> "Link":
        """The link with another latency and rate; its line changes with it."""
        line = self.line_bytes_per_s and self.line_bytes_per_s * bytes_per_s / self.bytes_per_s
        return self.model_copy(update={"latency_s": latency_s, "bytes_per_s": bytes_per_s, "line_bytes_per_s": line})


class Ring(Finite):
    """All-reduce over D ranks with k rings in flight: 2 (D - 1) rounds of latency + size / D / rate each."""

    in_flight: int = Field(default=1, ge=1, description="k, rings that run at once in a VM")
    ranks: Annotated[int, Field(ge=2)] | None = Field(default=None, description="D measured; None: any")
    latency_s: Seconds = Field(description="of a round")
    bytes_per_s: Rate = Field(description="of one of the rings, with all k running")

    def at(self, *, latency_s: float, bytes_per_s: float) -> "Ring":
        """The ring with another latency and rate."""
        return self.model_copy(update={"latency_s": latency_s, "bytes_per_s": bytes_per_s})


class NetworkCosts(Finite):
    """Links and rings of one reach."""

    link: Link
    rings: tuple[Ring, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> "NetworkCosts":
        keys = [(ring.in_flight, ring.ranks) for ring in self.rings]
        if len(set(keys)) < len(keys):
            raise ValueError("rings must differ in in_flight or ranks")
        return self


class OptimizerCosts(Finite):
    """The optimizer step, after all gradients are reduced."""

    fixed_s: Seconds = 0.0
    bytes_per_s: Rate | None = Field(
        default=None, description="of a stage's parameters, gradients and state together; None: takes no time"
    )
    host_bytes_per_s: Rate | None = Field(
        default=None, description="state lives in host memory, and crosses to the GPU and back at this rate"
    )
    streamed_bytes: Bytes = Field(default=0, description="of such state, what is on the GPU at once, at most")
    sharded: bool = Field(default=False, description="replicas of a stage divide the state by section")
    together: bool = Field(default=False, description="update_bytes of a stage add up; else the most counts")


STREAMED_SECTIONS = 2
"""Sections whose offloaded state is on the GPU at once: one is updated while the next one arrives."""
_INTERMEDIATE = 2
"""Intermediate results of Adam that exist at once, each of the size of a section's gradients."""
_PCIE_BYTES_PER_S = 12e9
"""Rate of pinned memory over 16 lanes of PCIe 3, one direction at a time; newer links are faster."""


class Calibration(Finite):
    """Primitive parameters of one model on one class of devices."""

    created: str = Field(default="", description="when, for people")
    notes: tuple[str, ...] = Field(default=(), description="where the numbers come from")
    hardware: Hardware
    model: ModelIdentity
    sized_for: int = Field(default=0, ge=0, description="global batch for which micro-batch sizes were tried")
    kinds: dict[str, SectionKind] = Field(min_length=1)
    sections: tuple[SectionRun, ...] = Field(min_length=1, description="of the model, first to last")
    tied: tuple[TiedParameter, ...] = ()
    within_vm: NetworkCosts | None = Field(default=None, description="between GPUs of a VM; None: as across_vms")
    across_vms: NetworkCosts
    action_s: Seconds = Field(default=0.0, description="fixed cost of each action beyond its sections' times")
    hand_over_s: Seconds = Field(
        default=0.0,
        description="further cost of an action that gives a message, in a pipeline of several stages",
    )
    samples_s: Seconds = Field(
        default=0.0, description="further cost of an F that reads samples, whose loader shares the interpreter with it"
    )
    optimizer: OptimizerCosts = OptimizerCosts()
    snapshot_bytes_per_s: Rate | None = Field(default=None, description="copying state out for a checkpoint")
    to_device_bytes_per_s: Rate | None = Field(
        default=None, description="copying parameters that rest in host memory to the device; left out: nominal"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Calibration":
        used = {kind for run in self.sections for kind in run.kinds}
        unknown = sorted(used - set(self.kinds))
        if unknown:
            raise ValueError(
                f"sections name the kind {unknown[0]!r}, which is not one of the kinds {sorted(self.kinds)}"
            )
        if self.section_count > _MOST_SECTIONS:
            raise ValueError(f"the model has {self.section_count} sections, more than {_MOST_SECTIONS}")
        unused = sorted(set(self.kinds) - used)
        if unused:
            raise ValueError(f"kind {unused[0]!r} is used by no section")
        for tied in self.tied:
            ordered = all(a < b for a, b in pairwise(tied.sections))
            if not ordered or tied.sections[0] < 0 or tied.sections[-1] >= self.section_count:
                raise ValueError(
                    f"tied parameter {tied.name!r} names sections {list(tied.sections)}; they must ascend and be "
                    f"within 0 to {self.section_count - 1}"
                )
        return self

    @property
    def kind_names(self) -> tuple[str, ...]:
        """The kind of each section."""
        return tuple(name for run in self.sections for name in run.kinds * run.count)

    @property
    def section_count(self) -> int:
        """Sections of the model."""
        return sum(len(run.kinds) * run.count for run in self.sections)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes m at which some section was measured, ascending."""
        return tuple(sorted({m for kind in self.kinds.values() for m in kind.micro_batches}))

    def compute_s(self, micro_batch: int) -> float:
        """Seconds of F and B of all sections, which is all that choosing m, and comparing devices, needs."""
        by_kind = {
            name: (
                kind.at(kind.forward_s, micro_batch),
                0.0 if kind.gradient_free else kind.at(kind.backward_s, micro_batch),
            )
            for name, kind in self.kinds.items()
        }
        forward_s = backward_s = 0.0
        for name in self.kind_names:
            forward_s += by_kind[name][0]
            backward_s += by_kind[name][1]
        return forward_s + backward_s

    def rounded(self) -> "Calibration":
        """This calibration for a job whose fp32 gradients are all-reduced as bf16."""
        kinds = {
            name: kind.model_copy(update={"reduced_bytes": kind.summed_bytes // 2}) for name, kind in self.kinds.items()
        }
        return self.model_copy(update={"kinds": kinds})

    @property
    def crossing_bytes_per_s(self) -> float:
        """Rate of copies between a GPU and host memory, one direction at a time."""
        return self.optimizer.host_bytes_per_s or self.to_device_bytes_per_s or _PCIE_BYTES_PER_S

    def without_halves(self) -> "Calibration":
        """This calibration for a job whose sections always run B whole."""
        kinds = {name: kind.model_copy(update={"input_s": (), "weight_s": ()}) for name, kind in self.kinds.items()}
        return self.model_copy(update={"kinds": kinds})

    def with_sharded_optimizer(self) -> "Calibration":
        """This calibration for a job whose replicas divide the optimizer's state."""
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update={"sharded": True})})

    def offloaded(self, *, apart: bool = True) -> "Calibration":
        """This calibration for a job whose optimizer state lives in host memory, and is streamed by section.

        A calibration that was measured in that way stays as it is.

        Args:
            apart: host memory is not the device's own, so that state in it takes no memory of the device.
        """
        if self.optimizer.host_bytes_per_s is not None:
            return self
        streamed_bytes = max(_streamed_bytes(kind, apart=apart) for kind in self.kinds.values())
        rate = _PCIE_BYTES_PER_S if apart else None
        streamed = self.optimizer.model_copy(update={"host_bytes_per_s": rate, "streamed_bytes": streamed_bytes})
        kinds = {name: kind.model_copy(update={"update_bytes": 0}) for name, kind in self.kinds.items()}
        return self.model_copy(update={"optimizer": streamed, "kinds": kinds})


class Calibrations(Finite):
    """Calibrations of one model by class of devices: all that the planner knows, and what a file holds."""

    format: Literal["varuna-calibration"] = "varuna-calibration"
    version: Literal[2] = VERSION
    across_regions: NetworkCosts | None = Field(default=None, description="between regions; None: nominal")
    classes: dict[str, Calibration] = Field(
        min_length=1, description="by class of the GPU, as workers tell it; of all that are not known under no name"
    )

    @model_validator(mode="after")
    def _of_one_model(self) -> "Calibrations":
        for name, each in self.classes.items():
            if each.section_count != self.first.section_count:
                raise ValueError(
                    f"device class {name!r} was calibrated with {each.section_count} sections "
                    f"where {self.names[0]!r} has {self.first.section_count}: they are of different models"
                )
        return self

    @classmethod
    def of_one(cls, calibration: Calibration, name: str = "") -> "Calibrations":
        """Make the calibrations of a run on one class of devices; without a name, of any."""
        return cls(classes={name: calibration})

    @property
    def names(self) -> tuple[str, ...]:
        """Classes that were calibrated."""
        return tuple(self.classes)

    @property
    def first(self) -> Calibration:
        """The first class's: for what is the same for all, such as the model."""
        return next(iter(self.classes.values()))

    def nearest(self, name: str) -> str:
        """Return the class whose costs a class has: if need be of that device elsewhere, or the slowest one."""
        device = device_of(name)
        elsewhere = (each for each in self.classes if device_of(each) == device)
        known = (each for each in (name, device, *elsewhere) if each in self.classes)
        return next(known, None) or max(self.classes, key=lambda each: self.classes[each].compute_s(1))

    def of(self, name: str) -> Calibration:
        """Return the costs of a class of devices, or those that come nearest."""
        return self.classes[self.nearest(name)]

    def only(self, name: str) -> "Calibrations":
        """These without those of other classes than one that was calibrated."""
        return self.model_copy(update={"classes": {name: self.classes[name]}})

    def joined(self, newer: "Calibrations") -> "Calibrations":
        """These, with what is newly known of some classes of devices."""
        across = newer.across_regions or self.across_regions
        return Calibrations(across_regions=across, classes=self.classes | newer.classes)

    def named(self) -> "Calibrations":
        """These, with the name of the hardware for a class of no name."""
        known = {name or each.hardware.name: each for name, each in self.classes.items()}
        return self.model_copy(update={"classes": known})

    def without_any(self) -> "Calibrations":
        """These without figures that are for any class of devices, if there are others."""
        known = {name: each for name, each in self.classes.items() if name} or self.classes
        return self.model_copy(update={"classes": known})

    def each(self, change: Callable[[Calibration], Calibration]) -> "Calibrations":
        """These, changed for every class of devices."""
        return self.model_copy(update={"classes": {name: change(each) for name, each in self.classes.items()}})


def _streamed_bytes(kind: SectionKind, *, apart: bool) -> int:
    """Bytes on the device while state is streamed: a GPU copies the next section in meanwhile, a CPU afterwards."""
    work_bytes = _INTERMEDIATE * kind.summed_bytes
    if apart:
        return STREAMED_SECTIONS * kind.optimizer_bytes + work_bytes
    return kind.optimizer_bytes + max((STREAMED_SECTIONS - 1) * kind.optimizer_bytes, work_bytes)
