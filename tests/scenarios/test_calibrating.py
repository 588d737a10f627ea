"""``varuna calibrate`` on a real script, with two workers at once."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from varuna.calibration.file import read_calibration

pytestmark = pytest.mark.nightly

TRAIN = Path(__file__).parents[2] / "examples" / "gpt2_text" / "train.py"
SMALL = ("--layers", "2", "--width", "32", "--heads", "2", "--length", "32", "--global-batch", "4")


def varuna(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "varuna.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_script_is_measured_by_two_workers_and_can_be_planned_for_many(tmp_path: Path) -> None:
    output = tmp_path / "gpt2.json"
    done = varuna("calibrate", "--workers", "2", "--output", str(output), str(TRAIN), *SMALL)
    assert done.returncode == 0, done.stderr
    assert "an all-reduce over 2" in done.stdout
    calibration = read_calibration(output).first
    assert calibration.notes == ("measured by 2 workers at once, in place",), "nothing had to be assumed"
    assert 1 < len(calibration.kinds) < calibration.section_count, "sections with the same graph are one kind"
    for kind in calibration.kinds.values():
        assert kind.micro_batches[:2] == (1, 2)
        assert min(*kind.forward_s, *kind.recompute_s, *kind.backward_s) > 0
    assert any(kind.splits for kind in calibration.kinds.values())
    assert calibration.action_s > 0
    network = calibration.across_vms
    assert all(a <= b for a, b in pairwise(network.link.jitter.quantiles_s))
    assert [(ring.ranks, ring.in_flight) for ring in network.rings] == [(2, 1)]
    planned = varuna("plan", "--calibration", str(output), "--gpus", "8", "--global-batch", "64", "--json")
    assert planned.returncode == 0, planned.stderr
    best = json.loads(planned.stdout)["plans"][0]
    assert best["gpus_used"] <= 8
    assert best["step_time_s"] > 0


def test_a_run_leaves_what_its_steps_took_for_the_next_plan(tmp_path: Path) -> None:
    script = Path(__file__).with_name("job.py")
    folder, flags = str(tmp_path / "run"), ("--workers", "2", "--stages", "2")
    done = varuna("run", *flags, "--run-dir", folder, str(script), "--steps", "25", "--slow", "0.15")
    assert done.returncode == 0, done.stderr
    calibration = read_calibration(Path(folder) / "calibration.json").first
    assert calibration.notes[-1].startswith("refined by a run: 2x1, m = 2")
    planned = varuna("plan", "--run", folder, "--gpus", "4", "--global-batch", "12", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["plans"][0]["step_time_s"] < 1, "a tiny model, not its nominal self"
    refused = varuna("plan", "--run", str(script.parent), "--gpus", "4")
    assert refused.returncode == 2
    assert "no calibration.json in" in refused.stderr


def test_a_script_that_fails_says_so_and_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('the data is gone')")
    done = varuna("calibrate", "--workers", "2", "--output", str(tmp_path / "x.json"), str(script))
    assert done.returncode == 1
    assert "the data is gone" in done.stderr
    assert 'Traceback (most recent call last):\n  File "<frozen' not in done.stderr
