"""Shares of micro-batches by replica: all alike, or larger ones for faster replicas. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from varuna.core.units import counted


def are_speeds(speeds: Sequence[float]) -> bool:
    """Return whether these are relative speeds, fastest first: more than 0 and at most 1."""
    return all(a >= b for a, b in pairwise((1.0, *speeds))) and speeds[-1] > 0


# A pipeline of P stages takes about N + P - 1 of its micro-batches' times for N of them. So a replica that is half as
# fast gets less than half as many, and all end together.
_DEALINGS_KNOWN = 1024


@lru_cache(maxsize=_DEALINGS_KNOWN)
def ends_of_shares(
    micro_batches: int, replicas: int, rates: tuple[float, ...] = (), stages: int | tuple[int, ...] = 1
) -> tuple[int, ...]:
    """Return where the contiguous share of each replica ends, after a 0: one number more than replicas.

    Every replica gets a micro-batch, as long as there are enough; the first ones get what is left over.

    Args:
        micro_batches: of all replicas.
        replicas: D.
        rates: micro-batches in the same time, relative, by replica; () if all are the same.
        stages: P; or by replica.
    """
    if not rates:
        base, extra = divmod(micro_batches, replicas)
        return tuple(replica * base + min(replica, extra) for replica in range(replicas + 1))
    depths = (stages,) * replicas if isinstance(stages, int) else stages
    return _ends(micro_batches, rates, tuple(depth - 1 for depth in depths))


def _ends(micro_batches: int, rates: tuple[float, ...], fills: tuple[int, ...]) -> tuple[int, ...]:
    """Find the shares for which the last replica ends first: most of each at once, the rest one by one."""
    if micro_batches <= len(rates):
        return (*range(micro_batches + 1), *(micro_batches,) * (len(rates) - micro_batches))
    # A replica ends n micro-batches at (n + fill) / rate, fill = P - 1; if all end at t, n = t rate - fill adds up to
    # N.
    together = (micro_batches + sum(fills)) / sum(rates)  # when all would end, if micro-batches had parts
    shares = [max(1, int(together * rate - fill)) for rate, fill in zip(rates, fills, strict=True)]
    while sum(shares) > micro_batches:  # slow replicas have one each, which is more than they would have got
        latest = max(range(len(shares)), key=lambda d: (shares[d] > 1, (shares[d] + fills[d]) / rates[d], d))
        shares[latest] -= 1
    # By the time at which each would end one more; ties go to the lowest replica, so all ranks deal alike.
    waiting = [((shares[d] + 1 + fills[d]) / rate, d) for d, rate in enumerate(rates)]
    heapify(waiting)
    for _ in range(micro_batches - sum(shares)):
        _, d = waiting[0]
        shares[d] += 1
        heapreplace(waiting, ((shares[d] + 1 + fills[d]) / rates[d], d))
    return tuple(accumulate(shares, initial=0))


def shares_text(shares: Sequence[int]) -> str:
    """Say it in words: ``"2 replicas of 16, 1 replica of 8"``."""
    return ", ".join(f"{counted(replicas, 'replica')} of {share}" for share, replicas in Counter(shares).items())


def pipeline_speeds(speeds: Mapping[str, Sequence[float]], seats: Iterable[Iterable[str]]) -> tuple[float, ...]:
    """Return speeds of pipelines that take workers in this order, each as fast as its slowest; () if all are 1.

    Args:
        speeds: of workers, by class of their devices, fastest first; all others are of full speed.
        seats: by pipeline: the class of each of its stages.
    """
    if not any(speeds.values()):
        return ()
    waiting = {name: iter(each) for name, each in speeds.items()}
    nobody = iter(())
    found = tuple(min(next(waiting.get(name, nobody), 1.0) for name in classes) for classes in seats)
    return () if all(speed == 1.0 for speed in found) else found
