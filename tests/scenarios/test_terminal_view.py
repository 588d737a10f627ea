"""``varuna run`` and ``varuna status --watch`` on real terminals: a view in place, and the script's lines above it."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.scenarios.launch import varuna_command
from tests.scenarios.screen import terminal
from varuna.fleet.run_folder.connection_file import read_access

pytestmark = pytest.mark.timeout(300)


def test_a_run_is_seen_in_place_through_a_loss_to_ctrl_c(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--stages", "2", "--run-dir", str(run), "--price", "0.6", "--on-demand-price", "2"]
    command = varuna_command(4, flags, "--steps", "5000", "--slow", "0.15", "--checkpoint-dir", str(tmp_path / "saved"))
    watch = [sys.executable, "-m", "varuna.cli.main", "status", "--watch", "--run", str(run)]
    with terminal(command, 100, 30) as seen:
        text = seen.until(lambda text: "training  step" in text and "replica 1  w2       w3" in text, 120)
        assert "plan 2x2: 2 stages x 2 replicas   6 micro-batches of 2   generation 0" in text
        _kill(run, rank=3)
        seen.until(lambda text: "Plan 2x2 to 2x1" in text and "plan 2x1: " in text, 60)
        with terminal(watch, 80, 24, NO_COLOR="1") as watched:
            text = watched.until(lambda text: "training  step" in text and "Plan 2x2 to 2x1" in text, 60)
            assert re.search(r"\$0\.\d+ spent, \$0\.\d+ on demand", text)
            watched.type(b"\x03")
            assert watched.end(30) == 0
        seen.type(b"\x03")
        assert seen.end(60) == 128 + signal.SIGINT
    whole = seen.screen.whole
    lines = whole.splitlines()
    assert [line for line in lines if line.startswith(("training", "plan 2x", "replica"))] == []  # the view is gone
    steps = [int(found) for found in re.findall(r"^step (\d+) loss \S+ generation \d+$", whole, re.MULTILINE)]
    assert steps == list(range(steps[-1] + 1))  # no line of the script was drawn over
    for told in ("Training begins on 4 workers", "killed by SIGKILL", "A stop was requested", "ended  "):
        assert len([line for line in lines if told in line and "Morph" not in line]) == 1
    assert " on demand (" in "".join(lines[-5:])


def _kill(run: Path, rank: int) -> None:
    access = read_access(run)
    assert access is not None
    status = json.loads(access.remote().get("/status").body)
    os.kill(next(worker["pid"] for worker in status["workers"] if worker["rank"] == rank), signal.SIGKILL)


def test_a_script_that_fails_leaves_a_clean_terminal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(1)\nraise SystemExit('this is why')\n")
    command = [sys.executable, "-m", "varuna.cli.main", "run", "--workers", "2", str(script)]
    with terminal(command, 60, 20) as seen:
        seen.until(lambda text: "starting 2 workers" in text, 60)
        assert seen.end(60) == 1
    assert "starting 2 workers" not in seen.screen.whole
    assert "this is why" in seen.screen.whole
    assert "\u2500" not in seen.screen.whole
