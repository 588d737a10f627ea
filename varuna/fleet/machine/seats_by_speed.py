"""Seats where workers differ in speed: each pipeline gets workers of about one speed. Pure."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from varuna.core.plan import Plan
from varuna.core.sharded_optimizer import Holders
from varuna.fleet.machine.placement import Holdings, seat


def seat_by_speed(
    plan: Plan,
    workers: Sequence[str],
    speeds: Mapping[str, float],
    holdings: Holdings,
    weights: Sequence[int],
    *,
    kept: Sequence[str] = (),
    holders: Holders | None = None,
    **rest: Any,
) -> tuple[str, ...]:
    """Worker of each rank, spares after the grid: pipelines of one speed are seated together, as ``seat`` does it.

    Args:
        plan: with the speeds of its replicas.
        workers: everybody who may be seated; who comes first among equally fast ones is seated.
        speeds: of those that are slower than 1.
        holdings: see ``seat``, as for what follows.
        weights: see ``seat``.
        kept: see ``seat``.
        holders: see ``seat``.
        **rest: see ``seat``.
    """
    if not plan.speeds:
        return seat(plan, workers, holdings, weights, kept=kept, holders=holders, **rest)
    waiting = sorted(workers, key=lambda name: speeds.get(name, 1.0), reverse=True)
    seated: list[str] = []
    first = 0
    for speed, group in groupby(range(plan.replicas), key=plan.speed_of):
        replicas = len(list(group))
        begin, count = first * plan.stages, replicas * plan.stages
        # More may be fast enough than there are seats: those whose state fits best get them.
        enough = {name for name in waiting if speeds.get(name, 1.0) >= speed}
        found = seat(
            plan.model_copy(update={"replicas": replicas, "speeds": ()}),
            [name for name in workers if name in enough],
            holdings,
            weights,
            kept=kept[begin : begin + count],
            holders=None if holders is None else _of_replicas(holders, range(first, first + replicas)),
            **rest,
        )[:count]
        seated += found
        waiting = [name for name in waiting if name not in found]
        first += replicas
    return (*seated, *waiting)


def _of_replicas(holders: Holders, replicas: range) -> Holders:
    """Who of these replicas holds a section whole, counted from the first of them."""
    return tuple(tuple(replica - replicas.start for replica in each if replica in replicas) for each in holders)
