"""The manager's knowledge is in parts, each of which one file of rules changes."""

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from varuna.fleet.state.fleet import Fleet

ROOT = Path(__file__).parents[2]
RULES = {"contacts": ["leases"], "questions": [], "recorded": ["commit"]}
"""By part of ``Fleet``: the module of ``varuna.fleet.machine`` that changes it; none: the part's own verbs do."""


def changers(part: str) -> set[str]:
    """Files that replace fields of a part, beside the module that defines it."""
    found = set()
    for path in (ROOT / "varuna").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("changed", "replace")
            ):
                given = node.args[0]
                if any(isinstance(each, ast.Attribute) and each.attr == part for each in ast.walk(given)):
                    found.add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("part", RULES)
def test_one_file_of_rules_changes_a_part(part: str) -> None:
    rules = {f"varuna/fleet/machine/{each}.py" for each in RULES[part]}
    assert changers(part) == rules, "add a function there, and call that"


@pytest.mark.parametrize("part", RULES)
def test_a_part_is_a_frozen_value_in_a_module_of_its_own(part: str) -> None:
    kind = get_type_hints(Fleet)[part]
    assert is_dataclass(kind)
    assert kind.__module__ == f"varuna.fleet.state.{part}"
    assert not {each.name for each in fields(kind)} & {each.name for each in fields(Fleet)}
