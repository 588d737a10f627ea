"""Pages hear of a run as server-sent events: at first everything, then what changes, from wherever they were.

Nothing is queued for a page: each has a position among the chronicle's changes, of which so many are kept. One that
cannot be written to for some seconds is dropped; when it comes back it says where it was (``Last-Event-ID``).
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from varuna.fleet.page.answers import HEADERS, finite
from varuna.fleet.page.chronicle import Chronicle, PageChange

MOST_PAGES = 64
_STATUS_S = 1.0
_QUIET_S = 10.0
_GOODBYE_S = 1.0

Status = Mapping[str, Any]


class LiveFeed:
    """The feed that is served to pages; ``close`` is for another thread than the server's.

    Args:
        chronicle: what happened.
        status: what is the case now, without what the chronicle has.
        clock: seconds.
        tick_s: how often there may be something new for a page.
        stall_s: a page that does not read for so long is dropped.
    """

    def __init__(
        self,
        chronicle: Chronicle,
        status: Callable[[], Status],
        clock: Callable[[], float] = time.monotonic,
        *,
        tick_s: float = 0.25,
        stall_s: float = 10.0,
    ) -> None:
        self.chronicle, self._status, self._clock = chronicle, status, clock
        self.tick_s, self.stall_s = tick_s, stall_s
        self._cached: Status = {}
        self._cached_s = float("-inf")
        self.pages = 0
        self.closing = False
        self._left = threading.Event()

    @property
    def has_room(self) -> bool:
        """Whether one more page may listen."""
        return self.pages < MOST_PAGES and not self.closing

    def stream(self, last_event_id: str, admitted: Callable[[], bool]) -> "EventStream":
        """A page's stream.

        Args:
            last_event_id: where it was, if it was here before.
            admitted: whether it may still read.
        """
        return EventStream(self, last_event_id, admitted)

    def status(self) -> Status:
        """The same for all pages, and not older than a second."""
        now_s = self._clock()
        if now_s >= self._cached_s + _STATUS_S or self.closing:
            self._cached, self._cached_s = self._status(), now_s
        return self._cached

    def close(self) -> None:
        """Let pages hear the end, and end their streams; returns once they have, or after a second."""
        self.closing = True
        if self.pages:
            self._left.wait(_GOODBYE_S)

    def count_pages(self, change: int) -> None:
        """Count a page that came, or left."""
        self.pages += change
        if self.closing and not self.pages:
            self._left.set()


class EventStream(Response):
    """One page's stream."""

    def __init__(self, feed: LiveFeed, last_event_id: str, admitted: Callable[[], bool]) -> None:
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        self._feed, self._admitted = feed, admitted
        self._number = position(last_event_id, feed.chronicle.life)
        self._told: Status = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the page leaves, may not read any more, does not read, or the run's manager ends."""
        gone = asyncio.ensure_future(_gone(receive))
        self._feed.count_pages(1)
        try:
            headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._write_all(send, gone)
        except TimeoutError:
            pass  # it does not read: the server closes a connection whose answer is not finished
        finally:
            gone.cancel()
            self._feed.count_pages(-1)

    async def _write_all(self, send: Send, gone: "asyncio.Future[None]") -> None:
        quiet_s = 0.0
        while not gone.done() and self._admitted():
            closing = self._feed.closing
            text = self.news()
            quiet_s = 0.0 if text else quiet_s + self._feed.tick_s
            if quiet_s >= _QUIET_S:
                text, quiet_s = ": still here\n\n", 0.0
            if text or closing:
                async with asyncio.timeout(self._feed.stall_s):
                    body = {"type": "http.response.body", "body": text.encode(), "more_body": not closing}
                    await send(body)
            if closing:
                return
            await asyncio.wait([gone], timeout=self._feed.tick_s)
        async with asyncio.timeout(self._feed.stall_s):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def news(self) -> str:
        """Return what this page has not heard yet, as frames; empty if there is nothing."""
        chronicle, frames = self._feed.chronicle, []
        changes = None if self._number is None else chronicle.since(self._number)
        if changes is None:
            self._number, whole = chronicle.describe()
            frames.append(frame("whole", whole, f"{chronicle.life}-{self._number}"))
        elif changes:
            self._number = changes[-1].number
            frames += [frame(kind, value, f"{chronicle.life}-{number}") for number, kind, value in gathered(changes)]
        status = self._feed.status()
        if status is not self._told:
            if patch := difference(self._told, status):
                frames.append(frame("status", patch))
            self._told = status
        return "".join(frames)


def frame(kind: str, value: object, number: str = "") -> str:
    """One server-sent event; its data is one line of JSON."""
    told = f"id: {number}\n" if number else ""
    return f"{told}event: {kind}\ndata: {_json(value)}\n\n"


def _json(value: object) -> str:
    """Looking for numbers that JSON lacks takes ten times as long as writing it, and there is hardly ever one."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(value), separators=(",", ":"))


def position(last_event_id: str, life: str) -> int | None:
    """The number in what a page says it heard last; None if it heard nothing of this manager."""
    said, _, number = last_event_id.rpartition("-")
    return int(number) if said == life and number.isascii() and number.isdecimal() and len(number) < 16 else None


def gathered(changes: list[PageChange]) -> list[PageChange]:
    """Steps in a row become one change, with a list of them."""
    found: list[PageChange] = []
    for change in changes:
        if change.kind != "step":
            found.append(change)
        elif found and found[-1].kind == "steps":
            rows = found[-1].value
            assert isinstance(rows, list)
            rows.append(change.value)
            found[-1] = PageChange(change.number, "steps", rows)
        else:
            found.append(PageChange(change.number, "steps", [change.value]))
    return found


def difference(before: Status, after: Status) -> dict[str, object]:
    """Return what a page that knows ``before`` must hear to know ``after``: what has changed, also of each worker.

    ``gone`` are names of workers that are not there any more; ``all`` says that the page knew nothing.
    """
    patch: dict[str, object] = {
        key: value for key, value in after.items() if key != "workers" and (key not in before or before[key] != value)
    }
    old = {worker["name"]: worker for worker in before.get("workers", ())}
    new = {worker["name"]: worker for worker in after.get("workers", ())}
    if changed := [_changed(old.get(name, {}), worker) for name, worker in new.items() if old.get(name) != worker]:
        patch["workers"] = changed
    if not before:
        patch["all"] = True
    if gone := [name for name in old if name not in new]:
        patch["gone"] = gone
    return patch


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Of 300 workers, all do something else each second, and little else changes."""
    return {key: value for key, value in after.items() if key == "name" or key not in before or before[key] != value}


async def _gone(receive: Receive) -> None:
    """Return once the page has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
