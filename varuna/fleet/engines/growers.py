"""Several providers of one run's nodes: each is asked by itself, and the run goes on with what comes."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from varuna.core.errors import FleetError
from varuna.fleet.engines.grower import Grower
from varuna.fleet.engines.growth import GrowthConfig
from varuna.fleet.engines.provider import CapacityError, Provider


@dataclass(frozen=True)
class Source:
    """A provider of nodes, with its bounds."""

    name: str
    """for messages"""
    provider: Provider
    config: GrowthConfig


class Growers:
    """Asks all of them for the most that they may give.

    Args:
        sources: at least one.
        warn: gets a message when one refuses; which one it was, if there are several.
        end: ends the run, with a reason and an exit code, once none of them gives nodes any more.
        machines: how many the run has now.
        clock: seconds that only grow.
        pause_s: between tries to give back.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        warn: Callable[[str], None],
        end: Callable[[str, int], None],
        machines: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = 5.0,
    ) -> None:
        self._sources, self._warn, self._end = tuple(sources), warn, end
        self._lock = threading.Lock()
        self._over: set[int] = set()
        self._growers = [
            Grower(
                source.provider,
                source.config,
                warn=partial(self._say, source),
                end=partial(self._end_one, number),
                machines=machines,
                clock=clock,
                pause_s=pause_s,
            )
            for number, source in enumerate(self._sources)
        ]

    def start(self) -> None:
        """Ask from now on."""
        for source, grower in zip(self._sources, self._growers, strict=True):
            grower.request_nodes(source.config.most)
            grower.start()

    def close(self) -> None:
        """Ask no more, and let go of all groups.

        Raises:
            FleetError: not everything could be given back; each is tried.
        """
        missing = [
            found
            for source, grower in zip(self._sources, self._growers, strict=True)
            if (found := _closed(source, grower))
        ]
        if missing:
            raise FleetError("; ".join(missing))

    def _say(self, source: Source, text: str) -> None:
        self._warn(f"{source.name}: {text}" if len(self._sources) > 1 else text)

    def _end_one(self, number: int, reason: str, exit_code: int) -> None:
        """One gives no nodes any more: the run is over only if none does."""
        with self._lock:
            is_new = number not in self._over
            self._over.add(number)
            is_last = len(self._over) == len(self._sources)
        if is_last:
            self._end(reason, exit_code)
        elif is_new:
            self._say(self._sources[number], f"{reason}. The run goes on with nodes from elsewhere.")


def _closed(source: Source, grower: Grower) -> str:
    """Say why not everything was given back; empty if it was."""
    try:
        grower.close()
    except CapacityError as error:
        return (
            f"what this run requested of {source.name} is not given back: {error}. Set the size back by hand, or "
            "machines go on to cost"
        )
    except FleetError as error:
        return str(error)
    return ""
