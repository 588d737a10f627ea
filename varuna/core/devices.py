"""Devices that workers compute on: of which class they are, where, and how much memory each worker can count on. Pure.

Machines of one region have a fast network between them, and no pipeline reaches over several regions if that can be
avoided. So where a run is in several, equal devices in two of them are of two classes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from pydantic import Field

from varuna.core.value import Value

STAGING_BYTES = 64 * 2**20
"""Most host memory of a worker for parts of state and sums of tied gradients that are on their way."""
_RESERVED_BYTES = 2**30
"""Bytes that each worker loses to the driver's context, kernels, and workspaces of libraries."""
_RESERVED_PART = 16
"""A worker also loses a sixteenth of its share, which the allocator cannot give out in one piece."""


_AT = "@ "
"""Before the region of a device class."""
MAX_ZONE = 100
_NAME = r"[\w.:+-]+"
REGION, ZONE = rf"^{_NAME}$", rf"^{_NAME}(/{_NAME})*$"
"""A zone is its region, a slash and its own name, or a name alone, which is then the region's too."""


def is_zone(text: str) -> bool:
    """Return whether this can be a zone."""
    return len(text) <= MAX_ZONE and re.fullmatch(ZONE, text) is not None


def region_of_zone(zone: str) -> str:
    """Return the region that a zone is in, such as ``us-east-1`` of ``us-east-1/us-east-1a``."""
    return zone.rpartition("/")[0] or zone


def class_in(device_class: str, region: str) -> str:
    """Name the class of such devices in a region; "": in any."""
    return f"{device_class} {_AT}{region}".lstrip() if region else device_class


def device_of(name: str) -> str:
    """Return the class of devices, without the region."""
    return name.partition(_AT)[0].rstrip()


def region_of(name: str) -> str:
    """Return the region of a class; "": any."""
    return name.partition(_AT)[2]


class DeviceFacts(Value):
    """A device with memory of its own."""

    name: str = Field(max_length=255, description="the same for all workers that use it, and for no others")
    memory_bytes: int = Field(gt=0, description="of the whole device")
    others_bytes: int = Field(default=0, ge=0, description="of these, held by other programs when the worker began")


class DeviceFault(Value):
    """A fault that ended a worker and is of its device or machine alone: the same work may go well elsewhere."""

    error: str = Field(max_length=300, description="as a library or the system said it")
    device: str = Field(default="", max_length=255, description="the name in its ``DeviceFacts``; empty: unknown")
    is_memory: bool = Field(default=False, description="it has too little memory, and is whole")
    others_bytes: int = Field(default=0, ge=0, description="of its memory, held by other processes then")
    of_machine: bool = Field(
        default=False, description="not of the device, but of a disk, a mount or the like beside it"
    )


def rest_s(faults: int) -> float:
    """Return the seconds that a device gets no worker, after its n-th fault: a minute at first, at most an hour."""
    return min(60.0 * 2.0 ** (faults - 1), 3600.0)


class WorkerGroup(Value):
    """Workers that are alike: devices of one class, in one region, equally fast."""

    count: int = Field(ge=1)
    device_class: str = Field(default="", max_length=512, description="such as 'Tesla V100-SXM2-16GB'; empty: unknown")
    region: str = Field(default="", max_length=MAX_ZONE, description="empty: any")
    speed: float = Field(
        default=1.0, gt=0, le=1, description="what one computes while one of full speed, as calibrated, computes 1"
    )
    memory_bytes: int | None = Field(default=None, gt=0, description="that each of them can count on; None: unknown")
    memory_part: float = Field(
        default=1.0, gt=0, le=1, description="of what they have that plans may fill: less, once it was too little"
    )

    @property
    def name(self) -> str:
        """Name of the class in plans and calibrations: of the device, in its region."""
        return class_in(self.device_class, self.region)

    @classmethod
    def of_class(
        cls,
        name: str,
        count: int,
        *,
        speed: float = 1.0,
        memory_bytes: int | None = None,
        memory_part: float = 1.0,
    ) -> "WorkerGroup":
        """Make a group of a class by its name."""
        return cls(
            count=count,
            device_class=device_of(name),
            region=region_of(name),
            speed=speed,
            memory_bytes=memory_bytes,
            memory_part=memory_part,
        )


