"""Devices that workers compute on: of which class they are, where, and how much memory each worker can count on. Pure.

Machines of one region have a fast network between them, and no pipeline reaches over several regions if that can be
avoided. So where a run is in several, equal devices in two of them are of two classes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

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
    """Whether this can be a zone."""
    return len(text) <= MAX_ZONE and re.fullmatch(ZONE, text) is not None


def region_of_zone(zone: str) -> str:
    """The region that a zone is in, such as ``us-east-1`` of ``us-east-1/us-east-1a``."""
    return zone.rpartition("/")[0] or zone


def class_in(device_class: str, region: str) -> str:
    """The class of such devices in a region; "": in any."""
    return f"{device_class} {_AT}{region}".lstrip() if region else device_class


def device_of(name: str) -> str:
    """The class of devices, without the region."""
    return name.partition(_AT)[0].rstrip()


def region_of(name: str) -> str:
    """The region of a class; "": any."""
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
    """For how long a device that broke gets no worker, after so many faults: a minute at first, at most an hour."""
    return min(60.0 * 2.0 ** (faults - 1), 3600.0)


class ClassSize(Value):
    """Workers whose devices are of one class, and therefore about as fast."""

    name: str = Field(max_length=512, description="such as 'Tesla V100-SXM2-16GB', or that '@' a region")
    workers: int = Field(ge=1)
    memory_bytes: int | None = Field(default=None, gt=0, description="that each of them can count on; None: unknown")
    memory_part: float = Field(
        default=1.0, gt=0, le=1, description="of what they have that plans may fill: less, once it was too little"
    )


def reserved_bytes(share_bytes: int) -> int:
    """Bytes of a worker's share of a device that no plan may fill; at most half of the share."""
    return min(_RESERVED_BYTES + share_bytes // _RESERVED_PART, share_bytes // 2)


def others_bytes(total_bytes: int, free_bytes: int, own_bytes: int) -> int:
    """Bytes of a device that other processes hold; what they hold of the reserve may be this one's context.

    Args:
        total_bytes: of the device.
        free_bytes: by the driver's word.
        own_bytes: that this process's allocator has from the driver.
    """
    return max(0, total_bytes - free_bytes - own_bytes - _RESERVED_BYTES)


def worker_bytes(devices: Iterable[DeviceFacts | None]) -> int | None:
    """Bytes that every worker of a run can count on: the smallest share of a device, less the reserve.

    Other programs have what the first worker on a device saw: a later one saw the first one's memory, too.

    Args:
        devices: of each worker; None where there is none, or nobody knows.
    """
    known = sorted((device for device in devices if device is not None), key=lambda each: -each.others_bytes)
    users, least = Counter(device.name for device in known), {device.name: device for device in known}
    shares = [max(1, each.memory_bytes - each.others_bytes) // users[each.name] for each in least.values()]
    return min((share - reserved_bytes(share) for share in shares), default=None)


def are_enough(wanted: Mapping[str, int], there: Mapping[str, int]) -> bool:
    """Whether there are as many workers as are wanted, by class of device; wanted of no class at all, any will do."""
    if not any(wanted):
        return sum(wanted.values()) <= sum(there.values())
    return all(workers <= there.get(name, 0) for name, workers in wanted.items())


def by_class(sizes: Iterable[ClassSize], values: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    """Values of workers that are listed class by class; all are () if there are none."""
    found, first = dict[str, tuple[float, ...]](), 0
    for size in sizes:
        found[size.name] = values[first : first + size.workers]
        first += size.workers
    return found


def class_sizes(workers: Iterable[tuple[str, DeviceFacts | None]]) -> tuple[ClassSize, ...]:
    """Count the workers of each class, by its name; () where no worker names one.

    Args:
        workers: class and device of each; a class of "" is one that is not known.
    """
    devices: dict[str, list[DeviceFacts | None]] = {}
    for name, device in workers:
        devices.setdefault(name, []).append(device)
    if not any(devices):
        return ()
    return tuple(
        ClassSize(name=name, workers=len(found), memory_bytes=worker_bytes(found))
        for name, found in sorted(devices.items())
    )
