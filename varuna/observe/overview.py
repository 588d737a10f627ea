"""``varuna status``: a run on one screen."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varuna.core.units import format_duration, format_rate, step_number

_NEWEST = 8
"""Generations that are shown."""
_STATES = {"training": "green", "forming": "yellow", "morphing": "yellow", "starting": "yellow", "finishing": "cyan"}


def overview(status: Mapping[str, Any]) -> RenderableType:
    """The answer of ``/status`` for people."""
    parts: list[RenderableType] = [_headline(status)]
    if status["workers"]:
        parts.append(_workers(status))
    if status["generations"]:
        parts.append(_generations(status["generations"]))
    if status["failures"]:
        first = status["failures"][0]
        parts.append(Text(f"first failure  {first['cause'].splitlines()[0]}", style="red"))
    return Group(*parts)


def _headline(status: Mapping[str, Any]) -> Text:
    state, plan = status["state"], status["plan"]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(state, style=f"bold {_STATES.get(state, 'yellow')}")
    if status["step"] is not None:
        line.append(f"  step {step_number(status['step'], status['steps'])}")
        line.append("  loss " + ("nan" if status["loss"] is None else f"{status['loss']:.4f}"))
        line.append(f"  {format_rate(status['examples_per_s'])} examples/s")
    if plan is not None:
        line.append(f"  plan {plan['stages']}x{plan['replicas']}  generation {status['generation']}")
    return line


def _workers(status: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for name in ("rank", "worker", "node", "state"):
        table.add_column(name, justify="right" if name == "rank" else "left", no_wrap=True)
    table.add_column("activity", overflow="ellipsis", no_wrap=True, ratio=1)  # what is left of the line
    by_rank = sorted(status["workers"], key=lambda worker: (worker["rank"] is None, worker["rank"] or 0))
    for worker in by_rank:
        rank = worker["rank"]
        node = worker["node"] + (" (leaving)" if worker["node"] in status["departing"] else "")
        table.add_row("" if rank is None else str(rank), worker["name"], node, worker["state"], worker["activity"])
    return table


def _generations(generations: list[Mapping[str, Any]]) -> Table:
    left_out = len(generations) - _NEWEST
    title = f"Generations ({left_out} older ones left out)" if left_out > 0 else "Generations"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", expand=True)
    for name in ("generation", "plan", "from step", "recovery", "redone", "moved"):
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
    table.add_column("cause", overflow="ellipsis", no_wrap=True, ratio=1)
    for record in generations[-_NEWEST:]:
        recovery_s = record["recovery_s"]
        table.add_row(
            str(record["generation"]),
            f"{record['plan']['stages']}x{record['plan']['replicas']}",
            str(record["first_step"]),
            "" if recovery_s is None else format_duration(recovery_s),
            str(record["steps_redone"]),
            str(record["moved_sections"]),
            record["cause"],
        )
    return table
