"""The picture of `benchmarks/same_run.py`: two losses, plans as bands, and what was done to the workers. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from varuna.extras.pictures.svg import element, picture
from varuna.observe.report import largest_relative_difference

Act = Literal["kill", "freeze", "start"]
_Scale = Callable[[float], float]
ACTS: tuple[Act, ...] = ("kill", "freeze", "start")

WIDTH, LEFT, RIGHT = 820.0, 54.0, 16.0
TOP, CURVE, MARKS, BANDS, BOTTOM = 46.0, 250.0, 26.0, 44.0, 74.0
_COLOURS = {1: "#9ecae1", 2: "#a1d99b", 3: "#fdd0a2", 4: "#dadaeb", 5: "#fdae6b"}
"""By P, readable in grey and by most kinds of colour blindness, since each band also says its plan."""
_ACT = {"kill": "#b2182b", "freeze": "#2166ac", "start": "#1b7837"}
_NAMES = {"kill": "killed", "freeze": "frozen", "start": "started"}


class Span(NamedTuple):
    """Steps that a plan ran, up to the next span."""

    first_step: int
    stages: int
    replicas: int


def draw(
    losses: Sequence[float], reference: Sequence[float], spans: Sequence[Span], acts: Sequence[tuple[int, Act]]
) -> str:
    """The picture as SVG.

    Args:
        losses: of the disturbed run, by step.
        reference: of one process.
        spans: in the order of time; one that begins before its predecessor did undid steps.
        acts: what was done after which step.
    """
    steps = len(losses)
    low, high = min(*losses, *reference), max(*losses, *reference)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, steps - 1)

    def y(loss: float) -> float:
        return TOP + CURVE * (high - loss) / ((high - low) or 1.0)

    parts = [
        element("rect", width="100%", height="100%", fill="white"),
        element("text", f"The same training, undisturbed and disturbed {len(acts)} times", x=LEFT, y=24, font_size=16),
        *_axes(x, y, steps, low, high),
        element("polyline", points=_points(x, y, reference), fill="none", stroke="#9e9e9e", stroke_width=7),
        element("polyline", points=_points(x, y, losses), fill="none", stroke="#111111", stroke_width=1.6),
        *_legend(),
        *_marks(x, acts),
        *_bands(x, steps, spans),
        *_caption(losses, reference, spans, acts),
    ]
    height = TOP + CURVE + MARKS + BANDS + BOTTOM + 26
    return picture((WIDTH, height), parts, font_family="sans-serif", font_size=12.5)


def _points(x: _Scale, y: _Scale, losses: Sequence[float]) -> str:
    return " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))


def _axes(x: _Scale, y: _Scale, steps: int, low: float, high: float) -> Iterator[str]:
    for tick in range(int(low) + (low > int(low)), int(high) + 1):
        yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), stroke="#e4e4e4")
        yield element("text", str(tick), x=LEFT - 8, y=y(tick) + 4, text_anchor="end")
    yield element("text", "loss", x=LEFT - 8, y=TOP - 8, text_anchor="end")
    bottom = TOP + CURVE + MARKS + BANDS + 18
    apart = next(each for each in (10, 20, 40, 50, 100, 200, 500, 1000, 10**9) if steps / each <= 8)
    for tick in range(0, steps, apart):
        yield element("text", f"step {tick}" if tick == 0 else str(tick), x=x(tick), y=bottom, text_anchor="middle")


def _legend() -> Iterator[str]:
    right = WIDTH - RIGHT - 330
    for row, (colour, width, text) in enumerate(
        (("#9e9e9e", 7, "one process, plain PyTorch"), ("#111111", 1.6, "Varuna, while workers are lost and come"))
    ):
        top = TOP + 20 + 22 * row
        yield element("line", x1=right, x2=right + 36, y1=top, y2=top, stroke=colour, stroke_width=width)
        yield element("text", text, x=right + 46, y=top + 4)
    for column, act in enumerate(ACTS):
        left = right + 46 + 92 * column
        yield _sign(act, left + 4, TOP + 64)
        yield element("text", _NAMES[act], x=left + 14, y=TOP + 68)


def _marks(x: _Scale, acts: Sequence[tuple[int, Act]]) -> Iterator[str]:
    top = TOP + CURVE + MARKS / 2 + 4
    for step, act in acts:
        yield _sign(act, x(step), top)


def _sign(act: Act, left: float, top: float) -> str:
    """A cross for a kill, bars for a freeze, a triangle for a start."""
    colour, size = _ACT[act], 5.0
    if act == "kill":
        path = f"M{left - size:.1f} {top - size:.1f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
    elif act == "freeze":
        path = f"M{left - 3:.1f} {top - size:.1f}v{2 * size}m6 0v{-2 * size}"
    else:
        path = f"M{left:.1f} {top - size:.1f}l{size} {2 * size}h{-2 * size}z"
    fill = colour if act == "start" else "none"
    return element("path", d=path, stroke=colour, stroke_width=1.0 if act == "start" else 2.2, fill=fill)


def _bands(x: _Scale, steps: int, spans: Sequence[Span]) -> Iterator[str]:
    top = TOP + CURVE + MARKS
    for number, span in enumerate(spans):
        begin = span.first_step
        end = min((later.first_step for later in spans[number + 1 :]), default=steps)
        if end <= begin:
            continue  # all its steps were undone
        left, right = x(begin - 0.5 if begin else 0), x(min(end - 0.5, steps - 1))
        yield element(
            "rect",
            x=left,
            y=top,
            width=right - left,
            height=BANDS - 8,
            fill=_COLOURS.get(span.stages, "#cccccc"),
            stroke="white",
            stroke_width=0.8,
        )
        if right - left > 24:
            middle, line = (left + right) / 2, top + (BANDS - 8) / 2 + 4
            yield element(
                "text", f"{span.stages}x{span.replicas}", x=middle, y=line, text_anchor="middle", font_size=11
            )


def _caption(
    losses: Sequence[float], reference: Sequence[float], spans: Sequence[Span], acts: Sequence[tuple[int, Act]]
) -> Iterator[str]:
    counts = ", ".join(f"{sum(each == act for _, each in acts)} {_NAMES[act]}" for act in ACTS)
    difference = largest_relative_difference(list(losses), list(reference))
    lines = (
        f"GPT-2 on real text. Workers: {counts}; {len(spans) - 1} changes of plan (bands: stages x replicas).",
        f"Largest relative difference between the two losses over {len(losses)} steps: {difference:.1e}.",
    )
    for row, text in enumerate(lines):
        yield element("text", text, x=LEFT, y=TOP + CURVE + MARKS + BANDS + 46 + 20 * row)
