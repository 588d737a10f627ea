"""Draws docs/live-bytes.svg: the bytes that would cross a cut along GPT-2 (small), and where Varuna cuts.

python benchmarks/draw_live_bytes.py [--output docs/live-bytes.svg]
"""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from varuna.partition.capture.capture import Recipe
from varuna.partition.cut.cuts import choose_cuts
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.model import partition

LENGTH = 1024
ZOOMED = "transformer.h.5"
MIB = 2**20

WIDTH, HEIGHT = 960, 662
LEFT, RIGHT = 70, 936
TOP_PANEL = (84, 276)
BOTTOM_PANEL = (372, 532)
STYLE = """
    text { fill: #1c2430; } .soft { fill: #5d6878; font-size: 12px; } .bold { font-weight: 600; }
    .mid { text-anchor: middle; } .end { text-anchor: end; } .grid { stroke: #dde3ea; } .axis { stroke: #7d8998; }
    .curve { fill: none; stroke: #4a76a8; stroke-width: 1.6; } .area { fill: #cfe3fb; } .bar { fill: #9fc3ec; }
    .cut { fill: #d9731a; } .mark { stroke: #d9731a; stroke-width: 1.5; stroke-dasharray: 4 3; } .hot { fill: #b3570c; }
    .zoom { fill: #fde5c8; }
"""


@dataclass(frozen=True)
class Point:
    """One op: what a cut after it would cost."""

    name: str
    module: str
    start: float
    """share of the model's compute in front of it"""
    end: float
    live_bytes: float | None
    cut: bool


