"""Holders of sections' optimizer state, where a stage divides it among replicas (``shard_optimizer``). Pure.

Engine, manager and planner ask here, with equal facts: nothing is ever agreed on over a link.
"""

from collections.abc import Sequence

from varuna.core.model import SectionFacts
from varuna.core.plan import Plan

Holders = tuple[tuple[int, ...], ...]
"""By section, the replicas that hold its optimizer state and apply its updates; the first one tells the others."""


def holders_of(plan: Plan, sections: Sequence[SectionFacts], *, shared: bool) -> Holders:
    """Find the holders of all sections of a model; every replica, unless state is ``shared`` out.

    Where pipelines are cut differently, there are no replicas of a stage that could share.
    """
    everyone = tuple(range(plan.replicas))
    if not shared or not plan.is_uniform:
        return (everyone,) * plan.sections
    return tuple(
        holders
        for stage in range(plan.stages)
        for holders in assign_holders(
            [sections[s].optimizer_bytes for s in plan.first.sections_of(stage)], plan.replicas
        )
    )


def held_by(holders: Holders, sections: range, replica: int) -> tuple[int, ...]:
    """Return those of a stage's sections whose optimizer state a replica holds."""
    return tuple(section for section in sections if replica in holders[section])


def assign_holders(state_bytes: Sequence[int], replicas: int) -> Holders:
    """Assign holders to a stage's sections: an owner and a mirror each, so that the fullest replica holds little.

    The mirror is the replica half-way round. Ranks of one VM are neighbours, so a VM that has no more than half of the
    stage's replicas takes at most one holder with it; and with an even number of replicas, pairs mirror each other,
    which leaves the fewest pairs whose loss together would cost state. Sections without state are with all.

    Args:
        state_bytes: optimizer state of each section.
        replicas: D; with one or two, each holds everything.
    """
    everyone = tuple(range(replicas))
    holders = [everyone] * len(state_bytes)
    if replicas <= 2:
        return tuple(holders)
    mirror_of = [(replica + replicas // 2) % replicas for replica in everyone]
    held, owned = [0] * replicas, [0] * replicas

    def burden(replica: int) -> tuple[int, int, int, int]:
        """Return the load of a replica and its mirror: bytes at the fuller one, at both, and sent by the replica."""
        own, mirrored = held[replica], held[mirror_of[replica]]
        return max(own, mirrored), own + mirrored, owned[replica], replica

    # Largest first, each to the least burdened pair; ties by number, so all ranks come to the same.
    for section in sorted(range(len(state_bytes)), key=lambda s: (-state_bytes[s], s)):
        if state_bytes[section]:
            owner = min(everyone, key=burden)
            holders[section] = owner, mirror_of[owner]
            owned[owner] += state_bytes[section]
            for holder in holders[section]:
                held[holder] += state_bytes[section]
    return tuple(holders)
