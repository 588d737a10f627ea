"""All workers that the manager knows, with the numbers that its rules ask for at each event. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from varuna.fleet.state.persistent import PersistentMap
from varuna.fleet.state.worker import Worker, WorkerStatus, changed

_NOBODY: frozenset[str] = frozenset()
_STANDINGS = tuple(WorkerStatus)


class Workers(Mapping[str, Worker]):
    """Workers by name, in the order in which they were spawned; immutable.

    What rules ask for is kept up to date worker by worker, so that no event looks at all of them.
    """

    __slots__ = ("_by_name", "_by_node", "_counts", "awaited", "newcomers", "unfinished")

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        listed = list(workers)
        self._by_name: PersistentMap[Worker] = PersistentMap({worker.name: worker for worker in listed})
        by_node: dict[str, tuple[str, ...]] = {}
        for worker in listed:
            by_node[worker.node] = (*by_node.get(worker.node, ()), worker.name)
        self._by_node: PersistentMap[tuple[str, ...]] = PersistentMap(by_node)
        self._counts = tuple(sum(worker.standing is each for worker in listed) for each in _STANDINGS)
        self.awaited = sum(map(_is_awaited, listed))
        """Number of workers that have joined and hold nothing, since they run a generation or are about to answer."""
        self.unfinished = sum(map(_is_unfinished, listed))
        """Number of workers that have left or were dismissed, and whose scripts may still have something to save."""
        self.newcomers = frozenset(worker.name for worker in listed if _is_newcomer(worker))
        """Those that have joined and have no seat in the newest generation's grid."""

    def __getitem__(self, name: str) -> Worker:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def count(self, standing: WorkerStatus) -> int:
        """Number of workers with this standing."""
        return self._counts[_STANDINGS.index(standing)]

    def on(self, node: str) -> tuple[str, ...]:
        """Names of the workers on a machine, in the order in which they were spawned."""
        return self._by_node.get(node, ())

    @property
    def nodes(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the workers of each machine that has any."""
        return self._by_node

    def with_worker(self, worker: Worker) -> "Workers":
        """A copy with this worker, in the place of one with its name."""
        old = self._by_name.get(worker.name)
        made: Workers = Workers.__new__(Workers)
        made._by_name = self._by_name.with_item(worker.name, worker)
        made._by_node = self._by_node
        if old is None:
            made._by_node = self._by_node.with_item(worker.node, (*self.on(worker.node), worker.name))
        self._count_into(made, old, worker)
        return made

    def seen(self, names: Iterable[str], seen_s: float) -> "Workers":
        """A copy in which these workers, which must be there, were last heard at ``seen_s``."""
        made: Workers = Workers.__new__(Workers)
        made._by_name = self._by_name.with_values({name: changed(self._by_name[name], seen_s=seen_s) for name in names})
        made._by_node, made._counts, made.newcomers = self._by_node, self._counts, self.newcomers
        made.awaited, made.unfinished = self.awaited, self.unfinished
        return made

    def without(self, name: str) -> "Workers":
        """A copy without this worker, which must be there."""
        worker = self._by_name[name]
        made: Workers = Workers.__new__(Workers)
        made._by_name = self._by_name.without(name)
        left = tuple(other for other in self._by_node[worker.node] if other != name)
        made._by_node = self._by_node.with_item(worker.node, left) if left else self._by_node.without(worker.node)
        self._count_into(made, worker, None)
        return made

    def _count_into(self, made: "Workers", old: Worker | None, new: Worker | None) -> None:
        """The numbers of ``made``, in which ``new`` stands for ``old``."""
        made._counts, made.newcomers = self._counts, self.newcomers
        made.awaited, made.unfinished = self.awaited, self.unfinished
        if old is not None and new is not None and old.standing is new.standing and old.seated is new.seated:
            made.awaited += (old.holding is not None) - (new.holding is not None) if new.is_joined else 0
            return
        counts = list(self._counts)
        for worker, more in ((old, -1), (new, 1)):
            if worker is not None:
                counts[_STANDINGS.index(worker.standing)] += more
                made.awaited += more * _is_awaited(worker)
                made.unfinished += more * _is_unfinished(worker)
        made._counts = tuple(counts)
        named = frozenset(worker.name for worker in (old, new) if worker is not None)
        came = named if new is not None and _is_newcomer(new) else _NOBODY
        if came or not self.newcomers.isdisjoint(named):
            made.newcomers = self.newcomers - named | came


def _is_awaited(worker: Worker) -> bool:
    return worker.is_joined and worker.holding is None


def _is_unfinished(worker: Worker) -> bool:
    return worker.standing is WorkerStatus.LEFT or (worker.standing is WorkerStatus.DISMISSED and worker.seated)


def _is_newcomer(worker: Worker) -> bool:
    return worker.is_joined and not worker.seated
