"""Pictures as SVG text, without dependencies."""

from collections.abc import Iterable
from html import escape


def element(name: str, words: str | None = None, **attributes: object) -> str:
    """One element.

    Args:
        name: of the element.
        words: its text, which is escaped; None: it is empty.
        attributes: ``stroke_width`` is written stroke-width, ``class_`` class; floats get at most two decimals.
    """
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{written}/>" if words is None else f"<{name}{written}>{escape(words)}</{name}>"


def picture(size: tuple[float, float], parts: Iterable[str], **attributes: object) -> str:
    """A whole picture of ``parts``, of a width and height in pixels."""
    box = f"0 0 {size[0]:g} {size[1]:g}"
    opened = element("svg", "", xmlns="http://www.w3.org/2000/svg", viewBox=box, **attributes)
    return "\n".join([opened.removesuffix("</svg>"), *parts, "</svg>"]) + "\n"


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))
