"""The story of a run in bounded memory: the newest sentences, and how many there were of each kind before. Pure."""

from collections import Counter, deque
from dataclasses import dataclass, field

from varuna.fleet.page.story import Mark

MOST_MARKS = 600
MOST_BUCKETS = 600


@dataclass(slots=True)
class MarkBucket:
    """Sentences of about the same time."""

    began_s: float
    ended_s: float
    step: int | None
    """Newest step at the end of it."""
    counts: Counter[str] = field(default_factory=Counter)
    """By kind."""

    def add_mark(self, mark: Mark) -> None:
        """Note the next sentence."""
        self.ended_s = max(self.ended_s, mark.time_s)
        self.step = self.step if mark.step is None else mark.step
        self.counts[mark.kind] += 1

    def add(self, other: "MarkBucket") -> None:
        """Note the sentences after these."""
        self.ended_s = max(self.ended_s, other.ended_s)
        self.step = self.step if other.step is None else other.step
        self.counts += other.counts


class MarkHistory:
    """Sentences of a whole run.

    Args:
        most: newest ones that are kept one by one.
        most_buckets: of older ones; when there are more, each bucket gets twice as long.
    """

    def __init__(self, most: int = MOST_MARKS, most_buckets: int = MOST_BUCKETS) -> None:
        self._newest: deque[Mark] = deque()
        self._most, self._most_buckets = most, most_buckets
        self._older: list[MarkBucket] = []
        self.width_s = 1.0
        """Of a bucket."""

    def add_mark(self, mark: Mark) -> None:
        """Note a sentence."""
        self._newest.append(mark)
        if len(self._newest) <= self._most:
            return
        old = self._newest.popleft()
        if not self._older or not self._belongs(self._older[-1], old.time_s):
            self._older.append(MarkBucket(old.time_s, old.time_s, old.step))
        self._older[-1].add_mark(old)
        while len(self._older) > self._most_buckets:
            self._widen()

    def _belongs(self, bucket: MarkBucket, time_s: float) -> bool:
        """A clock that was set back begins no new bucket."""
        return time_s // self.width_s <= bucket.began_s // self.width_s

    def _widen(self) -> None:
        self.width_s *= 2
        wide: list[MarkBucket] = []
        for bucket in self._older:
            if wide and self._belongs(wide[-1], bucket.began_s):
                wide[-1].add(bucket)
            else:
                wide.append(bucket)
        self._older = wide

    def newest(self, most: int = MOST_MARKS) -> list[dict[str, object]]:
        """The newest sentences, the oldest of them first."""
        return [mark._asdict() for mark in list(self._newest)[-most:]]

    def older(self) -> dict[str, object]:
        """Return the marks before the newest ones, for a page: buckets as rows of begin, end, step and counts."""
        rows = [[round(each.began_s, 2), round(each.ended_s, 2), each.step, dict(each.counts)] for each in self._older]
        return {"width_s": self.width_s, "rows": rows}
