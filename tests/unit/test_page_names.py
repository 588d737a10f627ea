"""Names in the code of pages exist: modules, attributes of ours, arguments of our callables, attributes of a step."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Never

import pytest

import varuna

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for folder in ("docs", "examples", "deploy") for page in sorted(ROOT.glob(f"{folder}/**/*.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>python|py|yaml)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
ROOTS = {"varuna": varuna}
BOUND = {"trainer": varuna.Trainer, "step": varuna.Step}
"""Names that mean the same on every page."""


class Block(NamedTuple):
    page: str
    number: int
    language: str
    code: str


def blocks(page: Path) -> Iterator[Block]:
    for number, each in enumerate(BLOCK.finditer(page.read_text()), 1):
        yield Block(page.relative_to(ROOT).as_posix(), number, each["language"], textwrap.dedent(each["code"]))


EVERY = [block for page in PAGES for block in blocks(page)]


def parsed(code: str) -> ast.Module:
    """Parse code of a page, without the dots for arguments that it leaves out."""
    code = re.sub(r"^ +\.\.\.\n(?=\))", "", code, flags=re.M)
    return ast.parse(re.sub(r"\(\s*\.\.\., ", "(", code))


def complaints(code: str) -> Iterator[str]:
    """Names in this code that do not exist."""
    for node in ast.walk(parsed(code)):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield from of_module(name.name)
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in ("varuna", "torch"):
                yield from of_module(module)
                for name in names:
                    if not has(importlib.import_module(module), name.name):
                        yield f"{module} has no {name.name}"
            case ast.Attribute() if (found := chain(node)) is not None:
                yield from of_attributes(*found)
            case ast.Call(func=ast.Attribute() as func, keywords=keywords) if (found := chain(func)) is not None:
                yield from of_arguments(*found, [each.arg for each in keywords if each.arg is not None])
            case _:
                pass


def of_module(name: str) -> Iterator[str]:
    if name.partition(".")[0] in ("varuna", "torch"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            yield f"there is no module {name}: {error}"


def chain(node: ast.Attribute) -> tuple[str, list[str]] | None:
    """``varuna.testing.FailingStore`` as its first name and the others, if the first one is ours."""
    names = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    if isinstance(value, ast.Name) and value.id in {**ROOTS, **BOUND}:
        return value.id, names[::-1]
    return None


def has(owner: Any, name: str) -> bool:
    """Also a field that only instances have, and a submodule."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    if inspect.ismodule(owner):
        return not list(of_module(f"{owner.__name__}.{name}"))
    return f"self.{name}" in inspect.getsource(owner)


def of_attributes(first: str, names: list[str]) -> Iterator[str]:
    owner: Any = {**ROOTS, **BOUND}[first]
    for name in names if first in ROOTS else names[:1]:
        if not has(owner, name):
            yield f"{first}.{'.'.join(names)}: {getattr(owner, '__name__', owner)} has no {name}"
            return
        if not hasattr(owner, name):
            return  # a field: what it is, only a run knows
        owner = getattr(owner, name)


def of_arguments(first: str, names: list[str], given: list[str]) -> Iterator[str]:
    owner: Any = {**ROOTS, **BOUND}[first]
    for name in names:
        owner = getattr(owner, name, None)
    if not callable(owner):
        return
    known = inspect.signature(owner).parameters
    rest = [each for each in known.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    if rest and rest[0].annotation not in (Never, "Never"):  # Trainer takes any other, and refuses it
        return
    for each in given:
        if each not in known:
            yield f"{first}.{'.'.join(names)} has no argument {each}"


def test_what_does_not_exist_is_noticed() -> None:
    right = """
import varuna.testing
from varuna import Checkpoints
trainer = varuna.Trainer(..., checkpoints=varuna.Checkpoints("a", every=3))
for step in trainer.steps(3):
    print(step.index, step.loss)
"""
    assert list(complaints(right)) == []
    for line in (
        "from varuna import Coach",
        "import varuna.coach",
        "varuna.Coach",
        "varuna.Trainer(..., learning_rate=1)",
        "varuna.Checkpoints('a', evry=3)",
        "trainer.stepps(3)",
        "step.losses",
    ):
        assert list(complaints(line)), line


@pytest.mark.parametrize("page", sorted({block.page for block in EVERY if block.language != "yaml"}))
def test_what_python_on_a_page_names_exists(page: str) -> None:
    for block in EVERY:
        if block.page == page and block.language != "yaml":
            assert list(complaints(block.code)) == [], f"{page}, block {block.number}"


def test_yaml_on_pages_can_be_read() -> None:
    yaml = pytest.importorskip("yaml", reason="make install brings it")
    found = [block for block in EVERY if block.language == "yaml"]
    assert found
    for block in found:
        assert yaml.safe_load(block.code), f"{block.page}, block {block.number}"


def test_every_block_has_a_language_that_is_looked_at() -> None:
    """Blocks without one are commands and their output, of which ``test_page_commands`` reads the commands."""
    known = {"", "python", "py", "yaml", "sh", "bash", "console", "rooms"}
    for page in PAGES:
        opened = re.findall(r"^ *```(\S*)\n.*?^ *```$", page.read_text(), re.M | re.S)
        assert set(opened) <= known, page.relative_to(ROOT).as_posix()
