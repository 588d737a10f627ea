"""Work that one worker does for all, such as capturing the model: who does it, and what came of it.

A manager that starts again has forgotten it, and one worker does it once more. It is never kept on disk: the code may
be another one by then.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from varuna.core.messages import WorkFound, WorkOffered, WorkSought

_WORK_S = 100.0
"""Seconds that others wait for a worker before one of them does the same."""
_MOST_KEYS, _MOST_BYTES = 64, 64 * 2**20


@dataclass
class _Underway:
    worker: str
    since_s: float
    waiting: set[str] = field(default_factory=set)


class SharedWork:
    """Work that the workers of a run have done, and do, for each other; for one thread."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}  # empty: each worker has to do it
        self._underway: dict[str, _Underway] = {}

    def answer_worker(
        self, worker: str, message: WorkSought | WorkOffered, alive: Container[str], now_s: float
    ) -> list[tuple[str, WorkFound]]:
        """Take what a worker offers or seeks; return whom to tell what.

        Args:
            worker: who says it.
            message: what it says.
            alive: workers of the run; others get no answer.
            now_s: any clock.
        """
        if worker not in alive:
            return []
        if isinstance(message, WorkSought):
            return self._seek(worker, message.key, alive, now_s)
        return self._offer(message.key, message.data)

    def _seek(self, worker: str, key: str, alive: Container[str], now_s: float) -> list[tuple[str, WorkFound]]:
        if key in self._found:
            return [(worker, WorkFound(key=key, data=self._found[key]))]
        yours = [(worker, WorkFound(key=key))]
        if len(self._found) + len(self._underway) >= _MOST_KEYS and key not in self._underway:
            self._underway = {
                each: now
                for each, now in self._underway.items()
                if now.worker in alive and now_s - now.since_s <= _WORK_S
            }
            if len(self._found) + len(self._underway) >= _MOST_KEYS:
                return yours
        now = self._underway.setdefault(key, _Underway(worker, now_s))
        if now.worker not in alive or now_s - now.since_s > _WORK_S:
            now.worker, now.since_s = worker, now_s
        if now.worker == worker:
            now.waiting.discard(worker)
            return yours
        now.waiting.add(worker)
        return [(worker, WorkFound(key=key, doer=now.worker))]

    def _offer(self, key: str, data: bytes) -> list[tuple[str, WorkFound]]:
        now = self._underway.pop(key, None)
        if now is None:  # nobody was asked for it, or the first one's is there
            return []
        has_room = sum(map(len, self._found.values())) + len(data) <= _MOST_BYTES
        self._found[key] = data if has_room else b""
        return [(worker, WorkFound(key=key, data=self._found[key])) for worker in sorted(now.waiting)]
