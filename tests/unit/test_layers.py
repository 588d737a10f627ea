"""Imports go one way: down the list of docs/rooms.md, and through no wall."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from varuna.core.extras import EXTRAS

ROOT = Path(__file__).parents[2]
IMPURE = {
    "a clock": {"time", "datetime"},
    "a network": {
        *("asyncio", "http", "httpx2", "obstore", "boto3", "socket", "socketserver", "ssl", "starlette", "urllib"),
        *("uvicorn", "websockets"),
    },
    "threads or processes": {"concurrent", "multiprocessing", "queue", "subprocess", "threading"},
    "torch": {"numpy", "safetensors", "torch", "transformers"},
}


class Room(NamedTuple):
    """One line of the list."""

    name: str
    walls: frozenset[str]


class Import(NamedTuple):
    """One module imports another, of ours or not; ``late`` if not while it is imported itself."""

    module: str
    target: str
    late: bool


@cache
def rooms() -> dict[str, Room]:
    """By name, from the top down."""
    listed = re.search(r"```rooms\n(.*?)```", (ROOT / "docs" / "rooms.md").read_text(), re.DOTALL)
    assert listed is not None
    lines = [re.split(r" {2,}", line, maxsplit=2) for line in listed[1].splitlines()]
    return {name: Room(name, frozenset(walls.split(", ")) - {"-"}) for name, walls, _ in lines}


@cache
def modules() -> dict[str, Path]:
    """All of ours."""
    paths = sorted((ROOT / "varuna").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def room_of(module: str) -> Room:
    """The line with the longest name that the module lies in."""
    found = [room for room in rooms().values() if module == room.name or module.startswith(room.name + ".")]
    return max(found, key=lambda room: len(room.name))


@cache
def imports() -> tuple[Import, ...]:
    """Everything that our modules import."""
    return tuple(one for module, path in modules().items() for one in imports_of(module, path))


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Imports of one file, also in functions (late) and for type checkers (late)."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import(names=names):
                    yield from (Import(module, alias.name, late) for alias in names)
                case ast.ImportFrom(module=base, names=names, level=level):
                    above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                    origin = ".".join([*above, *([base] if base else [])])
                    for alias in names:
                        whole = f"{origin}.{alias.name}"
                        yield Import(module, whole if whole in modules() else origin, late)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    yield from visit(child, True)
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    yield from visit(child, True)
                case _:
                    yield from visit(child, late)

    yield from visit(ast.parse(path.read_text()), False)


def upward() -> set[tuple[str, str]]:
    """Imports from a room that does not lie below."""
    floors = {name: floor for floor, name in enumerate(rooms())}
    return {
        (module, target)
        for module, target, _ in imports()
        if target in modules() and floors[room_of(target).name] < floors[room_of(module).name]
    }


def through_walls() -> set[tuple[str, str]]:
    """Imports of what a wall keeps out, by the module itself."""
    kinds = {root: kind for kind, roots in IMPURE.items() for root in roots}
    found: set[tuple[str, str]] = set()
    for module, target, _ in imports():
        walls, root = room_of(module).walls, target.partition(".")[0]
        if target in modules():
            is_kept_out = "pure" in walls and "pure" not in room_of(target).walls
            is_kept_out |= any(f"{target}.".startswith(f"varuna.{wall.removeprefix('no ')}.") for wall in walls)
        else:
            is_kept_out = root in kinds and ("pure" in walls or f"no {kinds[root]}" in walls)
        if is_kept_out:
            found.add((module, target))
    return found


def torch_on_the_way_in() -> set[tuple[str, str]]:
    """Modules of rooms without torch that bring a module along which imports it, and which."""
    now: dict[str, set[str]] = {}
    for module, target, late in imports():
        if not late:
            now.setdefault(module, {*_packages_around(module)}).add(target)
    found: set[tuple[str, str]] = set()
    for start in modules():
        if not room_of(start).walls & {"pure", "no torch"}:
            continue
        seen, waiting = {start}, [start]
        while waiting:
            module = waiting.pop()
            if any(target.partition(".")[0] in IMPURE["torch"] for target in now.get(module, ())):
                found.add((start, module))
            fresh = {target for target in now.get(module, ()) if target in modules()} - seen
            seen |= fresh
            waiting += fresh
    return found


def _packages_around(module: str) -> Iterator[str]:
    """They are imported first."""
    while module := module.rpartition(".")[0]:
        yield module


def test_every_package_has_its_line_and_every_line_its_package() -> None:
    folders = {module for module, path in modules().items() if path.name == "__init__.py"}
    homes = {room_of(module).name for module in modules()}
    assert homes == set(rooms())
    assert {folder for folder in folders if room_of(folder).name != folder} == NOT_LISTED


NOT_LISTED = {"varuna.engine", "varuna.fleet", "varuna.integrations"}
"""Packages that have no line of their own."""


def test_modules_import_from_rooms_below_their_own() -> None:
    assert upward() == set()


def test_walls_let_nothing_through() -> None:
    assert through_walls() == set()


def test_what_needs_no_torch_does_not_bring_it_along() -> None:
    assert torch_on_the_way_in() == set()


def test_late_and_relative_imports_and_those_of_type_checkers_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from ..schedule import actions, policy as p\nfrom . import errors\nimport time\n"
        "if TYPE_CHECKING:\n    from varuna.core.vote import VoteLayout\n"
        "class A:\n    import socket\n    def f(self):\n        import varuna.core.plan\n"
    )
    assert list(imports_of("varuna.core.module", file)) == [
        Import("varuna.core.module", "varuna.schedule.actions", False),
        Import("varuna.core.module", "varuna.schedule.policy", False),
        Import("varuna.core.module", "varuna.core.errors", False),
        Import("varuna.core.module", "time", False),
        Import("varuna.core.module", "varuna.core.vote", True),
        Import("varuna.core.module", "socket", False),
        Import("varuna.core.module", "varuna.core.plan", True),
    ]


def folder_of(module: str) -> str:
    """The folder or module of the top level that a module lies in."""
    return module.split(".")[1] if "." in module else module


def test_folders_of_the_top_level_are_in_one_order() -> None:
    below: dict[str, set[str]] = {}
    for module, target, _ in imports():
        if target in modules() and (above := folder_of(module)) != folder_of(target):
            below.setdefault(above, set()).add(folder_of(target))
    TopologicalSorter(below).prepare()  # raises CycleError


def test_each_extra_is_listed_where_the_core_asks_for_it() -> None:
    places = [place.partition(":") for places in EXTRAS.values() for place in places]
    assert [place for place in places if not hasattr(import_module(place[0]), place[2])] == []
    core = [
        (module, target) for module, target, _ in imports() if ".extras." in f"{target}." and ".extras" not in module
    ]
    assert [(module, target) for module, target in core if target != "varuna.core.extras"] == []


def test_extras_use_public_names_of_the_core() -> None:
    private = [
        f"{module} imports {alias.name} from {node.module}"
        for module, path in modules().items()
        if module.startswith("varuna.extras")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("varuna")
        for alias in node.names
        if re.match("_[^_]", alias.name)
    ]
    assert private == []
