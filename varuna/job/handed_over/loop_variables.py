"""Variables that the script's loop takes from one turn into the next: a count, a best loss. No checkpoint has them.

They are found in its bytecode, in functions that it calls, and in methods of objects that it uses. A turn that writes a
variable before it reads it takes nothing from the one before. Lists and dicts, to which most loops add what they show,
are left out.
"""

import dis
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from varuna.job.handed_over.code_reads import is_library
from varuna.job.handed_over.marks import PLAIN
from varuna.partition.watching.own_code import OWN
from varuna.process.console import note

_VARIABLES = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)")

_JUMPS, _ENDS = frozenset((*dis.hasjrel, *dis.hasjabs)), ("RETURN", "RAISE", "RERAISE")


def say_begun_anew(step: int, frame: FrameType | None, kept: Iterable[Any]) -> None:
    """Say which such variables a resumed run does not have, before its loop gets ``step``."""
    if names := carried_names(frame, kept):
        note(
            f"the run goes on with step {step}, and the loop begins with its own {', '.join(names)} as the script has "
            f"made {'them' if names[1:] else 'it'}. What training follows from belongs in a dict, or in an object with "
            'state_dict() and load_state_dict(), that state= names: state={"best": best}.'
        )


def carried_names(frame: FrameType | None, but: Iterable[Any]) -> list[str]:
    """Return names of such variables, and of such attributes of objects that the loop uses; none of a library's loop.

    Args:
        frame: of the loop, or of what iterates for it, such as a progress bar.
        but: objects whose state is saved.
    """
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not _is_users(frame.f_code):
        return []
    body = _around(frame.f_code, frame.f_lasti)
    scope = {**frame.f_globals, **frame.f_locals}
    read, plain = _read_and_carried(body, scope)
    found = [name for name in plain if _is_read_first(name, body)]
    return [*found, *_inside(read, scope, body, {id(each) for each in but})]


def _read_and_carried(body: list[dis.Instruction], scope: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Variables of a scope that are read, and those of them with plain values that are written, too."""
    uses = dict.fromkeys(each for step in body for each in _uses(step))
    read = [name for kind, name in uses if kind == "LOAD" and name in scope]
    return read, [name for name in read if ("STORE", name) in uses and isinstance(scope[name], (*PLAIN, Tensor))]


def _inside(
    names: Iterable[str], scope: Mapping[str, Any], body: list[dis.Instruction], seen: set[int]
) -> Iterator[str]:
    """Yield what is carried by objects of these names, and around functions of these names."""
    for name in names:
        value = scope[name].__self__ if isinstance(scope[name], types.MethodType) else scope[name]
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            if _is_users(value.__code__):
                steps, around = list(dis.get_instructions(value)), _around_function(value)
                read, plain = _read_and_carried(steps, around)
                yield from plain
                yield from _inside(read, around, steps, seen)
        else:
            yield from (f"{name}.{key}" for key in _kept_by(value, body))


def _around_function(function: types.FunctionType) -> dict[str, Any]:
    """Variables that a function has from outside."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    free = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    return {name: each for name, each in {**function.__globals__, **free}.items() if name not in own}


def _is_users(code: types.CodeType) -> bool:
    return not is_library(code.co_filename) and not code.co_filename.startswith(OWN)


def _around(code: types.CodeType, place: int) -> list[dis.Instruction]:
    """Return the instructions of the innermost loop around a place."""
    steps = list(dis.get_instructions(code))
    # every jump to an earlier offset that spans the place closes a loop around it: the latest target is the innermost
    back = [(s.argval, s.offset) for s in steps if "JUMP" in s.opname and isinstance(s.argval, int)]
    loops = [(begin, end) for begin, end in back if begin <= place <= end]
    innermost = max((begin for begin, _ in loops), default=0)
    last = max((end for begin, end in loops if begin == innermost), default=-1)
    return [step for step in steps if innermost <= step.offset <= last]


def _uses(step: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Yield what an instruction does to which variables; newer Pythons fuse two of them."""
    if kinds := _VARIABLES.match(step.opname):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        yield from zip(re.findall("LOAD|STORE", step.opname) or [kinds[1]], names, strict=False)


def _is_read_first(name: str, body: list[dis.Instruction]) -> bool:
    """Return whether some way through a loop reads a variable before it writes it."""
    places = {step.offset: number for number, step in enumerate(body)}
    # all ways through the body: one ends where the variable is written, and none follows a jump out of the loop
    todo, seen = [0], set[int]()
    while todo:
        number = todo.pop()
        if number in seen or number >= len(body):
            continue
        seen.add(number)
        step = body[number]
        kinds = [kind for kind, each in _uses(step) if each == name]
        if kinds[:1] == ["LOAD"]:
            return True
        if kinds or step.opname.startswith(_ENDS):
            continue
        if step.opcode in _JUMPS and step.argval in places:
            todo.append(places[step.argval])
        if step.opcode not in _JUMPS or "JUMP" not in step.opname or "_IF_" in step.opname:
            todo.append(number + 1)
    return False


def _kept_by(value: Any, body: Iterable[dis.Instruction]) -> list[str]:
    """Attributes with plain values that the loop, or methods of the object's class, read and write."""
    kind = type(value)
    if isinstance(value, (*PLAIN, type, nn.Module, types.ModuleType)) or not hasattr(value, "__dict__"):
        return []
    methods = [
        each
        for base in kind.__mro__
        for name, each in vars(base).items()
        if isinstance(each, types.FunctionType) and name != "__init__" and _is_users(each.__code__)
    ]
    own: Mapping[str, Any] = vars(value)
    steps = [*body, *(step for each in methods for step in dis.get_instructions(each))] if methods else []
    written, read = ({step.argval for step in steps if step.opname == name} for name in ("STORE_ATTR", "LOAD_ATTR"))
    return [key for key, each in own.items() if key in written & read and isinstance(each, (*PLAIN, Tensor))]
