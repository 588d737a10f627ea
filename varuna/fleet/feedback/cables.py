"""Speeds of a run's network, as its messages, all-reduces and votes show them. Pure."""

from collections.abc import Collection, Sequence
from functools import reduce
from statistics import median
from typing import NamedTuple, TypeVar

from varuna.calibration.format import Calibrations, Link, NetworkCosts, Ring
from varuna.core.plan import Plan
from varuna.core.times import Carried, Compressed, RankTimes
from varuna.planner.pricing.network import across_regions, crossings

_LEAST, _MOST = 0.1, 0.9
"""Of the seconds of a transfer: what latency that was not seen may be, and what it may be at all."""
_LONG_LATENCY_S = 0.005
"""Whole steps stretch no latency beyond this: hosts of a region are nearer."""
_LEAST_S_PER_BYTE = 1e-12
"""A clock may say that a transfer took no time."""
Wire = TypeVar("Wire", Link, Ring)
_Transfers = Sequence[tuple[float, float]]
"""Bytes and seconds."""


def with_seen_networks(
    calibrations: Calibrations,
    plan: Plan,
    stages: Sequence[RankTimes],
    *,
    is_apart: bool = False,
    relayed: Collection[int] = (),
) -> Calibrations:
    """Calibrations of one class, with networks on which transfers take what they took.

    Where they have no figures for transfers within a VM, these count as what they were planned as: across VMs. Of
    a plan in several regions, sums go from one to another, and messages do not. Where machines that cannot reach each
    other are neighbours, the line across VMs is the one through the machine between them.

    Args:
        calibrations: of the class, with what was known before.
        plan: that ran.
        stages: what its stages told; all-reduces are of the replica that waited least for others.
        is_apart: its pipelines are in several regions.
        relayed: stages whose line to the next one goes through another machine.
    """
    calibration = calibrations.first
    vm_size = calibration.hardware.gpus_per_vm
    crossed = crossings(plan.stages, plan.replicas, vm_size)
    rounds_s = [each.round_s for each in stages if each.round_s is not None]
    ratio = reduce(Compressed.plus, (each.compressed for each in stages), Compressed()).ratio
    rounds, found = 2 * (plan.replicas - 1), dict[str, NetworkCosts]()

    def seen(known: NetworkCosts, messages: Sequence[Carried], sums: Sequence[Carried]) -> NetworkCosts:
        return _seen(
            known,
            [(each.size_bytes, each.seconds) for each in messages],
            [(each.size_bytes / plan.replicas, each.seconds / rounds) for each in sums],
            replicas=plan.replicas,
            round_s=min(rounds_s, default=None),
            ratio=ratio,
        )

    summed = [each.reductions for each in stages if rounds and each.reductions]
    for name, is_within in (("across_vms", False), ("within_vm", True)):
        known: NetworkCosts | None = getattr(calibration, name)
        if known is None:
            continue
        belongs = [calibration.within_vm is None or is_within != crosses for crosses in crossed]
        sent = [k for k, of_it in enumerate(belongs) if of_it and stages[k].messages]
        sent = [k for k in sent if k in relayed] or sent  # the slowest decides
        is_elsewhere = calibration.within_vm is not None and is_within == (plan.workers > vm_size)
        messages = [each for each in (stages[k].messages for k in sent) if each is not None]
        found[name] = seen(known, messages, [] if is_apart or is_elsewhere else summed)
    across = {"across_regions": seen(across_regions(calibrations), [], summed)} if is_apart else {}
    return calibrations.each(lambda known: known.model_copy(update=found)).model_copy(update=across)


def stretched(network: NetworkCosts, factor: float) -> NetworkCosts:
    """A network on which bytes take longer, or less long, by a factor, and latencies up to a bound."""

    def wire(known: Wire) -> Wire:
        latency_s = min(known.latency_s * factor, max(known.latency_s, _LONG_LATENCY_S))
        return known.at(latency_s=latency_s, bytes_per_s=known.bytes_per_s / factor)

    return network.model_copy(update={"link": wire(network.link), "rings": tuple(map(wire, network.rings))})


class _Cable(NamedTuple):
    latency_s: float
    s_per_byte: float


def _cable(wire: Link | Ring) -> _Cable:
    return _Cable(wire.latency_s, 1 / wire.bytes_per_s)


def _seen(
    network: NetworkCosts,
    messages: _Transfers,
    rounds: _Transfers,
    *,
    replicas: int,
    round_s: float | None,
    ratio: float,
) -> NetworkCosts:
    """A network on which messages, and rounds of all-reduces, take what they took.

    Where only one of the two was seen, the other has the same cables: each byte takes as much longer there. What was
    seen may have crossed compressed, by ``ratio``; whether the other does is not known, so it does not.
    """
    link = _cable(network.link)
    ring = _cable(next((each for each in network.rings if each.ranks in (None, replicas)), network.rings[0]))
    by_link, by_ring = _explained(link, messages, round_s), _explained(ring, rounds, round_s)

    def changed(wire: Wire, before: _Cable, after: _Cable | None) -> Wire:
        if after is None:
            return wire
        known = _cable(wire)
        return wire.at(
            latency_s=_moved(known.latency_s, before.latency_s, after.latency_s),
            bytes_per_s=1 / _moved(known.s_per_byte, before.s_per_byte, after.s_per_byte),
        )

    seen = (link, by_link) if by_link is not None else (ring, _as_it_is(by_ring, ratio))
    other = (ring, by_ring) if by_ring is not None else (link, _as_it_is(by_link, ratio))
    return network.model_copy(
        update={
            "link": changed(network.link, *seen),
            "rings": tuple(changed(each, *other) for each in network.rings),
        }
    )


def _as_it_is(cable: _Cable | None, ratio: float) -> _Cable | None:
    """Return what a cable is for bytes that are not compressed."""
    return None if cable is None else cable._replace(s_per_byte=cable.s_per_byte * ratio)


def _explained(known: _Cable, seen: _Transfers, round_s: float | None) -> _Cable | None:
    """The cable on which transfers take what they took; None if there was none.

    Transfers of one size do not tell latency from bandwidth. A round of the vote, which has hardly any bytes, bounds
    the latency; what is beyond that is put down to bandwidth.

    Args:
        known: before.
        seen: transfers.
        round_s: of the fastest vote.
    """
    if not seen:
        return None
    shortest_s = min(seconds for _, seconds in seen)
    beyond_s = median(seconds - size * known.s_per_byte for size, seconds in seen)
    most_s = min(known.latency_s if round_s is None else round_s, _MOST * shortest_s)
    latency_s = min(max(beyond_s, min(known.latency_s, _LEAST * shortest_s)), most_s)
    s_per_byte = median((seconds - latency_s) / max(size, 1.0) for size, seconds in seen)
    return _Cable(latency_s, max(s_per_byte, _LEAST_S_PER_BYTE))


def _moved(value: float, before: float, after: float) -> float:
    """A value, where another one like it has moved: as much more, or as many times less."""
    return value + after - before if after > before else value * (after / before if before else 1.0)
