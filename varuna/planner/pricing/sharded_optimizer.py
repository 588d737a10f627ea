"""Bytes of optimizer state that the replicas of a stage divide (``shard_optimizer``)."""

from itertools import zip_longest
from typing import NamedTuple

from varuna.core.sharded_optimizer import assign_holders, held_by
from varuna.planner.pricing.profile import Profile


class Sharding(NamedTuple):
    """Changes to a stage's bytes on the replica that holds most optimizer state."""

    absent_state: int = 0
    """optimizer state that it does not hold"""
    absent_parameters: int = 0
    """parameters that it does not update"""
    gathered: int = 0
    """new parameters that travel in one round, and are there twice meanwhile"""


UNSHARDED = Sharding()


def sharding_of(profile: Profile, start: int, stop: int, replicas: int) -> Sharding:
    """Return what dividing state saves a stage's fullest replica, and what it costs; nothing if a job divides none."""
    if not profile.calibration.optimizer.sharded:
        return UNSHARDED
    on_device, on_host = (sums.values[start:stop] for sums in (profile.optimizer_bytes, profile.host_bytes))
    state_bytes = [int(a + b) for a, b in zip(on_device, on_host, strict=True)]
    parameter_bytes = [int(value) for value in profile.parameter_bytes.values[start:stop]]
    holders = assign_holders(state_bytes, replicas)
    sections = range(len(holders))
    held = [held_by(holders, sections, replica) for replica in range(replicas)]
    fullest = max(held, key=lambda own: sum(state_bytes[section] for section in own))
    owned: list[list[int]] = [[] for _ in range(replicas)]
    for section in sections:
        if len(holders[section]) < replicas:
            owned[holders[section][0]].append(parameter_bytes[section])
    return Sharding(
        absent_state=sum(state_bytes) - sum(state_bytes[section] for section in fullest),
        absent_parameters=sum(parameter_bytes) - sum(parameter_bytes[section] for section in fullest),
        gathered=max((sum(sent) for sent in zip_longest(*owned, fillvalue=0)), default=0),
    )