def build() -> Any:
    """GPT-2 small with default flags."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0))


def measure() -> list[Point]:
    """Capture the model; one point for each op of its graph."""
    points: list[Point] = []

    def choose(flow: Flow, costs: Sequence[Cost]) -> list[int]:
        seconds, live = [cost.forward_s for cost in costs], flow.live_bytes()
        cuts = choose_cuts(seconds, live, layers=flow.layers())
        ends = list(accumulate(seconds))
        for i, node in enumerate(flow.ops):
            stack = node.meta.get("nn_module_stack") or {"": ("",)}
            module = str(list(stack.values())[-1][0]).partition(".")[2]
            start = ends[i - 1] if i else 0.0
            points.append(Point(node.name, module, start / ends[-1], ends[i] / ends[-1], live[i], i in cuts))
        return cuts

    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    partition(Recipe(build), {"input_ids": tokens, "labels": tokens}, choose=choose)
    return points


def text(x: float, y: float, words: str, kind: str = "soft") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def whole(points: Sequence[Point]) -> list[str]:
    """The upper panel: the curve over the whole model, logarithmic."""
    top, bottom = TOP_PANEL
    low, high = 1.0, 256.0

    def x(share: float) -> float:
        return LEFT + share * (RIGHT - LEFT)

    def y(live_bytes: float) -> float:
        height = math.log(max(live_bytes / MIB, low) / low) / math.log(high / low)
        return bottom - height * (bottom - top)

    inside = [p for p in points if p.module == ZOOMED or p.module.startswith(f"{ZOOMED}.")]
    left, right = x(inside[0].start), x(inside[-1].end)
    drawn = [f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{bottom - top}" class="zoom"/>']
    for tick in (1, 4, 16, 64, 256):
        drawn += [line(LEFT, y(tick * MIB), RIGHT, y(tick * MIB), "grid")]
        drawn += [text(LEFT - 8, y(tick * MIB) + 4, f"{tick} MiB", "soft end")]
    drawn += [text(x(share / 4), bottom + 18, f"{25 * share} %", "soft mid") for share in range(5)]
    known = [(p, p.live_bytes) for p in points if p.live_bytes is not None and p.end > p.start]
    path = " ".join(f"L{x(p.start):.1f} {y(size):.1f} L{x(p.end):.1f} {y(size):.1f}" for p, size in known)
    drawn.append(f'<path d="M{LEFT} {bottom} {path} L{RIGHT} {bottom} z" class="area"/>')
    drawn.append(f'<path d="M{LEFT} {bottom} {path}" class="curve"/>')
    cuts = [p for p in points if p.cut and p.live_bytes is not None]
    drawn += [f'<circle cx="{x(p.end):.1f}" cy="{y(p.live_bytes or 0):.1f}" r="3.4" class="cut"/>' for p in cuts]
    sizes = sorted({(p.live_bytes or 0) / MIB for p in cuts})
    crossing = " or ".join(f"{size:g} MiB" for size in sizes)
    drawn.append(text(LEFT, 64, f"{len(cuts)} cuts; across each go {crossing} per sample, the residual stream", "hot"))
    widest = max(known, key=lambda pair: pair[1])
    drawn.append(text(x(widest[0].start) - 6, y(widest[1]) + 4, f"logits: {widest[1] / MIB:.0f} MiB", "soft end"))
    drawn.append(text((LEFT + RIGHT) / 2, bottom + 36, "share of the model's compute that lies in front", "soft mid"))
    return drawn


def zoomed(points: Sequence[Point]) -> list[str]:
    """The lower panel: one layer, a bar for each op that computes."""
    top, bottom = BOTTOM_PANEL
    inside = [p for p in points if p.module == ZOOMED or p.module.startswith(f"{ZOOMED}.")]
    first = points.index(inside[0])
    before = next(p for p in reversed(points[:first]) if p.end > p.start)
    shown = [before, *(p for p in inside if p.end > p.start)]
    high = 40.0 * MIB
    drawn = []
    for tick in (0, 10, 20, 30, 40):
        y = bottom - tick * MIB / high * (bottom - top)
        drawn += [line(LEFT, y, RIGHT, y, "grid"), text(LEFT - 8, y + 4, f"{tick} MiB", "soft end")]
    step = (RIGHT - LEFT) / len(shown)
    for number, point in enumerate(shown):
        size = point.live_bytes or 0.0
        x, y = LEFT + number * step, bottom - size / high * (bottom - top)
        kind = "cut" if point.cut else "bar"
        drawn.append(
            f'<rect x="{x + 4:.1f}" y="{y:.1f}" width="{step - 8:.1f}" height="{bottom - y:.1f}" class="{kind}"/>'
        )
        drawn.append(text(x + step / 2, y - 5, f"{size / MIB:g}", "hot mid" if point.cut else "soft mid"))
        if point.cut:
            drawn.append(line(x + step, top, x + step, bottom, "mark"))
        name = f"{point.module.removeprefix(ZOOMED).strip('.')} {_op(point.name)}".strip()
        name = "layer before: add" if point is before else name
        drawn.append(
            f'<text transform="translate({x + step / 2 + 4:.1f} {bottom + 14}) rotate(-38)" '
            f'class="{"hot" if point.cut else "soft"} end" font-size="11">{name}</text>'
        )
    drawn.append(line(LEFT, bottom, RIGHT, bottom, "axis"))
    return drawn


def _op(name: str) -> str:
    """``addmm_21`` -> ``addmm``."""
    stem, _, number = name.rpartition("_")
    short = stem if number.isdigit() else name
    return short.replace("scaled_dot_product_attention", "sdpa")


def draw(points: Sequence[Point]) -> str:
    """The whole picture."""
    title = f"Live bytes along GPT-2 (124 M parameters, {LENGTH} tokens)"
    about = "Bytes that a cut after each op would have to send; cut-points are the valleys, two in each layer."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="14">',
        f'<title id="title">{title}</title><desc id="desc">{about}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#f6f7f9"/>',
        text(24, 36, f"{title}: what a cut at each place would send", "bold"),
        *whole(points),
        text(24, 350, f"One layer, {ZOOMED} (shaded above): live bytes after each op that computes", "bold"),
        *zoomed(points),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Capture, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[1] / "docs" / "live-bytes.svg"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    options.output.write_text(draw(measure()))
    print(options.output)


if __name__ == "__main__":
    main()
