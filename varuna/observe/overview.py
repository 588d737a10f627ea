"""``varuna status``: a run on one screen."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from varuna.core.plan import Copies
from varuna.core.units import format_duration
from varuna.observe.live_view import headline, numbers
from varuna.observe.progress import risk_line
from varuna.observe.split import compression_line, relay_line, split_table

_NEWEST = 8
"""Generations that are shown."""


def overview(status: Mapping[str, Any], width: int, *, plain: bool = False) -> RenderableType:
    """Return the answer of ``/status`` for people, once."""
    began_s = status.get("began_s")
    waited_s = None if began_s is None or status["step"] is not None else time.time() - began_s
    parts: list[RenderableType] = [headline(status, width, waited_s), *numbers(status, width, plain=plain)]
    if status["plan"] is not None and status["state"] == "training":
        plan, saved, rescues = status["plan"], status["checkpoint_dir"], status["rescues"]
        copies = Copies(plan["copies"])
        if risk := risk_line(plan["replicas"], copies, checkpoint_dir=saved, rescues=rescues):
            parts.append(Text(risk, style="dim"))
    parts += split_table(status, width)
    parts += [Text(line, style="dim") for line in (compression_line(status), relay_line(status)) if line]
    if status["workers"]:
        parts.append(_workers(status))
    if status["generations"]:
        parts.append(_generations(status["generations"]))
    if status["failures"]:
        first = status["failures"][0]
        parts.append(Text(f"first failure  {first['cause'].splitlines()[0]}", style="red"))
    return Group(*parts)


def _workers(status: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    classes = {worker.get("device_class", "") for worker in status["workers"]}
    shows_class = len(classes) > 1
    for name in ("rank", "worker", "node", *(["device"] if shows_class else []), "state"):
        table.add_column(name, justify="right" if name == "rank" else "left", no_wrap=True)
    table.add_column("activity", overflow="ellipsis", no_wrap=True, ratio=1)  # what is left of the line
    by_rank = sorted(status["workers"], key=lambda worker: (worker["rank"] is None, worker["rank"] or 0))
    for worker in by_rank:
        rank = worker["rank"]
        node = worker["node"] + (" (leaving)" if worker["node"] in status["departing"] else "")
        device = [worker.get("device_class", "")] if shows_class else []
        doing = worker["words"] if worker["condition"] == "wait" and worker["state"] == "joined" else worker["activity"]
        table.add_row("" if rank is None else str(rank), worker["name"], node, *device, worker["state"], doing)
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
            record["plan"]["shape"],
            str(record["first_step"]),
            "" if recovery_s is None else format_duration(recovery_s),
            str(record["steps_redone"]),
            str(record["moved_sections"]),
            record["cause"],
        )
    return table
