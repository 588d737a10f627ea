"""Transfer of tensors to and from a rank's device, by their purpose. TCP takes host memory, NCCL the device's."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.model import Links
from varuna.engine.device.host_copies import CPU_COPIES, HostCopies, StreamCopies
from varuna.engine.device.mapped_copies import MappedCopies
from varuna.engine.device.streams import Streams, streams_of
from varuna.engine.links.gpu_links import GpuTransport
from varuna.engine.links.nccl import Nccl


class DirectCopies(StreamCopies):
    """Messages that go from device to device are packed, and arrive, in device memory."""

    def room(self, size_bytes: int) -> Tensor:
        """Allocate device memory."""
        return self._streams.allocate(self._down, size_bytes)

    def copy_to_device(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the same tensors, which have arrived; their memory stays until computations with them are through."""
        computing = self._streams.computing()
        for value in values.values():
            self._streams.record_stream(value, computing)
        return dict(values)


class TransferPaths(NamedTuple):
    """The copies of a rank: on a GPU no kind waits for another one."""

    links: HostCopies = CPU_COPIES
    """samples, activations and their gradients"""
    sums: HostCopies = CPU_COPIES
    """sums of gradients on their way to other ranks"""
    streams: Streams | None = None
    """of the device; None: the training thread itself computes"""
    saves: HostCopies = CPU_COPIES
    """state on its way into a checkpoint"""
    direct: HostCopies = CPU_COPIES
    """copies of messages on links that go by ``gpu_transport``"""
    gpu_transport: GpuTransport | None = None
    """transport from this device to others without the host, where it may"""
    optimizer: HostCopies = CPU_COPIES
    """offloaded optimizer state"""
    stash: HostCopies = CPU_COPIES
    """inputs that wait for their R in host memory"""
    state: HostCopies = CPU_COPIES
    """state on its way to another rank, which keeps a copy"""
    frozen: HostCopies = MappedCopies()
    """parameters that are not trained, on their way to the section that is next"""
    compresses: bool = True
    """messages are compressed on a line that is waited for, where that is faster"""


def traffic_of(device: torch.device, links: Links = "host", *, compresses: bool = True) -> TransferPaths:
    """Return the traffic of a worker on ``device``.

    Raises:
        UsageError: there is no NCCL for such links.
    """
    gpu_transport = Nccl(device) if links == "nccl" and device.type == "cuda" else None
    return traffic_over(streams_of(device), gpu_transport)._replace(compresses=compresses)


def traffic_over(streams: Streams | None, gpu_transport: GpuTransport | None = None) -> TransferPaths:
    """Return the traffic over ``streams``."""
    if streams is None:
        return TransferPaths()
    links, sums, saves, optimizer, stash, state, frozen = (StreamCopies(streams) for _ in range(7))
    direct = CPU_COPIES if gpu_transport is None else DirectCopies(streams)
    return TransferPaths(links, sums, streams, saves, direct, gpu_transport, optimizer, stash, state, frozen)
