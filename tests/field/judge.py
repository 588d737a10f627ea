"""Verdicts: the column to which a job belongs, from what plain PyTorch and Varuna did. Nothing here runs anything."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE = 1e-5
"""Relative; of losses and gradient norms over three steps."""
_NOISE = 3.0
"""A model that amplifies rounding (a ReLU or a maximum that flips) may differ by so many times what plain PyTorch makes
of parameters that are off by 3e-6; the loss of the first step, which nothing has amplified yet, by ``TOLERANCE``
or what such parameters make of it."""
_NOISY = 1e-3

RIGHT, REFUSED, POOR, WRONG, HANG, CRASH, NOTHING = (
    "right",
    "refused",
    "refused poorly",
    "wrong",
    "hang",
    "crash",
    "no reference",
)
COLUMNS = (RIGHT, REFUSED, POOR, WRONG, HANG, CRASH, NOTHING)
BAD = (WRONG, HANG, CRASH)
_PLANS = ("1x1", "3x1", "2x2")
"""Plans that are tried unless the capture told of others."""

_PRIVATE = re.compile(
    r"lifted_tensor|\b[su]\d{1,3}\b|\w*Guard(On)?[A-Z]\w*|torch\._\w+|FakeTensor|[Ff]ake ?mode|SymInt|\baten[.:]\w+|"
    r"internal error|Traceback|0x[0-9a-f]{6,}|dynamo|AOTAutograd|ProxyTorch|prims\.|unbacked|val_\d+|getitem_\d+"
)
_PLACE = re.compile(r"[\w./-]+\.py:\d+|\w=|'[^']+'|`[^`]+`|\b[a-z_]\w*(\.\w+){2,}")
"""A line, an argument, a name that is quoted, or that of a module or of what it holds."""
_WAY_OUT = re.compile(
    r"\b(pass|give|use|set|leave|lower|raise|write|compute|make|create|move|remove|replace|return|start|train|wrap|keep|"
    r"assign|register|declare|load|turn|call|put|detach|freeze|split|change|choose|switch|build|do|try|drop|name|see|"
    r"needs?|report|take)\b",
    re.IGNORECASE,
)
_SHORT = 40

_HERE = re.compile(r"/\S*/(?=site-packages/|tests/field/|varuna/)|/\S*/\.field/")
"""Folders of the machine of a sweep."""

Curve = Sequence[Sequence[float]]


def parts_of(found: Mapping[str, Any]) -> tuple[str, ...]:
    """List the parts of an attempt, in order: the capture, then its plans."""
    return ("capture", *found.get("capture", {}).get("plans", _PLANS))


def flaw_of(message: str) -> str:
    """Say why a refusal does not help its reader; empty if it does."""
    if found := _PRIVATE.search(message):
        return f"names something inside torch: {found.group(0)}"
    if len(message) < _SHORT:
        return "says too little"
    if not _PLACE.search(message):
        return "names neither a place nor an argument"
    if not _WAY_OUT.search(message):
        return "says no way out"
    return ""


def asks_for(argument: str, found: Mapping[str, Any]) -> str:
    """The refusal, if it says well that the model can be trained with this argument; else nothing."""
    failures = [found[part]["failure"] for part in parts_of(found) if "failure" in found.get(part, {})]
    if not failures or not failures[0]["intended"] or flaw_of(failures[0]["message"]):
        return ""
    message: str = failures[0]["message"]
    return message if re.search(rf"\b{argument}=(?!\[)", message) else ""


def placed(message: str) -> str:
    """The message, with places below the libraries' folders and ours, wherever those lie."""
    return _HERE.sub("", message)


def number_named(argument: str, message: str) -> int | None:
    """Return the value that a message asks to pass, as in "pass cut=4"."""
    found = re.search(rf"[Pp]ass {argument}=(\d+)", message)
    return int(found.group(1)) if found else None


def tolerance(noise: float) -> float:
    """Return the distance that losses and gradient norms may have from plain PyTorch's."""
    return max(TOLERANCE, _NOISE * noise)


def difference(one: Curve, other: Curve) -> float:
    """Largest relative difference of two curves; infinite where a number is not finite."""
    worst = 0.0
    for x, y in zip(one, other, strict=True):
        for a, b in zip(x, y, strict=True):
            off = abs(a - b) / max(abs(b), 1e-6)
            worst = max(worst, off) if off == off else float("inf")
    return worst


def column_of(reference: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, str]:
    """Column and reason.

    Args:
        reference: ``curve``, ``noise``, ``first_noise`` and ``draws`` of plain PyTorch.
        found: ``capture`` and the plans, each with a ``curve`` or a ``failure``, or ``stuck`` for so many seconds;
            ``timeout`` where all of it was killed.
    """
    for part in parts_of(found):
        if part not in found:
            return _unfinished(part, found)
        if waited := found[part].get("stuck"):
            return HANG, f"{part}: not done after {waited:.0f} s: {found.get('stack', '')}"
        if failure := found[part].get("failure"):
            return _failed(part, failure)
    _, *plans = parts_of(found)
    column, reason = _compared(reference, plans, [found[plan]["curve"] for plan in plans])
    if column == RIGHT and len(plans) > 1 and plans[1] != _PLANS[1]:
        fewer = f"has {found['capture']['sections']} sections: {plans[1]} in place of {_PLANS[1]}"
        reason = f"{reason}; {fewer}" if reason else fewer
    return column, reason


def _compared(reference: Mapping[str, Any], plans: Sequence[str], curves: Sequence[Curve]) -> tuple[str, str]:
    """The first plan is compared with plain PyTorch, and the others with it: to the bit, but for sums over replicas."""
    (first, *others), (one, *rest) = plans, curves
    most = tolerance(reference["noise"])
    for plan, curve in zip(others, rest, strict=True):
        apart = difference(curve, one)
        if curve != one if plan.endswith("x1") else not apart <= most:
            return WRONG, f"{plan} differs from {first} by {apart:.1e}"
    if reference["draws"]:
        return RIGHT, "draws at random: plans are compared with each other only"
    expected = reference["curve"]
    if not (apart := difference([one[0][:1]], [expected[0][:1]])) <= max(TOLERANCE, reference["first_noise"]):
        return WRONG, f"the first loss of {first} differs from plain PyTorch by {apart:.1e}"
    if not (apart := difference(one, expected)) <= most:
        return WRONG, f"{first} differs from plain PyTorch by {apart:.1e} (allowed: {most:.0e})"
    return RIGHT, f"rounding alone moves it by {reference['noise']:.0e}" if reference["noise"] > _NOISY else ""


def _unfinished(part: str, found: Mapping[str, Any]) -> tuple[str, str]:
    if waited := found.get("timeout"):
        does = "computes" if found.get("cpu_s", 0.0) > 0.1 * waited else "waits"
        return HANG, f"{part}: still {does} after {waited:.0f} s: {found.get('stack', '')}"
    return CRASH, f"{part}: {found.get('died') or 'died without a word'}"


def _failed(part: str, failure: Mapping[str, Any]) -> tuple[str, str]:
    message = f"{part}: {failure['kind']}: {' '.join(failure['message'].split())}"
    if not failure["intended"]:
        return CRASH, f"{message} ({failure['where']})"
    if failure["kind"] == "LinkError":
        return HANG, message
    flaw = flaw_of(failure["message"])
    return (POOR, f"{message} [{flaw}]") if flaw else (REFUSED, message)
