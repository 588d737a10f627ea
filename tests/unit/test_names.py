"""One word for one thing: no class is defined in two modules."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def defined() -> Counter[str]:
    """How often each public class is defined. Front ends have the names of the libraries that they stand in for."""
    files = (file for file in (ROOT / "varuna").rglob("*.py") if "integrations" not in file.parts)
    nodes = (node for file in files for node in ast.parse(file.read_text()).body)
    return Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def test_no_class_is_defined_twice() -> None:
    assert {name for name, times in defined().items() if times > 1} == set()
