"""The examples of the gallery: equal losses in one process and in two stages, those of docs/gallery.md, no warnings."""

import importlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gallery import COMPARED, EXAMPLES, FOLDER, LOSS, MEASURED, PAGE, Example
from benchmarks.notebook import outputs
from tests.depth import of_depth
from tests.unit.engine.ranks import single_threaded
from varuna.testing import run

ROOT = Path(__file__).parents[2]
FIELD = ROOT / ".field"
STEPS = ["--steps", str(COMPARED + 1)]
EXPECTED = re.compile(
    r"""
    varuna:\ (plan\ .*|checked\ against\ plain\ PyTorch\ .*|\d+\ steps,\ loss\ .*|step\ \d+/\d+\ .*
    |samples\ have\ no\ names:\ .*|training\ waits\ for\ samples\ .*
    |note:\ forward\(\)\ or\ loss=\ draws\ random\ numbers\ .*)
    """,
    re.X,
)
"""Lines of the standard error that a newcomer need not worry about."""
FAST = {"char-gpt", "lora", "vit"}
rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def with_digits() -> None:
    """scikit-learn, from where it is installed, or from the folder that ``make`` fills."""
    import transformers.image_transforms  # noqa: F401  # it would take the field's torchvision, which fits one torch only

    sys.path.append(str(FIELD))
    try:
        pytest.importorskip("sklearn.datasets", reason="`make field-libraries` or `pip install scikit-learn` brings it")
    finally:
        sys.path.remove(str(FIELD))


def module_of(example: Example, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if "digits" in example.script:
        with_digits()
    if example.name == "lora":
        pytest.importorskip("peft", reason="`make install` or `pip install peft` brings it")
    monkeypatch.syspath_prepend(ROOT / FOLDER)
    return importlib.import_module(example.script.removesuffix(".py"))


def row_of(example: Example) -> str:
    (row,) = (row for row in rows if row.startswith(f"| {example.name} | {example.shows} | "))
    return row


def said(page_row: str) -> tuple[float, float]:
    """Of a row of the page: the losses that are compared, and of the last step."""
    *_, compared, last = (cell.strip() for cell in page_row.strip("| ").split("|"))
    return float(compared), float(last)


@pytest.mark.usefixtures("one_capture")
@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize(
    "example", of_depth(EXAMPLES, [each for each in EXAMPLES if each.name in FAST]), ids=lambda example: example.name
)
def test_an_example_trains_the_same_in_two_stages(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = module_of(example, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    printed: list[str] = []
    losses: list[list[float]] = []
    for each in example.runs:
        options = [*each.split()[1:], *STEPS]
        module.main(options)
        out, err = capfd.readouterr()
        printed += err.splitlines()
        losses.append([float(loss) for loss in LOSS.findall(out)])
    spread = run(lambda: module.main(options), workers=2, stages=2)
    assert spread.plans == ("2x1",)
    assert spread.losses == pytest.approx(losses[-1], rel=1e-5)
    assert len(losses[-1]) == COMPARED + 1

    printed += capfd.readouterr().err.splitlines()
    assert [line for line in printed if line and not EXPECTED.fullmatch(line)] == []
    assert spread.warnings == ()

    row = row_of(example)
    measured = MEASURED.search(PAGE.read_text())
    assert measured is not None
    is_same_text = f"Python {platform.python_version()}.*" in measured[0]
    assert losses[0][COMPARED] == pytest.approx(said(row)[0], rel=1e-3 if is_same_text else 0.1)


def test_the_page_has_the_commands_of_the_examples() -> None:
    for example in EXAMPLES:
        row = row_of(example)
        compared, last = said(row)
        minutes = float(row.strip("| ").split("|")[3])
        assert row == example.row(minutes, compared, last)
        assert last < compared
    assert {path.name for path in (ROOT / FOLDER).glob("*.py")} == {example.script for example in EXAMPLES}


def test_the_notebook_prints_and_draws_what_it_shows(tmp_path: Path) -> None:
    notebook: dict[str, Any] = json.loads((ROOT / FOLDER / "plan_20b.ipynb").read_text())
    folder = tmp_path / "examples" / "gallery"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "examples" / "calibrations", folder.parent / "calibrations")
    shown = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert list(outputs(notebook, folder)) == shown
    assert any("image/svg+xml" in each.get("data", {}) for found in shown for each in found)
