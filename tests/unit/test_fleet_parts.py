"""The manager's knowledge is in parts, each of which one file of rules changes."""

import ast
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

from varuna.fleet.state.fleet import Fleet

FLEET = Path(__file__).parents[2] / "varuna" / "fleet"
PARTS = {"contacts": ["leases"], "questions": [], "recorded": ["commit"]}
"""By part of ``Fleet``: the module of ``fleet.machine`` that changes it; none: the part's own verbs do."""
FIELDS = {
    "choosing": ["planned_for"],
    "commit": ["first_step"],
    "device_faults": ["broken", "short"],
    "exits": ["left_step", "main_ended", "script_ended"],
    "joins": ["job", "version", "spawned", "spawning", "zones"],
    "preemption": ["departing"],
    "silent_links": ["silences"],
    "stragglers": ["slow", "strikes"],
    "trainings": ["ahead"],
}
"""By module of ``fleet.machine``: fields of ``Fleet`` that no other one changes."""


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Calls with arguments in the manager's and agents' code: module, function's name, and the call."""
    return [
        (path.stem, str(getattr(node.func, "id", None) or getattr(node.func, "attr", "")), node)
        for path in FLEET.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def is_of(part: str, value: ast.expr) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == part for each in ast.walk(value))


@pytest.mark.parametrize("part", PARTS)
def test_one_file_of_rules_changes_a_part(part: str) -> None:
    replacing = [(module, call) for module, name, call in calls() if name in ("changed", "replace") and call.args]
    changers = {module for module, call in replacing if is_of(part, call.args[0])}
    assert changers == set(PARTS[part]), "add a function there, and call that"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_a_frozen_value_in_a_module_of_its_own(part: str) -> None:
    kind = get_type_hints(Fleet)[part]
    assert is_dataclass(kind)
    assert kind.__module__ == f"varuna.fleet.state.{part}"
    assert not {each.name for each in fields(kind)} & {each.name for each in fields(Fleet)}


@pytest.mark.parametrize("field", [field for its in FIELDS.values() for field in its])
def test_what_one_file_of_rules_changes_no_other_one_begins_to_change(field: str) -> None:
    updates = [(module, call) for module, name, call in calls() if name == "update"]
    changers = {module for module, call in updates if any(given.arg == field for given in call.keywords)}
    assert changers == {module for module, its in FIELDS.items() if field in its}, "add a function there, and call that"
