"""The request for a plan."""

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Literal

from pydantic import Field

from varuna.calibration.format import Calibration, Calibrations
from varuna.core.devices import WorkerGroups, by_class, class_names, device_of, of_count, of_no_class, size_of
from varuna.core.value import Value

Objective = Literal["time", "dollar"]


class PlanRequest(Value):
    """A request for a plan: a model on some hardware, the workers, and what the user fixed."""

    calibrations: Calibrations
    workers: WorkerGroups = Field(
        description="that there are, each with a GPU if any has one; of no class: all are as the calibration says"
    )
    global_batch: int = Field(ge=1, description="M, examples per step")
    micro_batch: int | None = Field(default=None, description="m if it is fixed")
    lowers_micro_batch: bool = Field(default=False, description="that m is a wish: halved where nothing fits")
    memory_bytes: int | None = Field(default=None, gt=0, description="of a worker, instead of the calibration's")
    gpus_per_vm: int | None = Field(default=None, ge=1, description="instead of the calibration's")
    stages: int | None = Field(default=None, description="P if it is fixed")
    mixes: bool = Field(
        default=True, description="pipelines may be of different depth, where workers would be left over otherwise"
    )
    leaves_idle: bool = Field(default=True, description="workers may idle where rings cost more than they bring")
    tentative: bool = Field(default=False, description="steps may be applied before the vote, on copies")
    memory_apart: bool = Field(
        default=False,
        description="devices have memory of their own: copies of what other workers have lie in that of hosts, and "
        "inputs may wait there for R",
    )
    streams_frozen: bool = Field(
        default=False, description="parameters that are not trained rest in host memory; else where nothing else fits"
    )
    policy: str = Field(default="adaptive", description="schedule policy of the plans")
    objective: Objective = Field(default="time", description="fastest step, or most examples per dollar")
    losses_per_hour: float = Field(
        default=0.0, ge=0, description="of workers, without notice; 0: nothing is known, and the fastest step is best"
    )
    saves: bool = Field(default=True, description="checkpoints are written where losses of workers do not reach them")
    wanted: int = Field(default=1, ge=1, description="how many depths to rank exactly")

    @property
    def calibration(self) -> Calibration:
        """Costs of the workers' class; of several, the first one's, for what is the same for all."""
        return self.calibrations.first

    @property
    def count(self) -> int:
        """Number of workers."""
        return size_of(self.workers)

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes of the workers' devices; () where none is known."""
        names = class_names(self.workers)
        return names if any(names) else ()

    def count_of(self, name: str) -> int:
        """Count the workers of a class."""
        return size_of(group for group in self.workers if group.name == name)

    def with_count(self, name: str, count: int) -> "PlanRequest":
        """The same question, with so many workers of a class: its fastest."""
        groups = by_class(self.workers)
        groups[name] = of_count(groups[name], count)
        return self.model_copy(update={"workers": tuple(chain(*groups.values()))})

    def of_class(self, name: str) -> "PlanRequest":
        """The same question for the workers of one class alone, whose plans are of no class."""
        nearest, groups = self.calibrations.nearest(name), by_class(self.workers)[name]
        known, memory_bytes = self.calibrations.classes[nearest], self.memory_bytes
        if memory_bytes is None and device_of(nearest) in ("", device_of(name)):  # of another one it says nothing
            memory_bytes = known.hardware.memory_bytes
        memory_bytes = groups[0].memory_bytes if memory_bytes is None else memory_bytes
        update = {
            "calibrations": Calibrations.of_one(known),
            "workers": of_no_class(groups),
            "memory_bytes": None if memory_bytes is None else int(memory_bytes * groups[0].memory_part),
        }
        return self.model_copy(update=update)

    def for_class(self, name: str) -> "PlanRequest":
        """The same question for the workers of one class, if there are any."""
        return self.of_class(name) if name in self.classes else self

    def of_classes(self, names: Collection[str]) -> "PlanRequest":
        """The same question for the workers of some classes."""
        return self.model_copy(update={"workers": tuple(group for group in self.workers if group.name in names)})

    def of_shape(self, stages: int, replicas: int, micro_batch: int) -> "PlanRequest":
        """The same question for equal pipelines, so many and so deep, on the fastest workers."""
        update = {
            "workers": of_count(self.workers, stages * replicas),
            "stages": stages,
            "micro_batch": micro_batch,
            "lowers_micro_batch": False,
            "leaves_idle": False,
            "wanted": 1,
        }
        return self.model_copy(update=update)

    def as_slowest(self) -> "PlanRequest":
        """The same question as if all workers were of the slowest class, and had the least memory of any."""
        parts = [self.of_class(name) for name in self.classes]
        slowest = max(parts, key=lambda part: part.calibration.compute_s(1))
        limits = [part.limit_bytes for part in parts if part.limit_bytes is not None]
        hosts = [part.host_limit_bytes for part in parts if part.host_limit_bytes is not None]
        vm_size = slowest.vm_size if len({part.vm_size for part in parts}) == 1 else 1
        hardware = slowest.calibration.hardware.model_copy(
            update={"host_memory_bytes": min(hosts, default=None), "gpus_per_vm": vm_size}
        )
        known = slowest.calibration.model_copy(update={"hardware": hardware})
        update = {
            "calibrations": Calibrations.of_one(known),
            "workers": of_no_class(self.workers),
            "memory_bytes": min(limits, default=None),
        }
        return slowest.model_copy(update=update)

    @property
    def are_unequal(self) -> bool:
        """Whether some worker is slower than what was calibrated."""
        return any(group.speed < 1 for group in self.workers)

    @property
    def limit_bytes(self) -> int | None:
        """Memory of a worker, of one class; None: unlimited."""
        known, some = self.calibration.hardware.memory_bytes, self.workers[0] if self.workers else None
        known = known if self.memory_bytes is None else self.memory_bytes
        if some is None:
            return known
        known = some.memory_bytes if known is None else known
        return None if known is None else int(known * some.memory_part)

    @property
    def host_limit_bytes(self) -> int | None:
        """Host memory of a worker: its share of the VM's; None: unlimited."""
        whole = self.calibration.hardware.host_memory_bytes
        return None if whole is None else whole // self.vm_size

    @property
    def may_stream(self) -> bool:
        """Whether frozen parameters could rest in host memory, and do not yet."""
        if self.streams_frozen or (self.limit_bytes is None and not self.classes):
            return False
        return any(kind.streamable_bytes for kind in self.calibration.kinds.values())

    @property
    def vm_size(self) -> int:
        """GPUs of a VM."""
        return self.gpus_per_vm or self.calibration.hardware.gpus_per_vm

    def paid(self, workers: int) -> int:
        """GPUs in the VMs that ``workers`` occupy."""
        return -(-workers // self.vm_size) * self.vm_size

    def hourly(self, classes: Mapping[str, int]) -> float | None:
        """Dollars per hour of the VMs of these workers, counted by class; None: some class has no price."""
        dollars = 0.0
        for name, workers in classes.items():
            hardware = self.calibrations.of(name).hardware
            if hardware.price_per_hour is None:
                return None
            vm_size = self.gpus_per_vm or hardware.gpus_per_vm
            dollars += hardware.price_per_hour * -(-workers // vm_size) * vm_size
        return dollars

    def score(self, workers: int, step_s: float) -> float:
        """The figure that plans are ranked by, the least first: seconds, or GPU-seconds, per step."""
        return step_s if self.objective == "time" else step_s * self.paid(workers)
