"""Gantt pictures of steps, simulated or measured, one above the other on one time axis: SVG without dependencies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from varuna.core.times import Interval
from varuna.extras.pictures.svg import element, picture, round_up
from varuna.simulator.trace import StepTrace

_WIDTH = 960.0
_LEFT, _RIGHT = 76.0, 936.0
_TOP, _NOTE, _TITLE, _AXIS, _LEGEND, _LEGEND_LINE = 64.0, 18.0, 34.0, 30.0, 34.0, 20.0
_STRIP = 4.0  # height of messages, below the actions of their stage
_LABEL_WIDTH = 11.0  # a bar needs that much for a number of one or two digits
_SPACED_WIDTH = 4.0  # a bar that wide can spare a pixel between it and the next
_FINEST_WIDTH = 2.0  # where bars are narrower on average, shares of the time are drawn instead
_BUCKET_WIDTH = 4.0

_LOOKS = {
    "F": ("#8fb8e8", "F forward"),
    "R": ("#f2c879", "R recompute"),
    "B": ("#3f8f6b", "B backward"),
    "I": ("#58ad86", "I its input half"),
    "W": ("#b3d8a5", "W its weight half"),
    "reduce": ("#b9a3d6", "all-reduce"),
    "vote": ("#dfe4ea", "vote"),
    "optimizer": ("#9aa4b2", "optimizer"),
    "activation": ("#2f66ad", "activation under way"),
    "gradient": ("#0f6b46", "gradient under way"),
}
"""Colour and words of each kind of work."""
_NUMBERED = "FRBIW"
_STRIPS = ("activation", "gradient", "reduce")
_STYLE = """
    text { fill: #1c2430; } .soft { fill: #5d6878; font-size: 12px; } .bold { font-weight: 600; }
    .mid { text-anchor: middle; } .end { text-anchor: end; } .grid { stroke: #dde3ea; } .lane { fill: #ffffff; }
    .finish { stroke: #c2410c; stroke-width: 1.5; } .late { fill: #c2410c; font-size: 12px; font-weight: 600; }
    .number { text-anchor: middle; font-size: 10px; } .light { fill: #ffffff; }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One step of one pipeline."""

    title: str
    note: str
    """Shown after the title, in a lighter colour."""
    rows: tuple[tuple[Interval, ...], ...]
    """F, R, B, I, W, reduce, vote and optimizer of each stage in order of time, which counts from the step's start."""
    strips: tuple[tuple[Interval, ...], ...] = ()
    """by stage, work below its actions, of which several may be under way at a time; empty: none is drawn"""

    @property
    def end_s(self) -> float:
        """End of the last bar."""
        return max((row[-1].end_s for row in self.rows if row), default=0.0)


def simulated(title: str, note: str, trace: StepTrace) -> Panel:
    """Return the panel of a simulated step."""
    rows = []
    for row, reduced_s, end_s in zip(trace.rows, trace.reduced_s, trace.ends_s, strict=True):
        bars = [Interval(action.kind.value, action.micro_batch, start_s, stop_s) for action, start_s, stop_s in row]
        if reduced_s > end_s:
            bars.append(Interval("reduce", -1, end_s, reduced_s))
        if trace.costs.optimizer_s:
            bars.append(Interval("optimizer", -1, trace.step_s - trace.costs.optimizer_s, trace.step_s))
        rows.append(tuple(bars))
    return Panel(title, note, tuple(rows))


def draw(title: str, panels: Sequence[Panel], *, notes: Sequence[str] = (), unit: str = "s") -> str:
    """Draw a picture of all panels over one time axis.

    Args:
        title: of the whole picture.
        panels: top to bottom.
        notes: lines below the title.
        unit: of the times, for the axis.
    """
    span_s = max((panel.end_s for panel in panels), default=0.0) or 1.0
    lanes = max(len(panel.rows) for panel in panels)
    lane = 22.0 if lanes <= 10 else 14.0 if lanes <= 24 else 10.0
    heights = [_TITLE + _lane(panel, lane) * len(panel.rows) for panel in panels]
    top = _TOP + _NOTE * len(notes)
    used = {bar.kind for panel in panels for row in (*panel.rows, *panel.strips) for bar in row}
    dense = any(_is_dense(row) for panel in panels for row in panel.rows)
    last = "shares of the time, stacked" if dense else "numbers: micro-batches"
    if any(panel.strips for panel in panels):
        last += "; white: idle"
    legend = list(_legend([name for name in _LOOKS if name in used], last))
    height = top + sum(heights) + _AXIS * len(panels) + _LEGEND + _LEGEND_LINE * max(line for line, *_ in legend)
    parts = [
        element("title", title, id="title"),
        f"<style>{_STYLE}</style>",
        element("rect", width=_WIDTH, height=height, rx=12, fill="#f6f7f9"),
        _text(24, 36, title, "bold"),
        *(_text(24, 58 + _NOTE * number, note, "soft") for number, note in enumerate(notes)),
    ]
    for panel, panel_height in zip(panels, heights, strict=True):
        parts += _panel(panel, top, _lane(panel, lane), span_s, unit)
        top += panel_height + _AXIS
    for line, left, colour, words in legend:
        y = top + 14 + _LEGEND_LINE * line
        if colour:
            parts.append(element("rect", x=left, y=y - 10, width=12, height=12, fill=colour))
        parts.append(_text(left + 18 * bool(colour), y, words, "soft"))
    attributes = {"role": "img", "aria_labelledby": "title", "font_family": "system-ui, sans-serif", "font_size": 14}
    return picture((_WIDTH, height), parts, **attributes)


def _panel(panel: Panel, top: float, lane: float, span_s: float, unit: str) -> Iterator[str]:
    def x(time_s: float) -> float:
        return _LEFT + time_s / span_s * (_RIGHT - _LEFT)

    lanes = top + _TITLE
    bottom = lanes + lane * len(panel.rows)
    end = x(panel.end_s)
    length = f"{_short(panel.end_s)} {unit}"
    yield (
        f'<text x="24" y="{top + 20:g}"><tspan class="bold">{escape(panel.title)}</tspan>'
        f'<tspan class="soft" dx="10">{escape(panel.note)}</tspan></text>'
    )
    for stage in range(len(panel.rows)):
        y = lanes + lane * stage
        yield element("rect", x=_LEFT, y=y + 1, width=_RIGHT - _LEFT, height=lane - 2, class_="lane")
        if lane > 12 or stage % 5 == 0:
            yield _text(_LEFT - 8, y + lane / 2 + 4, f"stage {stage}", "soft end")
    label_width = 7.5 * len(length)
    label = min(end, _RIGHT - label_width / 2 + 12)
    for tick_s in _ticks(span_s):
        yield element("path", d=f"M{x(tick_s):.1f} {lanes:g}V{bottom:g}", class_="grid")
        if abs(x(tick_s) - label) > label_width / 2 + 14:
            yield _text(x(tick_s), bottom + 16, f"{tick_s:g}", "soft mid")
    below = _STRIP * len(_STRIPS) if panel.strips else 0.0
    for stage, row in enumerate(panel.rows):
        yield from _bars(row, lanes + lane * stage + 1, lane - 2 - below, x)
    for stage, strip in enumerate(panel.strips):
        yield from _strip(strip, lanes + lane * (stage + 1) - 1 - below, x)
    yield element("path", d=f"M{end:.1f} {lanes - 4:g}V{bottom + 4:g}", class_="finish")
    yield _text(label, bottom + 16, length, "late mid")


def _bars(row: Sequence[Interval], y: float, height: float, x: Callable[[float], float]) -> Iterator[str]:
    """Draw one thick broken line for each kind of work, as there may be thousands of bars; numbers where they fit."""
    if _is_dense(row):
        yield from _shares(row, y, height, x)
        return
    middle = y + height / 2
    lines: dict[str, list[str]] = {}
    pens: dict[str, float] = {}
    numbers: list[str] = []
    for bar in row:
        left, right = round(x(bar.begin_s), 1), round(x(bar.end_s), 1)
        if right - left >= _SPACED_WIDTH:
            right -= 1
        line = lines.setdefault(bar.kind, [])
        line.append(f"m{left - pens[bar.kind]:.4g} 0" if line else f"M{left:g} {middle:g}")
        line.append(f"h{right - left:.4g}")
        pens[bar.kind] = right
        if right - left >= _LABEL_WIDTH and height >= 12 and bar.kind in _NUMBERED:
            kind = "number light" if bar.kind == "B" else "number"
            numbers.append(_text((left + right) / 2, middle + 3.5, str(bar.micro_batch), kind))
    for name, line in lines.items():
        yield element("path", d="".join(line), fill="none", stroke=_LOOKS[name][0], stroke_width=height)
    yield from numbers


def _lane(panel: Panel, lane: float) -> float:
    """Return the height of a stage."""
    return lane + _STRIP * len(_STRIPS) if panel.strips else lane


def _strip(strip: Sequence[Interval], y: float, x: Callable[[float], float]) -> Iterator[str]:
    """Draw a thin line for each kind; where several are under way, they cover each other."""
    for number, name in enumerate(_STRIPS):
        middle = y + _STRIP * (number + 0.5)
        spans = ((x(bar.begin_s), x(bar.end_s)) for bar in strip if bar.kind == name)
        line = "".join(f"M{left:.1f} {middle:g}H{max(right, left + 1):.1f}" for left, right in spans)
        if line:
            yield element("path", d=line, fill="none", stroke=_LOOKS[name][0], stroke_width=_STRIP - 1)


def _is_dense(row: Sequence[Interval]) -> bool:
    return len(row) > (_RIGHT - _LEFT) / _FINEST_WIDTH


def _shares(row: Sequence[Interval], y: float, height: float, x: Callable[[float], float]) -> Iterator[str]:
    """Draw stacked shares of the time by kind of work, where bars are too narrow to see; white above is idle."""
    count = int((_RIGHT - _LEFT) / _BUCKET_WIDTH)
    shares = {name: [0.0] * count for name in _LOOKS}
    for bar in row:
        start, end = ((x(time_s) - _LEFT) / _BUCKET_WIDTH for time_s in (bar.begin_s, bar.end_s))
        for bucket in range(int(start), min(int(end) + 1, count)):
            shares[bar.kind][bucket] += min(end, bucket + 1) - max(start, bucket)
    below = [0.0] * count
    for name, found in shares.items():
        above = [low + share for low, share in zip(below, found, strict=True)]
        spans = [
            (y + height - round(min(1.0, top) * height), round(min(1.0, top) * height) - round(low * height))
            for low, top in zip(below, above, strict=True)
        ]
        paths = []
        for (top, tall), run in groupby(range(count), key=spans.__getitem__):
            buckets = list(run)
            if tall:
                width = len(buckets) * _BUCKET_WIDTH
                paths.append(f"M{_LEFT + buckets[0] * _BUCKET_WIDTH:g} {top:g}h{width:g}v{tall:g}h-{width:g}z")
        if paths:
            yield element("path", d="".join(paths), fill=_LOOKS[name][0])
        below = above


def _ticks(span_s: float) -> Iterator[float]:
    """Return about eight round times for the axis."""
    step = round_up(span_s / 8)
    count = int(span_s / step)
    yield from (round(number * step, 12) for number in range(count + 1))


def _short(time_s: float) -> str:
    return f"{time_s:.4g}"


def _legend(names: Iterable[str], last: str) -> Iterator[tuple[int, float, str, str]]:
    """Line, left edge, colour (none for words alone) and words of each entry."""
    line, left = 0, _LEFT
    for colour, words in (*(_LOOKS[name] for name in names), ("", last)):
        width = 36 * bool(colour) + 6.4 * len(words)
        if left + width > _RIGHT and left > _LEFT:
            line, left = line + 1, _LEFT
        yield line, left, colour, words
        left += width


def _text(x: float, y: float, words: str, kind: str) -> str:
    return element("text", words, x=round(x, 1), y=round(y, 1), class_=kind)
