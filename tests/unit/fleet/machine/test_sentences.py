"""Rules decide by types and kinds: none looks into a sentence that people read, nor at whether there is one."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4] / "varuna"
IDENTITIES = {
    "worker",
    "name",
    "node",
    "version",
    "digest",
    "folder",
    "secret",
    "key",
    "file",
    "device_class",
    "accused",
}
"""Texts that are compared, since they name something."""
SEARCHES = {"startswith", "endswith", "find", "index", "removeprefix"}
RULES = [
    *(ROOT / "fleet" / "machine").glob("*.py"),
    *(ROOT / "fleet" / "manager").glob("*.py"),
    ROOT / "engine" / "worker" / "heartbeat.py",
    ROOT / "engine" / "worker" / "session.py",
    ROOT / "observe" / "run_view.py",
]


def sentences() -> set[str]:
    """Fields of what the manager knows, hears and says that are plain text."""
    files = [*(ROOT / "fleet" / "state").glob("*.py"), ROOT / "core" / "messages.py"]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    found = {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and ast.unparse(node.annotation) == "str"
    }
    return found - IDENTITIES


def decisions(source: str) -> list[str]:
    """Places where something depends on a sentence."""
    words, found = sentences(), []
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.If(test=test)
                | ast.IfExp(test=test)
                | ast.While(test=test)
                | ast.UnaryOp(op=ast.Not(), operand=test)
            ):
                asked = [test]
            case ast.BoolOp(values=asked):
                pass
            case ast.Compare(left=left, comparators=others):
                asked = [left, *others]
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in SEARCHES:
                asked = [value]
            case ast.comprehension(ifs=asked):
                pass
            case _:
                continue
        found += [ast.unparse(one) for one in asked if isinstance(one, ast.Attribute) and one.attr in words]
    return found


@pytest.mark.parametrize("path", RULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_rule_depends_on_a_sentence(path: Path) -> None:
    assert decisions(path.read_text()) == []


@pytest.mark.parametrize(
    "rule",
    [
        "if fleet.causes[0].text: stop()",
        "late = beat.activity.startswith('forms')",
        "why = event.reason or 'no reason'",
        "done = [each for each in told if not each.summary]",
        "if phase.suspicion.reason != reason: tell()",
    ],
)
def test_one_that_does_is_found(rule: str) -> None:
    assert len(decisions(rule)) == 1
