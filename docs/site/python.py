"""A page with the public face, from its docstrings; nothing is imported, so that torch is not needed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

FACE = {
    "varuna": [
        "varuna.trainer.Trainer",
        "varuna.results.Step",
        "varuna.results.Evaluation",
        "varuna.job.options.Checkpoints",
        "varuna.job.options.Collate",
        "varuna.job.options.Loss",
        "varuna.job.options.Publish",
        "varuna.job.options.Weights",
        "varuna.core.model.Memory",
        "varuna.core.model.Network",
        "varuna.engine.stage.cross_stage.all_reduce_shared",
        "varuna.engine.stage.cross_stage.owned",
        "varuna.core.plan.Plan",
    ],
    "varuna.extras.shards": ["varuna.extras.shards.dataset.Shards"],
    "varuna.extras.rollouts": ["varuna.extras.rollouts.dataset.Rollouts", "varuna.extras.rollouts.log.append"],
    "varuna.testing": [
        "varuna.testing.ranks.run",
        "varuna.testing.ranks.RunResult",
        "varuna.testing.faults.Fault",
        "varuna.testing.faults.fail_at",
        "varuna.testing.faults.notice_at",
        "varuna.testing.faults.Killed",
        "varuna.testing.stores.FailingStore",
    ],
}
"""Where the names that users import are defined; errors have a page of their own."""


def python_page(root: Path) -> str:
    """Markdown, with a section for each name of the public face."""
    lines = [
        "# Python reference",
        "",
        "Made from the docstrings in the code. [varuna.Trainer](../trainer.md) explains the same arguments with "
        "examples, [Errors](../errors.md) the exceptions.",
        "",
    ]
    for package, paths in FACE.items():
        for path in paths:
            found = _find(root, path)
            public = f"{package}.{found.name}"
            lines += [f"## {public}", "", *_described(found, public)]
            if isinstance(found, griffe.Class):
                for name, member in found.members.items():
                    if isinstance(member, griffe.Function) and not name.startswith("_"):
                        lines += [f"### {found.name}.{name}", "", *_described(member, f"{found.name}.{name}")]
    return "\n".join(lines)


def _find(root: Path, path: str) -> Any:
    module, _, name = path.rpartition(".")
    file = root / (module.replace(".", "/") + ".py")
    return griffe.visit(module, filepath=file, code=file.read_text())[name]


def _described(found: Any, name: str) -> Iterator[str]:
    """Its signature, what it says of itself, and its fields."""
    is_class = isinstance(found, griffe.Class)
    made_by = found.members.get("__init__") if is_class else found
    if isinstance(made_by, griffe.Function) and "property" not in found.labels:
        yield from ("```python", _signature(name, made_by), "```", "")
    yield from _text(found.docstring)
    if is_class and made_by is not None:
        yield from _text(made_by.docstring)
    if is_class:
        yield from _fields(found)


def _signature(name: str, function: griffe.Function) -> str:
    parts, starred = [], False
    for each in function.parameters:
        if each.name in ("self", "cls") or each.kind is griffe.ParameterKind.var_keyword:
            continue
        if each.kind is griffe.ParameterKind.keyword_only and not starred:
            parts.append("*")
            starred = True
        parts.append(each.name if each.default is None else f"{each.name}={each.default}")
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= 88 else f"{name}(\n    " + ",\n    ".join(parts) + ",\n)"


def _text(docstring: griffe.Docstring | None) -> Iterator[str]:
    for section in griffe.parse_google(docstring, warnings=False) if docstring else []:
        match section.kind:
            case griffe.DocstringSectionKind.text:
                yield from (_code(section.value), "")
            case griffe.DocstringSectionKind.parameters:
                yield from ("| argument | meaning |", "|---|---|")
                yield from (f"| `{each.name}` | {_cell(each.description)} |" for each in section.value)
                yield ""
            case griffe.DocstringSectionKind.raises:
                yield from (f"- raises `{each.annotation}`: {_code(each.description)}" for each in section.value)
                yield ""
            case griffe.DocstringSectionKind.returns:
                yield from (f"- returns {_code(each.description)}" for each in section.value)
                yield ""


def _fields(found: griffe.Class) -> Iterator[str]:
    rows = [
        f"| `{name}` | {_cell(member.docstring.value)} |"
        for name, member in found.members.items()
        if not name.startswith("_") and isinstance(member, griffe.Attribute) and member.docstring
    ]
    if rows:
        yield from ("| field | meaning |", "|---|---|", *rows, "")


def _cell(text: str) -> str:
    return _code(" ".join(text.split())).replace("|", "\\|")


def _code(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", text)
