"""How many micro-batches each replica runs, so that replicas of different speed end together. Pure.

A pipeline of P stages takes about N + P - 1 of its micro-batches' times for N of them. So a replica that is half as
fast gets less than half as many. Every rank computes the same shares from its plan.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate

from varuna.core.units import counted

_KNOWN = 1024


def ends_of_shares(micro_batches: int, replicas: int, speeds: tuple[float, ...], stages: int) -> Sequence[int]:
    """Where the contiguous share of each replica ends, after a 0: one number more than replicas.

    Every replica gets a micro-batch, as long as there are enough; the first ones get what is left over.

    Args:
        micro_batches: of all replicas.
        replicas: D.
        speeds: relative, by replica, fastest first; () if all are the same.
        stages: P.
    """
    if not speeds:
        base, extra = divmod(micro_batches, replicas)
        return [replica * base + min(replica, extra) for replica in range(replicas + 1)]
    return _ends(micro_batches, speeds, stages - 1)


@lru_cache(maxsize=_KNOWN)
def _ends(micro_batches: int, speeds: tuple[float, ...], fill: int) -> tuple[int, ...]:
    """The shares for which the last replica ends first: most of each at once, the rest one by one."""
    if micro_batches <= len(speeds):
        return (*range(micro_batches + 1), *(micro_batches,) * (len(speeds) - micro_batches))
    together = (micro_batches + fill * len(speeds)) / sum(speeds)  # when all would end, if micro-batches had parts
    shares = [max(1, int(together * speed - fill)) for speed in speeds]
    while sum(shares) > micro_batches:  # slow replicas have one each, which is more than they would have got
        latest = max(range(len(shares)), key=lambda d: (shares[d] > 1, (shares[d] + fill) / speeds[d], d))
        shares[latest] -= 1
    waiting = [((shares[d] + 1 + fill) / speed, d) for d, speed in enumerate(speeds)]
    heapify(waiting)
    for _ in range(micro_batches - sum(shares)):
        _, d = waiting[0]
        shares[d] += 1
        heapreplace(waiting, ((shares[d] + 1 + fill) / speeds[d], d))
    return tuple(accumulate(shares, initial=0))


def shares_text(shares: Sequence[int]) -> str:
    """``"2 replicas of 16, 1 replica of 8"``."""
    return ", ".join(f"{counted(replicas, 'replica')} of {share}" for share, replicas in Counter(shares).items())


def pipeline_speeds(speeds: Sequence[float], stages: int, replicas: int) -> tuple[float, ...]:
    """Speeds of replicas that take workers in this order, each as fast as its slowest; () if nobody is slower than 1.

    Args:
        speeds: of workers, fastest first; () if all are of full speed.
        stages: P.
        replicas: D.
    """
    found = tuple(speeds[(replica + 1) * stages - 1] for replica in range(replicas)) if speeds else ()
    return () if all(speed == 1.0 for speed in found) else found
