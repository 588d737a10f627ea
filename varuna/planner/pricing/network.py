"""Links and rings of a plan, and their costs: ranks of a VM are neighbours; a pipeline stays in a region."""

from collections.abc import Iterable, Sequence

from varuna.calibration.format import Calibration, Calibrations, Link, NetworkCosts, Ring
from varuna.core.devices import region_of
from varuna.simulator.costs import mean_delay_s

_BETWEEN_REGIONS = NetworkCosts(
    link=Link(latency_s=0.02, bytes_per_s=0.1e9), rings=(Ring(latency_s=0.02, bytes_per_s=0.1e9),)
)
"""A TCP connection over a thousand kilometres or two, until one was measured."""


def are_apart(classes: Iterable[str]) -> bool:
    """Return whether workers of these classes are in several regions."""
    return len({region_of(name) for name in classes}) > 1


def across_regions(calibrations: Calibrations) -> NetworkCosts:
    """The network between regions."""
    return calibrations.across_regions or _BETWEEN_REGIONS


def crossings(stages: int, replicas: int, gpus_per_vm: int) -> tuple[bool, ...]:
    """For each link of a pipeline, whether it leaves the VM.

    Rank = replica x P + stage, and each VM holds ``gpus_per_vm`` consecutive ranks. Where P does not divide evenly,
    replicas lie differently: the one that crosses most stands for all, since the slowest decides.
    """
    if gpus_per_vm == 1:
        return (True,) * (stages - 1)
    shifts = {replica * stages % gpus_per_vm for replica in range(min(replicas, gpus_per_vm))}
    patterns = [tuple((shift + k + 1) % gpus_per_vm == 0 for k in range(stages - 1)) for shift in sorted(shifts)]
    return max(patterns, key=sum)


def link_of(calibration: Calibration, *, crosses: bool) -> Link:
    """The link between neighbouring stages."""
    return network_of(calibration, crosses=crosses).link


def network_of(calibration: Calibration, *, crosses: bool) -> NetworkCosts:
    """The network within a VM, or across VMs."""
    return calibration.across_vms if crosses or calibration.within_vm is None else calibration.within_vm


def reduce_s(
    calibration: Calibration, size_bytes: float, *, stages: int, replicas: int, gpus_per_vm: int, members: int
) -> float:
    """Seconds of a stage's all-reduce over its replicas; ``members`` ranks take part.

    A VM holds up to ``gpus_per_vm`` stages, all of whose rings run at once. A ring stays within a VM only if the
    whole plan does.

    Args:
        calibration: has the rings.
        size_bytes: bytes that are summed, on each rank.
        stages: P.
        replicas: D of the plan.
        gpus_per_vm: GPUs of a VM.
        members: ranks that take part.
    """
    crosses = stages * replicas > gpus_per_vm
    in_flight = min(stages, gpus_per_vm)
    return ring_s(network_of(calibration, crosses=crosses).rings, size_bytes, ranks=members, in_flight=in_flight)


def reduce_share(calibration: Calibration, *, stages: int, replicas: int, gpus_per_vm: int) -> float:
    """Share of its host's line that an all-reduce takes, each way; 0 within a VM. Arguments as for ``reduce_s``."""
    if stages * replicas <= gpus_per_vm:
        return 0.0
    return ring_share(calibration.across_vms, ranks=replicas, in_flight=min(stages, gpus_per_vm))


def exchange_s(calibration: Calibration, size_bytes: float, *, crosses: bool, members: int) -> float:
    """Seconds in which each of the ``members`` sends its gradient of a tied parameter to every other one, by itself."""
    link = link_of(calibration, crosses=crosses)
    return link.latency_of(size_bytes) + mean_delay_s(link.jitter) + (members - 1) * size_bytes / link.bytes_per_s


def ring_s(rings: Sequence[Ring], size_bytes: float, *, ranks: int, in_flight: int) -> float:
    """Seconds of a ring all-reduce: 2 (D - 1) rounds, each of 1 / D of the buffer.

    Measured for the next larger number of rings in flight; beyond the largest, they share its rate.
    """
    if ranks < 2 or not size_bytes:
        return 0.0
    latency_s, bytes_per_s = _of_one(rings, ranks, in_flight)
    return 2 * (ranks - 1) * (latency_s + size_bytes / ranks / bytes_per_s)


def ring_share(network: NetworkCosts, *, ranks: int, in_flight: int) -> float:
    """Share of its host's line that a ring of D ranks takes each way, while k are in flight."""
    if ranks < 2:
        return 0.0
    _, bytes_per_s = _of_one(network.rings, ranks, in_flight)
    return min(1.0 / in_flight, bytes_per_s / (network.link.line_bytes_per_s or network.link.bytes_per_s))


def _of_one(rings: Sequence[Ring], ranks: int, in_flight: int) -> tuple[float, float]:
    """Latency and rate of one ring of D ranks, while k are in flight."""
    measured = sorted({ring.in_flight for ring in rings})
    used = next((k for k in measured if k >= in_flight), measured[-1])
    latency_s, bytes_per_s = _between([ring for ring in rings if ring.in_flight == used], ranks)
    return latency_s, bytes_per_s / max(1.0, in_flight / used)


def _between(rings: Sequence[Ring], ranks: int) -> tuple[float, float]:
    """Latency and rate for D ranks: linear in D between the sizes measured, constant beyond."""
    known = sorted((ring.ranks or 0, ring.latency_s, ring.bytes_per_s) for ring in rings if ring.ranks is not None)
    if not known:
        return rings[0].latency_s, rings[0].bytes_per_s
    low = max((point for point in known if point[0] <= ranks), default=known[0])
    high = min((point for point in known if point[0] >= ranks), default=known[-1])
    if low[0] == high[0]:
        return low[1], low[2]
    share = (ranks - low[0]) / (high[0] - low[0])
    return low[1] + (high[1] - low[1]) * share, low[2] + (high[2] - low[2]) * share
