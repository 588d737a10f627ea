"""Tests survive a change of what nobody else can see: none imports, replaces or sets a private name of the product."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BY_NAME = {"setattr", "delattr", "getattr", "hasattr", "patch", "object"}
"""Functions and methods that take the name of an attribute as a text; ``object`` is that of ``mock.patch``."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _is_hidden(dotted: str) -> bool:
    """Whether it is in the product, but not for everybody."""
    return dotted.startswith("varuna.") and any(map(_is_private, dotted.split(".")))


def _imported(tree: ast.AST) -> dict[str, bool]:
    """Names that a file imports, and whether they are the product's."""
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
                name = alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else module.partition(".")[0])
                found[name] = module.partition(".")[0] == "varuna"
    return found


def _chain(node: ast.expr) -> tuple[str, list[str]]:
    """``a.b.c`` as its root and its attributes; the root is empty if it is no name."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    return node.id if isinstance(node, ast.Name) else "", attributes


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Lines that use what is private to the product, and what.

    What a test reads of an object is not looked at: only what it imports, what it sets, replaces or asks for by name,
    and what it takes from a module or a class. A test's own private names are its own, as are those of other libraries.
    """
    tree = ast.parse(source)
    imported = _imported(tree)

    def is_foreign(node: ast.expr, attributes: list[str]) -> bool:
        """Whether ``attributes`` of what is here are private, and may be the product's."""
        root, outer = _chain(node)
        if not imported.get(root, True):
            return False
        inner = [*outer, *attributes]
        return any(map(_is_private, inner[1:] if root in ("self", "cls") else inner))

    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((node.lineno, whole) for each in names if _is_hidden(whole := f"{module}.{each.name}"))
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names if _is_hidden(each.name))
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text) and _is_hidden(text):
                yield node.lineno, text
            case ast.Call(func=called, args=[owner, ast.Constant(value=str(name)), *_]):
                if _called(called) in _BY_NAME and is_foreign(owner, [name]):
                    yield node.lineno, f"{ast.unparse(owner)}.{name}"
            case ast.Attribute(ctx=ast.Load()):
                if imported.get(_chain(node)[0], False) and _is_private(node.attr):
                    yield node.lineno, ast.unparse(node)
            case ast.Attribute(value=owner, attr=name) if is_foreign(owner, [name]):
                yield node.lineno, ast.unparse(node)


def _called(node: ast.expr) -> str:
    """The last word of what is called."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_no_test_imports_replaces_or_sets_what_is_private_to_the_product() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    assert [f"{file.relative_to(ROOT)}:{line}: {what}" for file in files for line, what in uses(file.read_text())] == []


def test_whatever_is_private_is_seen_however_it_is_taken() -> None:
    seen = sorted(
        uses(
            "import os\nimport varuna.core.plan\nfrom varuna.core import plan as module\n"
            "from varuna.core.plan import _one\n"
            "patch.setattr(module, '_two', 2)\n"
            "patch.setattr('varuna.core.plan._three', 3)\n"
            "patch.setattr(agent, '_four', 4)\n"
            "agent._five = 5\n"
            "agent.inner._six.seven += 1\n"
            "self.agent._eight = 8\n"
            "varuna.core.plan._nine(9)\n"
            "module._ten\n"
            "with mock.patch.object(agent.inner, '_eleven'): pass\n"
        )
    )
    assert [line for line, _ in seen] == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert seen[1] == (5, "module._two")
    assert seen[5] == (9, "agent.inner._six.seven")


def test_what_is_a_tests_own_or_another_librarys_is_not_meant() -> None:
    own = "from tests.waiting import _helper\nclass A:\n    def f(self):\n        self._own = self._more = 1\n"
    others = "import os, varuna\npatch.setattr(os, '_exit', f)\nos._exit(0)\nvaruna.__path__ = []\nx.__dict__ = {}\n"
    assert list(uses(own + others)) == []
