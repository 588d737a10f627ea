"""A small table of a step's time by parts, measured against predicted. Pure."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table

from varuna.core.units import format_bytes, format_duration

HEIGHT = 3
"""Lines of the table."""
_WIDEST = 70


class StepSeconds(NamedTuple):
    """Seconds of a step, as means over the stages."""

    compute_s: float
    transfer_s: float | None
    """None: not measured, so part of the idle time."""
    reduced_s: float
    ending_s: float
    """Optimizer, vote, and what is neither."""
    idle_s: float
    step_s: float


def measured(status: Mapping[str, Any]) -> StepSeconds | None:
    """Return the times of the generation that runs; None before they are known."""
    timed, waits = status["timed"], status.get("waits")
    if timed is None or not timed["stages"] or timed["generation"] != status["generation"]:
        return None
    stages = timed["stages"]
    shares = [0.0] * len(stages)
    if is_split := waits is not None and waits["generation"] == timed["generation"]:
        shares = waits["transfer_share"]
    waited_s = _mean([stage["waited_s"] for stage in stages])
    transfer_s = _mean([stage["waited_s"] * share for stage, share in zip(stages, shares, strict=True)])
    return StepSeconds(
        compute_s=_mean([stage["compute_s"] for stage in stages]),
        transfer_s=transfer_s if is_split else None,
        reduced_s=_mean([stage["reduced_s"] for stage in stages]),
        ending_s=_mean([stage["ending_s"] for stage in stages]),
        idle_s=waited_s - transfer_s,
        step_s=_mean([stage["step_s"] for stage in stages]),
    )


def predicted(status: Mapping[str, Any]) -> StepSeconds | None:
    """Return what was predicted for the same steps from earlier measurements; None if there were none."""
    timed = status["timed"]
    parts = None if timed is None else timed.get("predicted")
    if parts is None or timed["generation"] != status["generation"]:
        return None
    return StepSeconds(
        compute_s=parts["compute_s"],
        transfer_s=parts["transfer_s"],
        reduced_s=parts["reduce_s"],
        ending_s=parts["optimizer_s"],
        idle_s=parts["idle_s"],
        step_s=timed["predicted_s"],
    )


def split_table(status: Mapping[str, Any], width: int) -> list[RenderableType]:
    """Return both in a table with a line of names; nothing before times are known, or without room for them."""
    seen = measured(status)
    if seen is None or width < _WIDEST:
        return []
    is_split = seen.transfer_s is not None
    names = (
        "compute",
        *(("transfer",) * is_split),
        "all-reduce",
        "optimizer",
        "idle" if is_split else "transfer or idle",
    )
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("of a step", style="dim", no_wrap=True)
    for name in (*names, "whole"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in (("measured", seen), ("predicted", predicted(status))):
        if split is not None:
            table.add_row(name, *_cells(split, is_split=is_split))
    return [table]


def compression_line(status: Mapping[str, Any]) -> str:
    """Say which stages send compressed messages, and what that saves; empty where none does."""
    timed = status["timed"]
    if timed is None or timed["generation"] != status["generation"]:
        return ""
    sent = [(each.get("compressed_bytes", 0.0), each.get("sent_bytes", 0.0)) for each in timed["stages"]]
    found = [f"{stage} ({before / after:.2f} times smaller)" for stage, (before, after) in enumerate(sent) if after]
    if not found:
        return ""
    saved = format_bytes(int(sum(before - after for before, after in sent)))
    return f"compressed     what stages send: {', '.join(found)}; {saved} less in a step of each pipeline"


def relay_line(status: Mapping[str, Any]) -> str:
    """Say which stages reach others through another machine only; empty where none does."""
    timed = status["timed"]
    if timed is None or timed["generation"] != status["generation"]:
        return ""
    found = [
        f"stage {stage} to {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        for stage, ranks in enumerate(timed.get("relayed", []))
        if ranks
    ]
    return f"relayed        through another machine: {'; '.join(found)}" if found else ""


def _cells(split: StepSeconds, *, is_split: bool) -> list[str]:
    waited = (split.transfer_s or 0.0) + split.idle_s
    first, last = ((split.transfer_s or 0.0,), split.idle_s) if is_split else ((), waited)
    parts = (split.compute_s, *first, split.reduced_s, split.ending_s, last)
    return [*(f"{100 * each / split.step_s:.0f} %" for each in parts), format_duration(split.step_s)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