WorkerGroups = tuple[WorkerGroup, ...]
"""The workers of a run, or those that a plan is asked for: each class, and each speed, is a group."""


def equal_workers(count: int, memory_bytes: int | None = None) -> WorkerGroups:
    """Describe workers of one speed, of whose devices no more is known."""
    return (WorkerGroup(count=count, memory_bytes=memory_bytes),) if count else ()


def size_of(workers: Iterable[WorkerGroup]) -> int:
    """Count workers."""
    return sum(group.count for group in workers)


def class_names(workers: Iterable[WorkerGroup]) -> tuple[str, ...]:
    """Name the classes of workers, each once."""
    return tuple(dict.fromkeys(group.name for group in workers))


def by_class(workers: Iterable[WorkerGroup]) -> dict[str, WorkerGroups]:
    """Return the groups of each class, the fastest first."""
    found: dict[str, list[WorkerGroup]] = {}
    for group in workers:
        found.setdefault(group.name, []).append(group)
    return {name: tuple(sorted(groups, key=lambda each: -each.speed)) for name, groups in found.items()}


def speeds_of(workers: Iterable[WorkerGroup]) -> tuple[float, ...]:
    """Return the speed of each worker, the fastest first."""
    return tuple(chain(*([each.speed] * each.count for each in sorted(workers, key=lambda each: -each.speed))))


def as_if_equal(workers: Iterable[WorkerGroup]) -> WorkerGroups:
    """Return these workers as if all were of full speed."""
    found: dict[WorkerGroup, int] = {}
    for group in workers:
        alike = group.model_copy(update={"count": 1, "speed": 1.0})
        found[alike] = found.get(alike, 0) + group.count
    return tuple(alike.model_copy(update={"count": count}) for alike, count in found.items())


def of_no_class(workers: Iterable[WorkerGroup]) -> WorkerGroups:
    """Return these workers as if nothing but their speed were known."""
    return tuple(WorkerGroup(count=group.count, speed=group.speed) for group in workers)


def of_count(workers: Iterable[WorkerGroup], count: int) -> WorkerGroups:
    """Return the fastest ``count`` of these workers; if these are fewer, the slowest stand for the rest."""
    found, missing = list[WorkerGroup](), count
    for group in sorted(workers, key=lambda each: -each.speed):
        taken = min(missing, group.count)
        found += [group.model_copy(update={"count": taken})] if taken else []
        missing -= taken
    if missing and found:
        found[-1] = found[-1].model_copy(update={"count": found[-1].count + missing})
    return tuple(found)


def reserved_bytes(share_bytes: int) -> int:
    """Return the bytes of a worker's share of a device that no plan may fill; at most half of the share."""
    return min(_RESERVED_BYTES + share_bytes // _RESERVED_PART, share_bytes // 2)


def others_bytes(total_bytes: int, free_bytes: int, own_bytes: int) -> int:
    """Return the bytes of a device that other processes hold; what they hold of the reserve may be this one's context.

    Args:
        total_bytes: of the device.
        free_bytes: by the driver's word.
        own_bytes: that this process's allocator has from the driver.
    """
    return max(0, total_bytes - free_bytes - own_bytes - _RESERVED_BYTES)


def worker_bytes(devices: Iterable[DeviceFacts | None]) -> int | None:
    """Return the bytes that every worker of a run can count on: the smallest share of a device, less the reserve.

    Other programs have what the first worker on a device saw: a later one saw the first one's memory, too.

    Args:
        devices: of each worker; None where there is none, or none is known.
    """
    known = sorted((device for device in devices if device is not None), key=lambda each: -each.others_bytes)
    # Of each device the last one stays: the worker that saw the least memory in other hands.
    users, least = Counter(device.name for device in known), {device.name: device for device in known}
    shares = [max(1, each.memory_bytes - each.others_bytes) // users[each.name] for each in least.values()]
    return min((share - reserved_bytes(share) for share in shares), default=None)


def are_enough(wanted: Mapping[str, int], there: Mapping[str, int]) -> bool:
    """Return whether there are as many workers as are wanted, by class of device; of no class, any will do."""
    if not any(wanted):
        return sum(wanted.values()) <= sum(there.values())
    return all(workers <= there.get(name, 0) for name, workers in wanted.items())
