"""One word for one thing: no class is defined in two modules."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TWICE = [
    *("Answer", "Built", "Channel", "Clock", "Cluster", "Ended", "Entry", "Evidence", "Exported", "Found", "Ledger"),
    *("Level", "Line", "Link", "Notice", "Noticed", "Outcome", "Owner", "Pace", "Place", "StageTimes", "Standing"),
    *("Sums", "Suspicion", "Update", "Values", "Waiting", "Work", "Worker"),
]
"""Names that still mean two things: one that is put right must go from here."""


@cache
def defined() -> Counter[str]:
    """How often each public class is defined."""
    files = (ROOT / "varuna").rglob("*.py")
    nodes = (node for file in files for node in ast.parse(file.read_text()).body)
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def test_no_class_is_defined_twice() -> None:
    assert {name for name, times in defined().items() if times > 1} - set(TWICE) == set()


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.xfail(strict=True, reason="still to be renamed")
def test_this_class_is_defined_once(name: str) -> None:
    assert defined()[name] <= 1
