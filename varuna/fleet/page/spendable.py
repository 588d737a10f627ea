"""Whether a budget means something, and can bear more of a run. Pure."""

from pathlib import Path

from varuna.core.errors import UsageError
from varuna.core.units import format_dollars, format_duration
from varuna.fleet.machine.budget import Used
from varuna.fleet.state.run_events import Budgeted, Priced


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
