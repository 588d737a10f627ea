"""Memory of the devices that workers compute on: how much of it each worker can count on. Pure."""

from collections import Counter
from collections.abc import Iterable

from pydantic import Field

from varuna.core.value import Value

_RESERVED_BYTES = 2**30
"""What each worker loses to the driver's context, kernels, and workspaces of libraries."""
_RESERVED_PART = 16
"""A worker also loses a sixteenth of its share, which the allocator cannot give out in one piece."""


class DeviceFacts(Value):
    """A device with memory of its own."""

    name: str = Field(max_length=255, description="the same for all workers that use it, and for no others")
    memory_bytes: int = Field(gt=0, description="of the whole device")


def reserved_bytes(share_bytes: int) -> int:
    """Bytes of a worker's share of a device that no plan may fill; at most half of the share."""
    return min(_RESERVED_BYTES + share_bytes // _RESERVED_PART, share_bytes // 2)


def worker_bytes(devices: Iterable[DeviceFacts | None]) -> int | None:
    """Bytes that every worker of a run can count on: the smallest share of a device, less the reserve.

    Args:
        devices: of each worker; None where there is none, or nobody knows.
    """
    known = [device for device in devices if device is not None]
    users = Counter(device.name for device in known)
    shares = [device.memory_bytes // users[device.name] for device in known]
    return min((share - reserved_bytes(share) for share in shares), default=None)
