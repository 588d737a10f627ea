"""The cost of a run so far, from its events, that of the same work on demand, and what is left of its budget. Pure."""

from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from varuna.core.errors import UsageError
from varuna.core.units import format_dollars, format_duration
from varuna.fleet.machine.budget import Used, left_of
from varuna.fleet.run_folder.past_events import PastStep
from varuna.fleet.state.account import Account
from varuna.fleet.state.run_events import (
    Budgeted,
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
    """Adds up what workers cost. Hours from before the first price was given are charged at that price.

    Args:
        before: what the run had used up when this start of it began.
    """

    def __init__(self, before: Account | None = None) -> None:
        before = before or Account()
        self.price: Priced | None = None
        self.budget: Budgeted | None = None
        self._here: set[str] = set()
        self._seats = self._global_batch = 0
        first = _Stretch(0)
        first.last, first.worker_s = before.steps - 1, before.worked_s
        self._stretches: list[_Stretch] = [first]
        self._time_s = float("-inf")
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._wall_s, self._worker_s = before.wall_s, before.worker_s
        self._spent, self._unpriced_s = before.dollars, before.unpriced_s

    @property
    def here(self) -> Set[str]:
        """Workers that are paid for now."""
        return self._here

    def begin_run(self, time_s: float) -> None:
        """Start the run, unless it has started; ``time_s`` in seconds since 1970."""
        self._began_s = time_s if self._began_s is None else self._began_s

    def add_event(self, event: RunEvent, time_s: float) -> None:
        """Note an event; ``time_s`` in seconds since 1970."""
        self.begin_run(time_s)
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
                self._ended_s = time_s
            case Priced(per_hour=per_hour):
                self._go_on_to(time_s)
                self._spent += self._unpriced_s / _HOUR_S * per_hour
                self.price, self._unpriced_s = event, 0.0
            case Budgeted():
                self.budget = event
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
            on_demand = self._worked_s / _HOUR_S * self.price.on_demand_per_hour
        return Bill(
            spent=self._spent + left_s / _HOUR_S * self.price.per_hour,
            per_hour=len(self._here) * self.price.per_hour,
            on_demand=on_demand,
            worker_hours=(self._worker_s + left_s) / _HOUR_S,
        )

    def used(self, now_s: float, price: Priced | None = None) -> Used:
        """Until now, in seconds since 1970, for a budget; hours without a price count at ``price``."""
        cost, found = self.cost(now_s), self.account(now_s)
        unpriced = 0.0 if price is None else found.unpriced_s / _HOUR_S * price.per_hour
        return Used(found.wall_s, found.dollars + unpriced, 0.0 if cost is None else cost.per_hour)

    def account(self, now_s: float) -> Account:
        """All of it, for the next start of the run, as if this one had ended now; in seconds since 1970."""
        left_s = self._left_s(now_s)
        rate = 0.0 if self.price is None else self.price.per_hour / _HOUR_S
        return Account(
            wall_s=self._wall(now_s),
            worker_s=self._worker_s + left_s,
            unpriced_s=self._unpriced_s + (left_s if self.price is None else 0.0),
            dollars=self._spent + left_s * rate,
            steps=max(each.last for each in self._stretches) + 1,
            worked_s=self._worked_s,
        )

    @property
    def _worked_s(self) -> float:
        return sum(each.worker_s for each in self._stretches)

    def _wall(self, now_s: float) -> float:
        if self._began_s is None:
            return self._wall_s
        until_s = max(now_s, self._time_s) if self._ended_s is None else self._ended_s
        return self._wall_s + max(0.0, until_s - self._began_s)

    def _left_s(self, now_s: float) -> float:
        """Worker-seconds since the newest event; a clock that was set back adds none."""
        return len(self._here) * max(0.0, now_s - self._time_s) if self._here else 0.0

    def _go_on_to(self, time_s: float) -> None:
        left_s = self._left_s(time_s)
        self._worker_s += left_s
        if self.price is not None:
            self._spent += left_s / _HOUR_S * self.price.per_hour
        else:
            self._unpriced_s += left_s
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


def shown_budget(budget: Budgeted | None, used: Used, *, is_over: bool) -> dict[str, object] | None:
    """Describe what is left of a budget, for people; None without one."""
    if budget is None:
        return None
    left = left_of(budget, used)
    dollars, hours = budget.max_dollars, budget.max_hours
    phrases: list[str] = []
    if dollars is not None:
        phrases.append(f"{format_dollars(max(0.0, dollars - used.dollars))} of {format_dollars(dollars)} left")
    if hours is not None:
        left_s = max(0.0, hours * _HOUR_S - used.wall_s)
        phrases.append(f"{format_duration(left_s)} of {format_duration(hours * _HOUR_S)} left")
    goes_on = not is_over and 0 < left.until_s < float("inf")
    if goes_on:
        phrases.append(f"{left.flag} ends it in {format_duration(left.until_s)} at this rate")
    return {
        "max_dollars": dollars,
        "max_hours": hours,
        "left_dollars": None if dollars is None else round(dollars - used.dollars, 4),
        "left_hours": None if hours is None else round(hours - used.wall_s / _HOUR_S, 6),
        "ends_in_s": round(left.until_s, 1) if goes_on else None,
        "phrases": phrases,
    }


def check_budget(budget: Budgeted, price: Priced | None, used: Used, run_dir: Path) -> None:
    """Refuse a budget that means nothing, or that is used up.

    Raises:
        UsageError: says what to give instead.
    """
    if budget.max_dollars is not None and (price is None or price.per_hour == 0):
        found = "and no price is known" if price is None else "and the price is 0"
        raise UsageError(
            f"--max-cost needs what a worker costs per hour, {found}: give --price DOLLARS too, such as --price 0.69, "
            "or --max-hours instead"
        )
    anew = f"Give more than that, or --new or another --run-dir to count anew (this one is {run_dir})."
    if budget.max_dollars is not None and used.dollars >= budget.max_dollars:
        raise UsageError(
            f"--max-cost {budget.max_dollars:g}: {format_dollars(used.dollars)} was already spent on this run. {anew}"
        )
    if budget.max_hours is not None and used.wall_s >= budget.max_hours * 3600:
        raise UsageError(
            f"--max-hours {budget.max_hours:g}: this run has already taken {format_duration(used.wall_s)}. {anew}"
        )
