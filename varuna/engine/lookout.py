"""The ranks of a generation tell each other what they do, so that who waits knows for whom and why.

By the generation's store, every few seconds, on a thread of its own: a rank's word comes while its training thread runs
the user's code, and a store that does not answer holds nobody up.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from varuna.core.threads import start
from varuna.engine.inbox import Inbox
from varuna.engine.patience import Doing, Heard, hear


def watch(
    inbox: Inbox,
    store: Any,
    generation: int,
    rank: int,
    ranks: Sequence[int],
    doing: Callable[[int], Doing],
) -> None:
    """Tell and hear until the generation is over.

    Args:
        inbox: of the generation; is shown what was heard.
        store: of the generation.
        generation: its number.
        rank: this one.
        ranks: all that run a stage.
        doing: what this rank does; gets the number of the word.
    """
    heard: dict[int, Heard] = {}
    own = f"g{generation}/doing/{rank}"
    places = {other: f"g{generation}/doing/{other}" for other in ranks if other != rank}

    def read() -> None:
        if store.check(list(places.values())):  # what is not there yet would be waited for
            for other, text in zip(places, store.multi_get(list(places.values())), strict=True):
                heard[other] = hear(heard.get(other), Doing.model_validate_json(text), time.monotonic())

    def run() -> None:
        tick, before = 0, -1
        while not inbox.over.wait(inbox.patience.word_s):
            tick += 1
            try:
                mine = doing(tick)
                store.set(own, mine.model_dump_json())
                if mine.on and mine.wait == before:  # short waits are all there is in a run that is well
                    read()
                before = mine.wait
            except Exception:  # noqa: BLE001 - the store is away, so what was heard may be wrong; a word more next time
                heard.clear()
            inbox.heard = dict(heard)

    start("lookout", run)
