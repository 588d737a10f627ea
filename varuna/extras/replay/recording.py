"""Recordings of clusters as they are found: events or numbers of nodes, CSV or JSON, clocks of any unit."""

import csv
import json
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, Field

from varuna.core.errors import UsageError
from varuna.extras.replay.trace import Happening, Trace, assembled

TimeUnit = Literal["ms", "s", "min", "h"]
_UNIT_S: dict[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_UNIT_NAMES = {"ms": "milliseconds", "s": "seconds", "min": "minutes", "h": "hours"}
_EPOCHS = ((1e8, 1e10, 1.0, "seconds"), (1e11, 1e13, 1e-3, "milliseconds"), (1e14, 1e16, 1e-6, "microseconds"))
"""Least and most of a time, in seconds of what: dates from 1973 to 2286."""
_SHORTEST_S, _LONGEST_S = 1800.0, 200 * 86400.0
_COMES = ("add", "remove")


class _Availability(BaseModel):
    """Numbers of nodes at equal intervals, as SkyPilot's public traces are written."""

    class Metadata(BaseModel):
        """Facts that hold for the whole recording."""

        gap_seconds: float = Field(gt=0)

    metadata: Metadata
    data: list[int] = Field(min_length=1)


def read_trace(path: Path, unit: TimeUnit | None = None) -> Trace:
    """Read a recorded cluster.

    A CSV file has lines of ``time, add|remove, node`` or of ``time, number of nodes``, ascending in time. Times are
    numbers, or timestamps (ISO, in one or two columns). A header line and lines that start with ``#`` are skipped. A
    JSON file is an object with ``metadata.gap_seconds`` and ``data``, a list of numbers of nodes.

    Args:
        path: the file.
        unit: of times that are numbers; None finds it: a count since 1970 by its size, whole thousands are
            milliseconds, and else the first of milliseconds, seconds and hours by which the recording lasts between
            half an hour and 200 days.

    Raises:
        UsageError: the file cannot be read, or a line is something else.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}. Name a CSV or JSON file.") from error
    try:
        return _of_json(text) if text.lstrip()[:1] in ("{", "[") else _of_csv(text, unit)
    except UsageError as error:
        raise UsageError(f"the trace {path}: {error}") from error


def _of_json(text: str) -> Trace:
    try:
        recorded = _Availability.model_validate(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            'this JSON is not a recording that is known. Write {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3]}, '
            "or a CSV file of: time, number of nodes"
        ) from error
    if min(recorded.data) < 0:
        raise UsageError(f"it has {min(recorded.data)} nodes at some time. Numbers of nodes are 0 or more.")
    gap_s = recorded.metadata.gap_seconds
    happenings = [Happening(i * gap_s, count=count) for i, count in enumerate(recorded.data)]
    return assembled(happenings, len(recorded.data) * gap_s, f"a number of nodes every {gap_s:g} s")


def _of_csv(text: str, unit: TimeUnit | None) -> Trace:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    lines = [(number, line) for number, line in lines if not line.lstrip().startswith("#")]
    rows = [(number, cells) for number, line in lines if any(cells := _cells(line))]
    if rows and _time(rows[0][1]) is None:
        rows = rows[1:]  # a header
    if not rows:
        raise UsageError("it has no lines. It needs at least: time, number of nodes")
    timed = [(number, *_told(number, cells)) for number, cells in rows]
    for (_, before, _), (number, after, _) in pairwise(timed):
        if after < before:
            raise UsageError(f"line {number} is earlier than the line before it. Sort the lines by their times.")
    scale_s, clock = (1.0, "timestamps") if _is_stamped(rows[0][1]) else _scale([at for _, at, _ in timed], unit)
    begin = timed[0][1]
    happenings = [_happening(number, (at - begin) * scale_s, rest) for number, at, rest in timed]
    return assembled(happenings, happenings[-1].at_s, clock)


def _cells(line: str) -> list[str]:
    separator = next((each for each in ",;\t" if each in line), ",")
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator))]


def _time(cells: Sequence[str]) -> tuple[float, list[str]] | None:
    """Return the time at the start of a line, in its own unit or in seconds since 1970, and the other cells."""
    try:
        at = float(cells[0])
    except ValueError:
        pass
    else:
        return (at, list(cells[1:])) if abs(at) < float("inf") else None
    for used in (2, 1):
        try:
            return datetime.fromisoformat(" ".join(cells[:used])).timestamp(), list(cells[used:])
        except (ValueError, OverflowError, OSError):
            continue
    return None


def _is_stamped(cells: Sequence[str]) -> bool:
    try:
        float(cells[0])
    except ValueError:
        return True
    return False


def _told(number: int, cells: Sequence[str]) -> tuple[float, list[str]]:
    found = _time(cells)
    if found is None:
        raise UsageError(f"line {number} has no time: {', '.join(cells)!r}. Write a number or a timestamp first.")
    return found


def _happening(number: int, at_s: float, rest: Sequence[str]) -> Happening:
    match [cell.lower() for cell in rest[:1]], list(rest[1:]):
        case [way], [node] if way in _COMES and node:
            return Happening(at_s, node, comes=way == "add")
        case [count], [] if count.isascii() and count.removesuffix(".0").isdigit():
            return Happening(at_s, count=int(count.removesuffix(".0")))
    raise UsageError(
        f"line {number} says {', '.join(rest)!r} after its time. Write 'time, add|remove, node' or 'time, number of "
        "nodes'."
    )


def _scale(times: Sequence[float], unit: TimeUnit | None) -> tuple[float, str]:
    """Return the seconds of one unit, and what people call it."""
    if unit is not None:
        return _UNIT_S[unit], _UNIT_NAMES[unit]
    for least, most, scale_s, name in _EPOCHS:
        if least <= times[0] <= times[-1] < most:
            return scale_s, f"{name} since 1970"
    if any(times) and all(at % 1000 == 0 for at in times):
        return _UNIT_S["ms"], _UNIT_NAMES["ms"]
    lasts = times[-1] - times[0]
    likely = (each for each in get_args(TimeUnit) if each != "min")
    found = next((each for each in likely if _SHORTEST_S <= lasts * _UNIT_S[each] <= _LONGEST_S), "ms")
    return _UNIT_S[found], _UNIT_NAMES[found]
