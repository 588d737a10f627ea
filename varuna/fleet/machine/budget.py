"""The end of a run that has a budget: early enough for its last checkpoint and its model to fit into it. Pure."""

from enum import Enum
from typing import NamedTuple

from varuna.core.units import format_dollars
from varuna.fleet.state.run_events import Budgeted

_HOUR_S = 3600.0
_SAVES = 2
"""The last checkpoint is written, and then its model is read from it and written once more."""
_STEPS = 2
"""A wish that comes just after a vote is heard by the next one."""
_DOUBT = 1.25
"""Factor by which anything may take longer, when it counts, than it has taken so far."""
_MOST_MARGIN_S, _MARGIN_SHARE = 30.0, 1 / 10
"""Kept for what nobody has measured: processes that end, a store that is given free."""
_UNKNOWN_SAVE_S, _UNKNOWN_SAVE_SHARE = 60.0, 1 / 10
_TRY_SAVING_AT = 1 / 4
"""Share of the budget after which a checkpoint is asked for, if there was none: what saving takes must be known."""


class Used(NamedTuple):
    """Time and money that a run has used up so far, all its starts together."""

    wall_s: float
    dollars: float = 0.0
    dollars_per_hour: float = 0.0
    """of the workers that are here now"""


class Left(NamedTuple):
    """The rest of a budget, by the limit that is reached first."""

    until_s: float
    """Seconds from now to the limit that is reached first, at the present rate; not above 0: it is reached."""
    flag: str
    """The option that sets this limit."""
    whole_s: float
    """Seconds of the whole limit, at the present rate."""

    @property
    def used_share(self) -> float:
        """Share of the limit that is used, in time at the present rate."""
        return 1.0 if self.until_s <= 0 else 0.0 if self.whole_s == float("inf") else 1 - self.until_s / self.whole_s


class Seen(NamedTuple):
    """Times that were measured in a run."""

    step_s: float
    saving_s: float | None
    """From the end of a step until its checkpoint was complete, the longest; None: there was none yet."""


class Decision(Enum):
    """A decision about a run that has a budget."""

    GO_ON = "nothing"
    SAVE = "a checkpoint, to learn how long one takes"
    FINISH = "to end after the current step"
    CUT = "to end now"


def left_of(budget: Budgeted, used: Used) -> Left:
    """Compute the rest of a budget that has a limit at least."""
    limits: list[Left] = []
    if (hours := budget.max_hours) is not None:
        limits.append(Left(hours * _HOUR_S - used.wall_s, "--max-hours", hours * _HOUR_S))
    if (dollars := budget.max_dollars) is not None:
        left = dollars - used.dollars
        if used.dollars_per_hour > 0:
            until_s = left / used.dollars_per_hour * _HOUR_S
            limits.append(Left(until_s, "--max-cost", dollars / used.dollars_per_hour * _HOUR_S))
        else:
            limits.append(Left(float("inf") if left > 0 else 0.0, "--max-cost", float("inf")))
    return min(limits)


def lead_s(left: Left, seen: Seen) -> float:
    """Compute how many seconds before the limit a run is told to end."""
    saving_s = min(_UNKNOWN_SAVE_S, _UNKNOWN_SAVE_SHARE * left.whole_s) if seen.saving_s is None else seen.saving_s
    margin_s = min(_MOST_MARGIN_S, _MARGIN_SHARE * left.whole_s)
    return _DOUBT * (_STEPS * seen.step_s + _SAVES * saving_s) + margin_s


def decide(left: Left, seen: Seen, *, is_ending: bool, is_saved: bool, tried_saving: bool) -> Decision:
    """Decide what to do now.

    Args:
        left: of the budget.
        seen: of the run.
        is_ending: it was told to end.
        is_saved: all recorded steps are in a checkpoint.
        tried_saving: a checkpoint was asked for already.
    """
    ahead_s = lead_s(left, seen)
    if is_ending:
        # A save that is under way is worth more than what it costs, for as long as it was expected to take.
        return Decision.CUT if left.until_s <= (0.0 if is_saved else -ahead_s) else Decision.GO_ON
    if left.until_s <= ahead_s:
        return Decision.FINISH
    if seen.saving_s is None and not tried_saving and left.used_share >= _TRY_SAVING_AT:
        return Decision.SAVE
    return Decision.GO_ON


def limits_of(budget: Budgeted) -> dict[str, float | None]:
    """By option."""
    return {"--max-cost": budget.max_dollars, "--max-hours": budget.max_hours}


def limit_words(budget: Budgeted, flag: str) -> str:
    """``"$20.00 (--max-cost)"``, ``"2 hours (--max-hours)"``."""
    if flag == "--max-cost":
        assert budget.max_dollars is not None
        return f"{format_dollars(budget.max_dollars)} ({flag})"
    return f"{budget.max_hours:g} hour{'' if budget.max_hours == 1 else 's'} ({flag})"


def reason_to_end(budget: Budgeted, left: Left) -> str:
    """Say why the run ends, and how it goes on."""
    return (
        f"the budget of {limit_words(budget, left.flag)} is used up but for what saving takes. To train on, give the "
        f"same command a larger {left.flag}"
    )
