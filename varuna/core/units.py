"""Sizes and durations as people write and read them."""

import re

from varuna.core.errors import UsageError

_BYTES_PER = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_ENDLESS_STEPS = 10**8
"""More than any run makes: ``steps(10**9)`` means until the loop breaks."""
_FAR_S = 30 * 86400.0
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_bytes(text: str, source: str = "") -> int:
    """Read ``"1.5GiB"``, ``"300 MB"`` or ``"4096"`` as a positive number of bytes.

    Args:
        text: the size.
        source: flag or variable that it comes from, for the message.

    Raises:
        UsageError: the text is not a size, or not above zero.
    """
    match = _SIZE.fullmatch(text)
    size_bytes = int(float(match[1]) * _BYTES_PER[(match[2] or "").lower()]) if match else 0
    if size_bytes <= 0:
        found = f"{source}={text}" if source else repr(text)
        raise UsageError(f"{found} is not a size. Write a number with a unit, such as 1.5GiB or 300MB.")
    return size_bytes


def format_bytes(size_bytes: float) -> str:
    """Write three significant digits with a binary unit: ``"1.50 GiB"``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def format_duration(duration_s: float) -> str:
    """Write milliseconds below a second, then seconds, minutes and hours: ``"1m 40s"``."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"


def format_dollars(dollars: float) -> str:
    """Write cents, and below a tenth of a dollar more: ``"$12.40"``, ``"$0.0031"``."""
    return f"${dollars:.4f}" if 0 < abs(dollars) < 0.1 else f"${dollars:,.2f}"


def format_rate(per_s: float) -> str:
    """Write three digits with k or M: ``"41.2k"``."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if per_s >= factor:
            return f"{per_s / factor:.3g}{unit}"
    return f"{per_s:.3g}"


def format_line(bits_per_s: float) -> str:
    """Write ``"9.41 Gb/s"``: networks are sold in bits."""
    for factor, unit in ((1e9, "Gb/s"), (1e6, "Mb/s")):
        if bits_per_s >= factor:
            return f"{bits_per_s / factor:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kb/s"


def counted(number: int, noun: str) -> str:
    """Write ``"1 worker"``, ``"1,200 steps"``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def step_number(step: int, total: int | None) -> str:
    """Write step 11 of 48 as ``"12/48"``, since steps count from 0; only ``"12"`` where the loop ends by itself."""
    return f"{step + 1}/{total}" if total and total < _ENDLESS_STEPS else f"{step + 1}"


def time_left(left_s: float) -> str:
    """Write the end of a progress line: ``"  40 s left"``; empty at the end, or if that is more than a month off."""
    if not 0 < left_s <= _FAR_S:
        return ""
    return f"  {max(1.0, left_s):.0f} s left" if left_s < 60 else f"  {format_duration(left_s)} left"
