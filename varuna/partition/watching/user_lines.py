"""The line of the user's code that is running, and whether it adds values up over a loop."""

import ast
import inspect
import linecache
import sys
import sysconfig
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

from varuna.partition.watching.own_code import TORCH, VARUNA

_STDLIB = sysconfig.get_paths()["stdlib"] + "/"
_SHARED = VARUNA + "engine/stage/cross_stage.py"
_TRACING = VARUNA + "checks/dependencies/tags.py"
_UNKNOWN = "<unknown>"


class UserLine(NamedTuple):
    """A line of code outside torch and Varuna."""

    file: str
    line: int
    direct: bool
    """the line itself calls torch's tensor operation, not a function of torch that does"""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def place_of(code: Any) -> UserLine:
    """Line where a callable is defined; ``<unknown>`` for torch's own, and for what is not Python."""
    try:
        code = inspect.unwrap(code)
        code = getattr(code, "func", code)  # functools.partial
        file = inspect.getsourcefile(code) or _UNKNOWN
        line = inspect.getsourcelines(code)[1]
    except (TypeError, OSError):
        return UserLine(_UNKNOWN, 0, False)
    return UserLine(file, max(line, 1), False)


def at_place(code: Any) -> str:
    """``" at file:line"``, for a message; empty where the line is not known, as of objects that are called."""
    place = place_of(code)
    return f" at {place}" if place.line else ""


def user_place(otherwise: UserLine) -> UserLine:
    """The deepest frame outside torch and Varuna; ``otherwise`` where Varuna calls torch without one between."""
    frame: FrameType | None = sys._getframe(1)
    direct = True
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(VARUNA) and file != _SHARED:
            if file != _TRACING:
                break
        elif file.startswith(TORCH):
            direct &= file in _THIN
        elif not file.startswith("<") and file != _SHARED and not _is_stdlib(file):
            return UserLine(file, frame.f_lineno, direct)
        frame = frame.f_back
    return otherwise


_THIN = frozenset(
    TORCH + name
    for name in (
        "_tensor.py",
        "functional.py",
        "_ops.py",
        "_compile.py",
        "_dynamo/eval_frame.py",
        "utils/_python_dispatch.py",
    )
)
"""torch's own frames between a line and the dispatch mode that it reaches"""


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and "site-packages" not in file


@cache
def accumulates(place: UserLine) -> bool:
    """Return whether a line that takes a number out of a tensor seems to add it to those of other tensors.

    It does if its statement updates a name from itself (``total += x.item()``, ``worst = max(worst, x.item())``),
    collects in a comprehension or with ``append``, or names the value and the same loop does one of these with it.
    """
    tree = _parsed(place.file)
    if tree is None or not place.direct:
        return False
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr) and _spans(node, place.line)]
    if any(isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp) for node in around):
        return True
    simple = [node for node in around if isinstance(node, ast.stmt) and not _is_compound(node)]
    loops = [node for node in around if isinstance(node, ast.For | ast.While)]
    if any(_adds_up(statement, None) for statement in simple):
        return True
    named = {name.id for s in simple if isinstance(s, ast.Assign) for t in s.targets for name in _names(t)}
    inner = max(loops, key=lambda node: node.lineno, default=None)
    if inner is None or not named:
        return False
    return any(_adds_up(node, named) for node in ast.walk(inner) if isinstance(node, ast.stmt))


@cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _spans(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_compound(node: ast.stmt) -> bool:
    return hasattr(node, "body")


def _names(node: ast.AST) -> list[ast.Name]:
    return [name for name in ast.walk(node) if isinstance(name, ast.Name)]


def _adds_up(node: ast.stmt, using: set[str] | None) -> bool:
    """Return whether a statement updates a variable from itself, or appends; ``using``: with one of these names."""
    match node:
        case ast.AugAssign(target=target, value=value):
            grows = _is_common(target)
        case ast.Assign(targets=[target], value=value):
            grows = _is_common(target) and ast.dump(_read(target)) in {ast.dump(part) for part in ast.walk(value)}
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="append" | "add" | "extend")) as value):
            grows = True
        case _:
            return False
    return grows and (using is None or any(name.id in using for name in _names(value)))


def _is_common(target: ast.expr) -> bool:
    """A variable or attribute, or an entry under a constant key: not one entry per parameter."""
    return not isinstance(target, ast.Subscript) or isinstance(target.slice, ast.Constant)


def _read(target: ast.expr) -> ast.expr:
    """The expression that reads what ``target`` writes."""
    return ast.parse(ast.unparse(target), mode="eval").body
