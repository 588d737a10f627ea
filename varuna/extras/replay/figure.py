"""A picture like the paper's 60-hour figure: examples/s and examples/s per GPU over time, with the plans."""

from collections.abc import Sequence

from varuna.extras.pictures.svg import element, line, picture, round_up, text
from varuna.extras.replay.report import ReplayOutcome, Stretch

_WIDTH, _HEIGHT = 1200, 640
_LEFT, _RIGHT = 70, 20
_PANELS = ((54, 300), (360, 570))  # top and bottom of each, pixels
_LABEL_PX = 26  # least distance of two plan labels
_QUARTERED = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 4.8, 6, 8)  # a quarter of each is round
_INK, _GRID, _TOTAL, _PER_GPU, _MARK = "#222222", "#dddddd", "#1f5fa8", "#b3541e", "#6b6b6b"


def draw(outcome: ReplayOutcome, gpus_per_node: int, title: str) -> str:
    """Draw SVG text: plans where they begin, ``p`` where a replacement kept the plan, and ticks for checkpoints."""
    scale = _LEFT, (_WIDTH - _LEFT - _RIGHT) / max(outcome.duration_s, 1e-9)
    trained = [stretch for stretch in outcome.stretches if stretch.plan is not None]
    totals = [(s.begin_s, s.end_s, _rate(s)) for s in trained]
    shares = [(s.begin_s, s.end_s, _rate(s) / max(1, s.nodes * gpus_per_node)) for s in trained]
    parts = [
        element("rect", width=_WIDTH, height=_HEIGHT, fill="white"),
        text(_LEFT, 22, title, size=15),
        *_panel(totals, _PANELS[0], scale, outcome.duration_s, "examples/s", _TOTAL),
        *_labels(trained, _PANELS[0], scale),
        *_ticks(outcome.checkpoints_s, _PANELS[0][1], scale),
        *_panel(shares, _PANELS[1], scale, outcome.duration_s, "examples/s per GPU", _PER_GPU),
        text(
            _LEFT,
            605,
            "Gaps: morphs, lost steps, or no plan fits. p: the same plan on other workers. "
            "Ticks under the upper panel: checkpoints.",
        ),
        text(_LEFT, 625, _summary(outcome)),
    ]
    attributes = {"width": _WIDTH, "height": _HEIGHT, "font_family": "sans-serif", "font_size": 12, "fill": _INK}
    return picture((_WIDTH, _HEIGHT), parts, **attributes)


def _rate(stretch: Stretch) -> float:
    """Return the examples per second of a stretch's plan."""
    assert stretch.plan is not None
    return stretch.plan.global_batch / stretch.plan.step_s if stretch.plan.step_s else 0.0


def _summary(outcome: ReplayOutcome) -> str:
    morphs = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.morphs.items()))
    return (
        f"M = {outcome.global_batch}, m = {outcome.micro_batch}, {outcome.samples:,} examples, goodput "
        f"{100 * outcome.goodput:.1f} % of instant lossless morphs; {morphs}"
    )


def _panel(
    bars: Sequence[tuple[float, float, float]],
    edges: tuple[int, int],
    scale: tuple[float, float],
    duration_s: float,
    title: str,
    colour: str,
) -> list[str]:
    """Draw axes, grid, and a step line with a filled area."""
    (top, bottom), (left, per_s) = edges, scale
    most = round_up(max((value for _, _, value in bars), default=0.0), _QUARTERED) or 1.0
    right = left + duration_s * per_s
    parts = []
    for i in range(5):
        y = bottom - (bottom - top) * i / 4
        parts.append(line((left, y), (right, y), _GRID))
        parts.append(text(left - 8, y + 4, f"{most * i / 4:.4g}", anchor="end"))
    hours = duration_s / 3600.0
    every = next((step for step in (0.25, 0.5, 1, 2, 4, 6, 12, 24) if hours / step <= 14), 48)
    for i in range(int(hours / every) + 1):
        x = left + i * every * 3600.0 * per_s
        parts.append(line((x, bottom), (x, bottom + 5), _INK))
        parts.append(text(x, bottom + 20, f"{i * every:g} h", anchor="middle"))
    for begin_s, end_s, value in bars:
        x, width = left + begin_s * per_s, (end_s - begin_s) * per_s
        height = (bottom - top) * value / most
        y = bottom - height
        parts.append(element("rect", x=x, y=y, width=width, height=height, fill=colour, fill_opacity=0.25))
        parts.append(line((x, y), (x + width, y), colour, 1.6))
    y = (top + bottom) / 2
    turned = f"rotate(-90 16 {y:.0f})"
    parts.append(element("text", title, x=16, y=y, transform=turned, text_anchor="middle", fill=colour))
    return parts


def _labels(trained: Sequence[Stretch], edges: tuple[int, int], scale: tuple[float, float]) -> list[str]:
    """Write plans above the panel where there is room: the longest stretches first."""
    (top, _), (left, per_s) = edges, scale
    parts: list[str] = []
    taken: list[float] = []
    changes = [(stretch, before) for before, stretch in zip([None, *trained], trained, strict=False)]
    for stretch, before in sorted(changes, key=lambda pair: pair[0].begin_s - pair[0].end_s):
        assert stretch.plan is not None
        x = left + stretch.begin_s * per_s
        if any(abs(x - other) < _LABEL_PX / 2 for other in taken):
            continue
        taken.append(x)
        same = before is not None and before.plan == stretch.plan
        label = "p" if same else stretch.plan.shape
        turned = f"rotate(-45 {x + 3:.1f} {top - 4})"
        parts.append(element("text", label, x=x + 3, y=top - 4, font_size=10, fill=_MARK, transform=turned))
        parts.append(line((x, top - 4), (x, top + 4), _MARK))
    return parts


def _ticks(moments_s: Sequence[float], y: int, scale: tuple[float, float]) -> list[str]:
    """Draw short marks below the axis, one a pixel at most."""
    left, per_s = scale
    columns = sorted({round(left + moment * per_s) for moment in moments_s})
    return [line((x, y + 24), (x, y + 30), _MARK) for x in columns]
