"""Links to all other machines, as workers have them: TCP between pairs, then sums over all, by TCP and by NCCL."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch

from varuna.calibration.samples import Sized
from varuna.core.errors import FleetError, VarunaError
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, c10d
from varuna.engine.links.nccl import interface_with
from varuna.engine.links.traffic import TransferPaths
from varuna.engine.worker.forming import InterruptibleStore
from varuna.extras.doctor.judging.facts import FleetSums, LinkFacts, LinkOrder
from varuna.extras.doctor.judging.rounds import opponents
from varuna.fleet.net.client import ManagerRemote
from varuna.measure.network import Peers, Repeats

COME_S = 20.0
"""Seconds that others may be busy with each other."""
PAIR_S = 6.0
SUMS_S = 8.0
_PACE = Repeats(warm_rounds=1, least_rounds=3, most_rounds=20, budget_s=0.2)
_SMALL_BYTES = 64
_MIDDLE_BYTES, _LARGE_BYTES = 1 << 20, 16 << 20
_FAST_S = 0.01
"""A middle message that takes less says little of the bandwidth: a large one follows."""
_SUM_BYTES = 1 << 20


class MeetingKeys:
    """Keys of a store that the meeting keeps: what the others have set can be read."""

    def __init__(self, remote: ManagerRemote, prefix: str = "") -> None:
        self._remote, self._prefix = remote, prefix
        self._found: dict[str, bytes] = {}

    def below(self, name: str) -> "MeetingKeys":
        """Return a store of its own, in this one: torch's own prefixes cannot be nested over a store in Python."""
        return MeetingKeys(self._remote, f"{self._prefix}{name}/")

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        answer = self._remote.post("/keys", {"key": self._prefix + key, "value": content.hex()})
        if answer.status != 200:
            raise RuntimeError(f"the first machine refused {key}")

    def get(self, key: str) -> bytes:
        """Return a value that ``check`` has found."""
        return self._found[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there; wait a moment for those that are not."""
        for key in keys:
            if key not in self._found:
                answer = self._remote.get(f"/keys/{self._prefix}{key}")
                if answer.status != 200:
                    return False
                self._found[key] = bytes.fromhex(answer.body.decode())
        return True

    def come(self, what: str, rank: int, others: Sequence[int]) -> None:
        """Return once these others are there too, and not busy with another one.

        Raises:
            RuntimeError: one is gone, or does not come within a bound.
        """
        self.set(f"at/{what}/{rank}", b"1")
        deadline_s = time.monotonic() + COME_S
        for other in others:
            while (status := self._remote.get(f"/keys/at/{what}/{other}?of={other}").status) != 200:
                if status == 410:
                    raise RuntimeError("it is gone")
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"it did not come within {COME_S:.0f} s")


def try_links(ask: LinkOrder, tell: Callable[[str, LinkFacts | FleetSums | None], None]) -> None:
    """Try everything, one pair at a time, and tell of each when it is done; nothing waits for long."""
    keys = MeetingKeys(ManagerRemote(ask.host, ask.port, ask.certificate_pem, ask.token))
    size = len(ask.names)
    all_good = len(ask.pairs) == size * (size - 1) // 2
    for peer in opponents(ask.rank, size):
        low, high = sorted((ask.rank, peer))
        if (low, high) not in ask.pairs:
            continue
        what = f"pair/{low}-{high}"
        tell(ask.names[peer], None)
        found = _bounded(partial(keys.come, what, ask.rank, [peer]), 2 * COME_S)
        if not found:
            stores = partial(_store, keys, what, PAIR_S)
            found = _bounded(partial(pair, stores, int(ask.rank > peer), ask.address), PAIR_S)
        link = LinkFacts(problem=found) if isinstance(found, str) else found
        all_good &= not link.problem
        tell(ask.names[peer], link)
    if not all_good:
        return  # a sum over all needs all links
    kinds = [("TCP", _tcp_sum), *([("NCCL", _nccl_sum)] if ask.nccl else [])]
    others = [rank for rank in range(size) if rank != ask.rank]
    for how, work in kinds:
        tell(how, None)
        found = _bounded(partial(keys.come, how, ask.rank, others), 2 * COME_S)
        if not found:
            found = _bounded(partial(work, _store(keys, "sum", SUMS_S, how), ask), SUMS_S)
        tell(how, FleetSums(how=how, problem=found) if isinstance(found, str) else found)


def pair(stores: Callable[[str], Any], place: int, address: str) -> LinkFacts:
    """Swap messages with the other member; what came from it tells of the link to this one.

    Args:
        stores: a store for each of two names, the same for both members.
        place: 0 or 1.
        address: to bind to.

    Raises:
        RuntimeError: the link broke, or the other did not come.
    """
    traffic = TransferPaths()
    peers = Peers(stores("middle"), place, 2, address, _PACE)
    samples = peers.messages((_SMALL_BYTES, _MIDDLE_BYTES), traffic)
    if peers.agree(_took_s(samples, _MIDDLE_BYTES)) < _FAST_S:
        samples += Peers(stores("large"), place, 2, address, _PACE).messages((_SMALL_BYTES, _LARGE_BYTES), traffic)
    size = max(sample[0] for sample in samples)
    peers.meet()  # neither leaves while the other still receives
    return LinkFacts(latency_s=_took_s(samples, _SMALL_BYTES), bytes_per_s=size / max(_took_s(samples, size), 1e-9))


def _took_s(samples: Sequence[Sized], size_bytes: int) -> float:
    return median(seconds for size, seconds in samples if size == size_bytes)


def _tcp_sum(store: Any, ask: LinkOrder) -> FleetSums:
    group = Group(store, "all", ask.rank, len(ask.names), Endpoint(ask.address))
    values = torch.ones(_SUM_BYTES // 4)
    group.all_reduce(torch.zeros(1))
    begin_s = time.monotonic()
    group.all_reduce(values)
    return _checked("TCP", values, len(ask.names), time.monotonic() - begin_s)


def _nccl_sum(store: Any, ask: LinkOrder) -> FleetSums:
    """Sum with torch's own group, as ``links="nccl"`` needs another package, on each machine's first GPU."""
    import os

    if name := interface_with(ask.address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    torch.cuda.set_device(0)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=SUMS_S)
    group = c10d.ProcessGroupNCCL(store, ask.rank, len(ask.names), options)
    values, first = torch.ones(_SUM_BYTES // 4, device="cuda:0"), torch.zeros(1, device="cuda:0")
    group.allreduce([first]).wait()
    torch.cuda.synchronize()
    begin_s = time.monotonic()
    group.allreduce([values]).wait()
    torch.cuda.synchronize()
    return _checked("NCCL", values, len(ask.names), time.monotonic() - begin_s)


def _checked(how: str, values: torch.Tensor, size: int, took_s: float) -> FleetSums:
    problem = "" if bool((values == size).all()) else "the sum is wrong"
    return FleetSums(how=how, size_bytes=_SUM_BYTES, took_s=took_s, problem=problem)


def _store(keys: MeetingKeys, what: str, bound_s: float, name: str) -> Any:
    begin_s = time.monotonic()
    return InterruptibleStore(keys.below(f"{what}/{name}"), lambda: time.monotonic() - begin_s > bound_s, bound_s)


def _bounded(work: Callable[[], Any], bound_s: float) -> Any:
    """Return the result of ``work``, or as text why there was none in time."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except (RuntimeError, VarunaError, FleetError, KeyError) as error:
            found.append(str(error).splitlines()[0][:200] if str(error) else type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(bound_s)
    return found[0] if found else f"no answer within {bound_s:.0f} s"
