"""A worker is killed amid a fine-tuning run; its losses are those of Hugging Face's own Trainer."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios import fine_tuning
from tests.scenarios.launch import run, varuna_command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
SCRIPT = str(Path(fine_tuning.__file__))


def history(file: Path, key: str) -> list[float]:
    logged: list[dict[str, Any]] = json.loads(file.read_text())["log_history"]
    return [each[key] for each in logged if key in each]


def test_a_killed_worker_changes_no_loss_and_no_metric(tmp_path: Path) -> None:
    there = run([sys.executable, SCRIPT, "--folder", str(tmp_path)])
    assert there.code == 0, there.err
    flags = ["--stages", "1"]
    here = run(varuna_command(3, flags, "--folder", str(tmp_path), "--here", script=SCRIPT))
    assert here.code == 0, here.err
    assert (tmp_path / "killed").exists()
    assert "1x2" in here.err  # the survivors' plan
    for key, count in (("loss", 24), ("eval_loss", 2), ("eval_accuracy", 2)):
        expected = history(tmp_path / "there.json", key)
        assert len(expected) == count
        assert history(tmp_path / "here.json", key) == pytest.approx(expected, rel=2e-5)
