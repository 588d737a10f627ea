"""A picture of fleets that can be rented: how fast each trains, and what an example costs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from varuna.extras.pictures.svg import element, line, picture, round_up, text

_WIDTH, _HEIGHT = 1060, 520
_PLOT = (80, 56, 560, 440)  # left, top, right, bottom, pixels
_LIST = 640  # left edge of the list of fleets, pixels
_NAME = 58  # longest that has room, characters
_TICKS = 8  # on an axis, about
_INK, _SOFT, _GRID, _LINE, _FLEET, _ANSWER = "#222222", "#6b6b6b", "#dddddd", "#9ab4d6", "#1f5fa8", "#b3541e"
_HOUR_S = 3600


class DrawnFleet(NamedTuple):
    """A fleet that no other one beats in both speed and price."""

    name: str
    shape: str
    """P x D of its plan"""
    examples_per_s: float
    dollars_per_million: float
    answers: str = ""
    """the question that it answers, in words"""


class DrawnJob(NamedTuple):
    """Amount of training that a drawn job needs, and its limits."""

    examples: float
    deadline_hours: float | None = None
    budget_dollars: float | None = None


class _Axis(NamedTuple):
    """Values on a line of pixels."""

    ticks: tuple[float, ...]
    begin_px: float
    end_px: float

    def at(self, value: float) -> float:
        first, last = self.ticks[0], self.ticks[-1]
        return self.begin_px + (self.end_px - self.begin_px) * (value - first) / (last - first)

    def has(self, value: float) -> bool:
        return self.ticks[0] <= value <= self.ticks[-1]


def draw(title: str, fleets: Sequence[DrawnFleet], job: DrawnJob | None = None) -> str:
    """Draw SVG text: speed to the right, dollars upwards, every fleet numbered and named beside.

    Args:
        title: above it.
        fleets: the frontier, the slowest first; at least one.
        job: adds its hours and dollars to the axes, and lines for its limits.
    """
    left, top, right, bottom = _PLOT
    speed = _Axis(_round_ticks([each.examples_per_s for each in fleets]), left, right)
    price = _Axis(_round_ticks([each.dollars_per_million for each in fleets]), bottom, top)
    parts = [
        element("rect", width=_WIDTH, height=_HEIGHT, fill="white"),
        text(20, 26, title, size=15),
        *_speeds(speed, job),
        *_prices(price, job),
        element("path", d=_stairs(fleets, speed, price), fill="none", stroke=_LINE, stroke_width=2),
        *(_limits(job, speed, price) if job else []),
    ]
    for number, each in enumerate(fleets, 1):
        where = speed.at(each.examples_per_s), price.at(each.dollars_per_million)
        parts += [*_numbered(where, number, each), *_listed(number, each)]
    attributes = {"width": _WIDTH, "height": _HEIGHT, "font_family": "sans-serif", "font_size": 12, "fill": _INK}
    return picture((_WIDTH, _HEIGHT), parts, **attributes)


def _speeds(axis: _Axis, job: DrawnJob | None) -> list[str]:
    _, top, _, bottom = _PLOT
    parts = [text((axis.begin_px + axis.end_px) / 2, _HEIGHT - 16, "examples/s that losses leave", anchor="middle")]
    for value in axis.ticks:
        x = axis.at(value)
        parts += [line((x, top), (x, bottom), _GRID), text(x, bottom + 18, f"{value:g}", anchor="middle")]
        if job and value:
            hours = job.examples / value / _HOUR_S
            parts.append(text(x, bottom + 36, f"{_short(hours)} h", anchor="middle", fill=_SOFT))
    return parts


def _prices(axis: _Axis, job: DrawnJob | None) -> list[str]:
    left, top, right, bottom = _PLOT
    middle = (top + bottom) / 2
    turned = f"rotate(-90 20 {middle:g})"
    parts = [text(20, middle, "$ per million examples", anchor="middle", transform=turned)]
    for value in axis.ticks:
        y = axis.at(value)
        parts += [line((left, y), (right, y), _GRID), text(left - 8, y + 4, f"{value:g}", anchor="end")]
        if job:
            parts.append(text(right + 8, y + 4, f"$ {_short(value * job.examples / 1e6)}", fill=_SOFT))
    return parts


def _stairs(fleets: Sequence[DrawnFleet], speed: _Axis, price: _Axis) -> str:
    """Draw the least that each speed costs."""
    path = ""
    for each in fleets:
        x, y = speed.at(each.examples_per_s), price.at(each.dollars_per_million)
        path += f"V{y:.1f}H{x:.1f}" if path else f"M{x:.1f} {y:.1f}"
    return path


def _limits(job: DrawnJob, speed: _Axis, price: _Axis) -> list[str]:
    """Draw lines beyond which a fleet is too slow, or too dear; none for a limit that is off the picture."""
    left, top, right, bottom = _PLOT
    parts = []
    if job.deadline_hours:
        least = job.examples / job.deadline_hours / _HOUR_S
        if speed.has(least):
            x = speed.at(least)
            parts.append(line((x, top - 6), (x, bottom), _ANSWER, stroke_dasharray="5 4"))
            parts.append(text(x, top - 10, f"{job.deadline_hours:g} h", anchor="middle", fill=_ANSWER))
    if job.budget_dollars is not None:
        most = job.budget_dollars / job.examples * 1e6
        if price.has(most):
            y = price.at(most)
            parts.append(line((left, y), (right, y), _ANSWER, stroke_dasharray="5 4"))
            parts.append(text(left + 4, y - 5, f"$ {job.budget_dollars:,.0f}", fill=_ANSWER))
    return parts


def _numbered(where: tuple[float, float], number: int, fleet: DrawnFleet) -> list[str]:
    x, y = where
    fill = _ANSWER if fleet.answers else _FLEET
    return [
        element("circle", cx=x, cy=y, r=9, fill=fill, stroke="white"),
        text(x, y + 4, str(number), size=11, anchor="middle", fill="white"),
    ]


def _listed(number: int, fleet: DrawnFleet) -> list[str]:
    _, top, _, bottom = _PLOT
    y = top + 4 + (number - 1) * min(34.0, (bottom - top) / 11)
    fill = _ANSWER if fleet.answers else _INK
    figures = f"{fleet.shape}: {fleet.examples_per_s:.4g} examples/s, $ {fleet.dollars_per_million:.4g} a million"
    name = fleet.name if len(fleet.name) <= _NAME else f"{fleet.name[:_NAME]} ..."
    more = f"; {fleet.answers}" if fleet.answers else ""
    return [
        text(_LIST + 14, y, str(number), fill=fill, anchor="end"),
        text(_LIST + 22, y, name, fill=fill),
        text(_LIST + 22, y + 14, figures + more, size=10, fill=fill if fleet.answers else _SOFT),
    ]


def _round_ticks(values: Sequence[float]) -> tuple[float, ...]:
    """Return round numbers around all values, evenly; from 0 if the values differ much, or are one."""
    least, most = min(values), max(values)
    if least < most / 2 or least == most:
        least = 0.0
    step = round_up((most - least) / _TICKS) or 1.0
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return tuple(round(number * step, 12) for number in range(first, max(last, first + 1) + 1))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
