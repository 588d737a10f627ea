"""The ranks of a generation tell each other what they do, so that a waiting rank knows for whom and why.

By the generation's store, every few seconds, on a thread of its own: a rank's word comes while its training thread runs
the user's code, and a store that does not answer holds no rank up. The same thread ends a rank whose own work does not
end while others wait for it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from varuna.engine.base.inbox import Inbox
from varuna.engine.base.wait_bounds import Doing, Heard, heard_after, overdue
from varuna.process.threads import start


class Busy(NamedTuple):
    """A rank's own work."""

    work: str
    """empty: none that must end within a bound"""
    since_s: float
    longest_s: float
    """that such work took and ended well"""

    def now(self, work: str, now_s: float) -> "Busy":
        """Return this piece of work, or the next one."""
        if work == self.work:
            return self
        return Busy(work, now_s, max(self.longest_s, now_s - self.since_s) if self.work else self.longest_s)


def watch_peers(
    inbox: Inbox,
    store: Any,
    generation: int,
    rank: int,
    ranks: Sequence[int],
    doing: Callable[[int], Doing],
    give_up: Callable[[str], None],
) -> None:
    """Tell and hear until the generation is over.

    Args:
        inbox: of the generation; is shown what was heard.
        store: of the generation.
        generation: its number.
        rank: this one.
        ranks: all that run a stage.
        doing: what this rank does; gets the number of the word.
        give_up: ends this rank, and says why.
    """
    heard: dict[int, Heard] = {}
    own = f"g{generation}/doing/{rank}"
    places = {other: f"g{generation}/doing/{other}" for other in ranks if other != rank}

    def read() -> None:
        if store.check(list(places.values())):  # what is not there yet would be waited for
            for other, text in zip(places, store.multi_get(list(places.values())), strict=True):
                heard[other] = heard_after(heard.get(other), Doing.model_validate_json(text), time.monotonic())

    def run() -> None:
        tick, before, busy = 0, -1, Busy("", time.monotonic(), 0.0)
        while not inbox.over.wait(inbox.patience.word_s):
            tick, why = tick + 1, None
            try:
                mine = doing(tick)
                store.set(own, mine.model_dump_json())
                busy = busy.now(mine.work, time.monotonic())
                busy_s, bound_s = time.monotonic() - busy.since_s, inbox.busy_after_s(busy.longest_s)
                if mine.on and mine.wait == before:  # short waits are all there is in a run that is well
                    read()
                elif mine.work and busy_s > bound_s / 2:
                    read()
                    why = overdue(rank, mine, busy_s, bound_s, heard, inbox.patience)
                before = mine.wait
            except Exception:  # noqa: BLE001 - the store is away, so what was heard may be wrong; a word more next time
                heard.clear()
            inbox.heard = dict(heard)
            if why is not None:
                give_up(f"{inbox.who} {why}")

    start("lookout", run)
