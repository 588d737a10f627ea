"""Run the cells of a notebook and keep in it what they print and draw, without Jupyter.

python -m benchmarks.notebook examples/gallery/plan_20b.ipynb
"""

import ast
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class _Svg:
    """A drawing, as ``IPython.display.SVG``."""

    def __init__(self, filename: str) -> None:
        self.text = Path(filename).read_text()


def outputs(notebook: dict[str, Any], folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Run each cell with code, and yield what it prints, and draws in its last line, in nbformat's form.

    Args:
        notebook: as read from its file.
        folder: where its cells run.
    """
    display: Any = ModuleType("IPython.display")
    display.SVG = _Svg
    names: dict[str, Any] = {"__name__": "__main__"}
    modules = {"IPython": ModuleType("IPython"), "IPython.display": display}
    with mock.patch.dict(sys.modules, modules), contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                yield list(_run("".join(cell["source"]), names))


def _run(code: str, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    tree = ast.parse(code)
    *_, last = tree.body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        else:
            exec(compile(tree, "cell", "exec"), names)
    if printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": printed.getvalue()}
    if isinstance(value, _Svg):
        yield {"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": value.text}}


def main() -> None:
    path = Path(sys.argv[1])
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, found) in enumerate(zip(cells, outputs(notebook, path.parent), strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, found
    path.write_text(json.dumps(notebook, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
