"""The manager's knowledge is in parts, and each field of a part has one file of rules that changes it."""

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

from varuna.fleet.state.fleet import Fleet

RULES = sorted((Path(__file__).parents[2] / "varuna" / "fleet" / "machine").glob("*.py"))
PARTS = {name: kind for name, kind in get_type_hints(Fleet).items() if name not in ("config", "phase", "workers")}
WHOLE = {"contacts": "leases", "speeds": "stragglers", "recorded": "commit"}
"""Parts of which one file of rules changes all. Of others each field has one, or verbs of the part change it."""


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Calls of functions and methods with these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (getattr(node.func, "id", None) or getattr(node.func, "attr", None)) in names:
            yield node


@cache
def changes() -> list[tuple[str, str, frozenset[str | None]]]:
    """Places where rules replace fields of a part: module, part, and the fields."""
    found = []
    for path in RULES:
        tree = ast.parse(path.read_text())
        for call in calls(tree, "changed", "replace"):
            part = ast.unparse(call.args[0]).rpartition(".")[2]
            names = {each.arg for each in call.keywords}
            if None in names:  # a helper of the module, which passes on what it is given
                names |= {each.arg for helped in calls(tree, "_note") for each in helped.keywords}
            if part in PARTS:
                found.append((path.stem, part, frozenset(names)))
    return found


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_a_frozen_value_in_a_module_of_its_own(part: str) -> None:
    kind = PARTS[part]
    assert is_dataclass(kind)
    assert kind.__module__ != Fleet.__module__


@pytest.mark.parametrize(("part", "field"), [(part, each.name) for part in PARTS for each in fields(PARTS[part])])
def test_one_file_of_rules_changes_a_field(part: str, field: str) -> None:
    changers = {module for module, changed, names in changes() if changed == part and field in names}
    assert len(changers) <= 1, "add a function in one of them, or a verb to the part, and call that"


@pytest.mark.parametrize(("part", "rules"), WHOLE.items())
def test_one_file_of_rules_changes_all_of_a_part(part: str, rules: str) -> None:
    assert {module for module, changed, _ in changes() if changed == part} == {rules}


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_rules_replace_whole_parts(path: Path) -> None:
    """A loose field beside the parts has no owner."""
    updates = [each.arg for call in calls(ast.parse(path.read_text()), "update") for each in call.keywords]
    assert {name for name in updates if name} <= set(get_type_hints(Fleet))
