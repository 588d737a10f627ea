"""Pictures as SVG text, without dependencies."""

import math
from collections.abc import Iterable, Sequence
from html import escape


def element(name: str, words: str | None = None, **attributes: object) -> str:
    """Return one element.

    Args:
        name: of the element.
        words: its text, which is escaped; None: it is empty.
        attributes: ``stroke_width`` is written stroke-width, ``class_`` class; floats get at most two decimals.
    """
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{written}/>" if words is None else f"<{name}{written}>{escape(words)}</{name}>"


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", **more: object) -> str:
    """Draw words at a place, of a size in pixels; ``anchor``: start, middle or end of them is there."""
    return element("text", words, x=x, y=y, font_size=size, text_anchor=anchor, **more)


def line(begin: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1.0, **more: object) -> str:
    """Draw a straight line between two places."""
    (x1, y1), (x2, y2) = begin, end
    return element("line", None, x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width, **more)


def round_up(value: float, times: Sequence[float] = (1, 2, 5)) -> float:
    """Return the least of ``times`` (in [1, 10)), or 10, by a power of ten that is at least ``value``; 0 for 0."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (*times, 10, 100) if each * power >= value * (1 - 1e-9))


def picture(size: tuple[float, float], parts: Iterable[str], **attributes: object) -> str:
    """Draw a whole picture of ``parts``, of a width and height in pixels."""
    box = f"0 0 {size[0]:g} {size[1]:g}"
    opened = element("svg", "", xmlns="http://www.w3.org/2000/svg", viewBox=box, **attributes)
    return "\n".join([opened.removesuffix("</svg>"), *parts, "</svg>"]) + "\n"


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))
