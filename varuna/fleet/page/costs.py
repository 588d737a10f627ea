"""What a run has cost so far, from its events, and what the same work would cost on demand. Pure."""

from collections.abc import Set
from typing import NamedTuple

from varuna.core.units import format_dollars
from varuna.fleet.run_folder.past_events import PastStep
from varuna.fleet.state.run_events import (
    GenerationStarted,
    Priced,
    RunEnded,
    RunEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)

_HOUR_S = 3600.0


class Bill(NamedTuple):
    """Dollars."""

    spent: float
    """For the hours of all workers, from joining to leaving, whatever they did meanwhile."""
    per_hour: float
    """Of the workers that are here now."""
    on_demand: float | None
    """The steps that count, at the price of machines that are not taken back; None if nobody said what that is."""
    worker_hours: float

    @property
    def saved(self) -> float | None:
        """Share of ``on_demand`` that was not spent; negative if more was."""
        return None if not self.on_demand else 1 - self.spent / self.on_demand


class _Stretch:
    """Steps in a row under one plan, and the time that their workers spent in them."""

    def __init__(self, first: int) -> None:
        self.first, self.last, self.worker_s = first, first - 1, 0.0

    def cut(self, step: int) -> None:
        """This step and those after it are undone; each counts the same."""
        if self.last < self.first:
            return
        left = step - self.first
        self.worker_s *= left / (self.last + 1 - self.first)
        self.last = step - 1


class Meter:
    """Adds up what workers cost. Hours from before the first price was given are charged at that price."""

    def __init__(self) -> None:
        self.price: Priced | None = None
        self._here: set[str] = set()
        self._seats = self._global_batch = 0
        self._stretches: list[_Stretch] = []
        self._time_s = float("-inf")
        self._worker_s = self._spent = 0.0

    @property
    def here(self) -> Set[str]:
        """Workers that are paid for now."""
        return self._here

    def take(self, event: RunEvent, time_s: float) -> None:
        """Note an event; ``time_s`` in seconds since 1970."""
        match event:
            case WorkerJoined(worker=worker):
                self._go_on_to(time_s)
                self._here.add(worker)
            case WorkerLost(worker=worker) | WorkerLeft(worker=worker):
                self._go_on_to(time_s)
                self._here.discard(worker)
            case RunEnded():
                self._go_on_to(time_s)
                self._here.clear()
            case Priced(per_hour=per_hour):
                self._go_on_to(time_s)
                if self.price is None:
                    self._spent = self._worker_s / _HOUR_S * per_hour
                self.price = event
            case GenerationStarted(record=record):
                self._seats, self._global_batch = record.plan.workers, record.plan.global_batch
                self._stretches.append(_Stretch(record.first_step))
            case _:
                pass

    def take_step(self, point: PastStep) -> None:
        """Note a committed step; one that runs again replaces itself and what followed."""
        step, stretches = point.step, self._stretches
        while len(stretches) > 1 and stretches[-2].last < stretches[-2].first:
            del stretches[-2]  # a generation without a step
        for earlier in stretches[:-1][::-1]:
            if earlier.last < step:
                break
            earlier.cut(max(step, earlier.first))
        if not stretches or point.examples_per_s <= 0:
            return
        if stretches[-1].last >= step:
            stretches[-1].cut(max(step, stretches[-1].first))
        stretches[-1].worker_s += self._seats * self._global_batch / point.examples_per_s
        stretches[-1].last = step

    def cost(self, now_s: float) -> Bill | None:
        """Until now, in seconds since 1970; None as long as there is no price."""
        if self.price is None:
            return None
        left_s = self._left_s(now_s)
        on_demand = None
        if self.price.on_demand_per_hour is not None:
            worked_s = sum(each.worker_s for each in self._stretches)
            on_demand = worked_s / _HOUR_S * self.price.on_demand_per_hour
        return Bill(
            spent=self._spent + left_s / _HOUR_S * self.price.per_hour,
            per_hour=len(self._here) * self.price.per_hour,
            on_demand=on_demand,
            worker_hours=(self._worker_s + left_s) / _HOUR_S,
        )

    def _left_s(self, now_s: float) -> float:
        """Worker-seconds since the newest event; a clock that was set back adds none."""
        return len(self._here) * max(0.0, now_s - self._time_s) if self._here else 0.0

    def _go_on_to(self, time_s: float) -> None:
        left_s = self._left_s(time_s)
        self._worker_s += left_s
        if self.price is not None:
            self._spent += left_s / _HOUR_S * self.price.per_hour
        self._time_s = max(self._time_s, time_s)


def shown(cost: Bill | None) -> dict[str, object] | None:
    """Money for people."""
    if cost is None:
        return None
    return {
        "currency": "$",
        "spent": round(cost.spent, 4),
        "per_hour": round(cost.per_hour, 4),
        "on_demand": None if cost.on_demand is None else round(cost.on_demand, 4),
        "saved": None if cost.saved is None else round(cost.saved, 4),
        "worker_hours": round(cost.worker_hours, 4),
        "words": spent(cost),
    }


def spent(cost: Bill | None) -> str:
    """``"$4.20 spent, $16.10 on demand (74 % saved)"``; empty where nobody gave a price."""
    if cost is None:
        return ""
    words = f"{format_dollars(cost.spent)} spent"
    if not cost.on_demand or cost.saved is None:
        return words
    share = f"{100 * abs(cost.saved):.0f} % {'saved' if cost.saved >= 0 else 'more'}"
    return f"{words}, {format_dollars(cost.on_demand)} on demand ({share})"
