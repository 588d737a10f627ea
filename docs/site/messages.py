"""Every error message of the code, as a page: found by its words, under the class that carries it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

HOLE = "…"


class ErrorClass(NamedTuple):
    """A class of errors, and what its docstring says."""

    name: str
    base: str
    meaning: str


class Message(NamedTuple):
    """What an error says."""

    error: str
    text: str
    """with … where the code fills something in"""
    module: str


def error_classes(root: Path) -> dict[str, ErrorClass]:
    """``VarunaError`` and what derives from it, by name; each base comes before what derives from it."""
    every = {
        node.name: ErrorClass(node.name, node.bases[0].id, ast.get_docstring(node) or "")
        for _, nodes in _nodes(root)
        for node in nodes
        if isinstance(node, ast.ClassDef) and len(node.bases) == 1 and isinstance(node.bases[0], ast.Name)
    }
    found = {"VarunaError": every["VarunaError"]}
    while further := {name: each for name, each in every.items() if each.base in found and name not in found}:
        found |= further
    return found


def messages(root: Path) -> list[Message]:
    """What is given to each error when it is made, if that is a text or begins with one; each once for a class."""
    classes = error_classes(root)
    found: dict[tuple[str, str], Message] = {}
    for path, nodes in _nodes(root):
        module = path.relative_to(root).as_posix()
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes and node.args:
                for text in alternatives(node.args[0]):
                    if re.search(r"[a-z]{3}.* [a-z]{2}", text):
                        found.setdefault((node.func.id, text), Message(node.func.id, text, module))
    return sorted(found.values())


def texts(root: Path) -> set[str]:
    """Every text of the code but docstrings, with … where something is filled in: warnings and lines, too."""
    return {
        text
        for _, nodes in _nodes(root)
        for said in [{id(node.value) for node in nodes if isinstance(node, ast.Expr)}]
        for node in nodes
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in said
        for text in alternatives(node)
    }


def alternatives(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else HOLE for each in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            ends = list(alternatives(right)) or [HOLE]
            for start in list(alternatives(left)) or [HOLE]:
                yield from (start + end for end in ends)
        case ast.IfExp(body=body, orelse=other):
            yield from alternatives(body)
            yield from alternatives(other)


@cache
def _nodes(root: Path) -> list[tuple[Path, list[ast.AST]]]:
    """Every module's nodes, so that the trees are walked once."""
    modules = sorted((root / "varuna").rglob("*.py"))
    return [(path, list(ast.walk(ast.parse(path.read_text())))) for path in modules]


def messages_page(root: Path) -> str:
    """Markdown: a section for each class that carries messages."""
    found = messages(root)
    lines = [
        "# All messages",
        "",
        f"Made from the code: {len(found)} messages, by class. `{HOLE}` stands for what a message fills in. What the "
        "most frequent ones mean, and what to do, is in [Errors](../errors.md).",
        "",
    ]
    for name, each in error_classes(root).items():
        mine = [message for message in found if message.error == name]
        if mine:
            lines += [f"## {name}", "", each.meaning.partition("\n\n")[0].replace("``", "`"), ""]
            lines += [f"- {_shown(message.text)} <small>{message.module}</small>" for message in mine]
            lines += [""]
    return "\n".join(lines)


def _shown(text: str) -> str:
    plain = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", plain).replace("\\<", "&lt;").replace("\\>", "&gt;")
