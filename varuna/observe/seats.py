"""The grid of stages x replicas on a terminal: a name for each seat, else a sign, else a sentence. Pure."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from varuna.core.units import counted
from varuna.fleet.page.conditions import PEERS

_LABEL = 12
"""Columns of ``replica 12``, and some room."""
_WIDEST_CELL = 28
_STYLES = {
    "": "",
    "ok": "green",
    "slow": "yellow",
    "silent": "magenta",
    "leaving": "blue",
    "wait": "dim",
    "lost": "red",
}
_SIGNS = {"": " ", "ok": "●", "slow": "s", "silent": "?", "leaving": ">", "wait": ".", "lost": "x"}
_MOST_NAMED = 8


class SeatView(NamedTuple):
    """A place in the grid, and who has it."""

    name: str
    kind: str
    words: str

    @property
    def text(self) -> str:
        """Its worker, and what is special about it."""
        if self.kind in ("", "ok"):
            return self.name
        return f"{self.name} {'slow, ' * (self.kind == 'slow')}{self.words.removesuffix(PEERS)}"


_NO_SEAT = SeatView("", "", "")
"""The empty cell of a pipeline that has fewer stages than others."""


def seats(status: Mapping[str, Any]) -> list[list[SeatView]]:
    """Return the seats by replica, then by stage; empty without a plan."""
    plan, members = status["plan"], status["members"]
    if plan is None:
        return []
    workers = {worker["name"]: worker for worker in status["workers"]}
    taken = []
    for name in members[: sum(plan["depths"])]:
        worker = workers.get(name)
        taken.append(SeatView(name, worker["condition"], worker["words"]) if worker else SeatView(name, "lost", "lost"))
    # rank r of the plan is members[r]: pipeline after pipeline, each from stage 0 on
    ends = list(accumulate(plan["depths"], initial=0))
    return [taken[first:end] for first, end in pairwise(ends)]


def without_seat(status: Mapping[str, Any]) -> str:
    """Name the workers that are here and have no seat; empty if all have one."""
    plan = status["plan"]
    seated = set(status["members"][: sum(plan["depths"])]) if plan is not None else set()
    by_state: dict[tuple[str, str], list[str]] = {}
    for worker in status["workers"]:
        if worker["name"] not in seated:
            state = ("spare", f" ({worker['words']})") if worker["state"] == "joined" else (worker["state"], "")
            by_state.setdefault(state, []).append(worker["name"])
    return "   ".join(f"{state}: {_named(names)}{why}" for (state, why), names in by_state.items())


def grid(status: Mapping[str, Any], width: int, rows: int, *, plain: bool) -> list[RenderableType]:
    """Return the grid in at most ``rows`` lines; the more workers, the less of each.

    Args:
        status: what the manager says.
        width: columns.
        rows: lines that there is room for.
        plain: signs must be ASCII.
    """
    by_replica = seats(status)
    if not by_replica or rows < 1:
        return []
    deepest = max(map(len, by_replica))
    even = [[*row, *[_NO_SEAT] * (deepest - len(row))] for row in by_replica]
    by_stage = [list(column) for column in zip(*even, strict=True)]
    # names if one of both directions fits, else signs, else a sentence
    for table, down, across in ((even, "replica", "stage"), (by_stage, "stage", "replica")):
        if len(table) + 1 <= rows and len(table[0]) * _cell_width(table, across) + _LABEL <= width:
            return _names(table, down, across)
    for table, down, across in ((even, "replica", "stages"), (by_stage, "stage", "replicas")):
        if len(table) + 2 <= rows and len(table[0]) + _LABEL <= width:
            return [*_signs(table, down, plain=plain), _line(f"{'':{_LABEL}}{across} from left to right", "dim"),
                    summary(by_replica)]  # fmt: skip
    return [summary(by_replica)]


def _cell_width(table: Sequence[Sequence[SeatView]], across: str) -> int:
    longest = max(len(seat.name) for row in table for seat in row)
    return 2 + max(longest, len(f"{across} {len(table[0]) - 1}"))


def _names(table: Sequence[Sequence[SeatView]], down: str, across: str) -> list[RenderableType]:
    drawn = Table(box=None, pad_edge=False, show_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    drawn.add_column("", style="dim", no_wrap=True)
    for number in range(len(table[0])):
        drawn.add_column(f"{across} {number}", no_wrap=True, overflow="ellipsis", max_width=_WIDEST_CELL)
    for number, row in enumerate(table):
        drawn.add_row(f"{down} {number}", *(Text(seat.text, style=_STYLES[seat.kind]) for seat in row))
    return [drawn]


def _signs(table: Sequence[Sequence[SeatView]], down: str, *, plain: bool) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for number, row in enumerate(table):
        line = _line(f"{f'{down} {number}':{_LABEL}}", "dim")
        for seat in row:
            sign = "o" if plain and seat.kind == "ok" else _SIGNS[seat.kind]
            line.append(sign, style=_STYLES[seat.kind])
        lines.append(line)
    return lines


def summary(by_replica: Sequence[Sequence[SeatView]]) -> Text:
    """Say how many workers work, and name those that do not."""
    taken = [seat for row in by_replica for seat in row]
    line = _line(f"{sum(seat.kind == 'ok' for seat in taken)} of {counted(len(taken), 'worker')} work", "")
    odd = [seat for seat in taken if seat.kind != "ok"]
    for seat in odd[:_MOST_NAMED]:
        line.append("   ")
        line.append(seat.text, style=_STYLES[seat.kind])
    if len(odd) > _MOST_NAMED:
        line.append(f"   and {len(odd) - _MOST_NAMED} more")
    return line


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def _line(text: str, style: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(text, style=style)
    return line
