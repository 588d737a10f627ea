"""The code on the pages for newcomers runs as it is printed, with fewer steps."""

import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import varuna

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^(<!-- not run: (?P<why>[^>]+) -->\n)?```python\n(?P<code>.*?)^```", re.M | re.S)
SHORTER = {"steps(1000)": "steps(2)", "steps(100)": "steps(2)", "num_workers=4": "num_workers=0"}
"""Changes to a block before it runs."""


class Block(NamedTuple):
    page: str
    number: int
    code: str
    why: str | None
    """it is not run"""


def blocks(page: str) -> list[Block]:
    found = BLOCK.finditer((DOCS / page).read_text())
    return [Block(page, number, each["code"], each["why"]) for number, each in enumerate(found, 1)]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def of_a_script() -> dict[str, Any]:
    """Return the names that the page on scripts takes for granted."""
    drawn = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    dataset = [(row, index % 4) for index, row in enumerate(drawn)]
    loader = torch.utils.data.DataLoader
    return {
        "torch": torch,
        "nn": nn,
        "varuna": varuna,
        "DataLoader": loader,
        "Classifier": Classifier,
        "dataset": dataset,
    }


def of_fine_tuning() -> dict[str, Any]:
    """Return the names that the page on transformers takes for granted, once its first block has run."""
    pytest.importorskip("accelerate", reason="make install brings it")
    from transformers import TrainingArguments

    from tests.unit.engine.models import Tokens, tiny_gpt2
    from varuna.integrations.transformers import Trainer

    args = TrainingArguments(output_dir="out", max_steps=1, per_device_train_batch_size=8, use_cpu=True, report_to=[])
    return {"Trainer": Trainer, "model": tiny_gpt2(), "args": args, "data": Tokens(size=16)}


RUN_ELSEWHERE = {"data.md": "tests/unit/data/test_how_to.py"}
FRAGMENTS = {
    "checkpoints.md": "a loop around a model of the reader's, and a checkpoint on disk",
    "dashboard.md": "charts, which need a service",
    "hidden-dependencies.md": "optimizers without a model around them",
    "losses.md": "functions for a model of the reader's; examples/ has whole scripts that tests run",
    "partitioning.md": "the operator is run by tests/unit/partition/test_refusals.py",
    "precision.md": "one argument",
    "publish.md": "one argument, and a watcher that never ends",
    "testing.md": "a test of the reader's own script; tests/unit/testing runs such ones",
    "trainer.md": "arguments, one at a time",
}
"""Reasons why blocks of these pages are only compiled: what they leave out."""
GIVEN = {"bring-your-script.md": of_a_script, "tutorial.md": dict, "transformers.md": of_fine_tuning}
BLOCKS = [block for page in GIVEN for block in blocks(page)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", BLOCKS, ids=[f"{block.page}-{block.number}" for block in BLOCKS])
def test_a_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.why is not None:
        pytest.skip(block.why)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    code = block.code
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    names: dict[str, Any] = {"__name__": "__main__", **GIVEN[block.page]()}
    exec(compile(code, f"{block.page}, block {block.number}", "exec"), names)
    if isinstance(trainer := names.get("trainer"), varuna.Trainer):
        assert trainer._session is not None, "the block trains nothing"


def test_every_page_with_code_is_run_or_has_a_reason_not_to_be() -> None:
    pages = {
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if blocks(page.relative_to(DOCS).as_posix())
    }
    unknown = pages - set(GIVEN) - set(RUN_ELSEWHERE) - set(FRAGMENTS)
    assert not unknown, f"run the code of {sorted(unknown)} here, or say in FRAGMENTS why not"
    assert all(page in (DOCS.parent / test).read_text() for page, test in RUN_ELSEWHERE.items())


@pytest.mark.parametrize("page", FRAGMENTS)
def test_code_that_is_not_run_can_be_compiled(page: str) -> None:
    for block in blocks(page):
        code = re.sub(r"^ +\.\.\.\n(?=\))", "", textwrap.dedent(block.code), flags=re.M)  # other arguments
        compile(code.replace("(..., ", "("), f"{page}, block {block.number}", "exec")
