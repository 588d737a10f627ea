"""Workers are killed while a run publishes: whatever a server sees is whole, and of one step."""

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.depth import by_depth
from tests.scenarios.launch import JOB, environment, python, varuna
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(300)
STEPS = 12


def model_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def shown(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Load all that a server could, by step; hidden names are none of its business."""
    return {int(each.name.removeprefix("step-")): model_in(each) for each in folder.glob("step-*")}


def check(folder: Path, expected: dict[int, dict[str, Tensor]]) -> None:
    for step, model in shown(folder).items():
        assert model.keys() == expected[STEPS].keys(), step
        if step not in expected:
            continue
        for name, value in model.items():
            torch.testing.assert_close(value, expected[step][name], rtol=1e-5, atol=1e-6, msg=f"{step} {name}")


def inode(link: Path) -> int:
    """Of the folder that it leads to; 0: it leads nowhere."""
    try:
        return link.stat().st_ino
    except FileNotFoundError:
        return 0


def leads_elsewhere(link: Path, before: int) -> bool:
    return inode(link) not in (0, before)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """By step, as one process publishes it; with ``--slow`` few publications are skipped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = python("--steps", str(STEPS), "--publish", str(folder), "--slow", "0.3")
    assert done.code == 0, done.err
    found = shown(folder)
    assert len(found) > STEPS // 2
    assert STEPS in found
    return found


def test_each_of_two_stages_dies_right_after_it_has_begun_to_publish(
    tmp_path: Path, undisturbed: dict[int, dict[str, Tensor]]
) -> None:
    out, exported = tmp_path / "out", tmp_path / "exported.safetensors"
    done = varuna(
        3,
        ["--stages", "2"],
        *("--steps", str(STEPS), "--publish", str(out), "--export", str(exported), "--slow", "0.2"),
        *("--misbehave", "publish:end:3:0,publish:end:6:1", "--folder", str(tmp_path)),
    )
    assert done.code == 0, done.err
    assert len([*tmp_path.glob("done-*")]) == 2
    check(out, undisturbed)
    newest = out / "latest"
    assert newest.resolve().name == f"step-{STEPS:08d}"
    model = load_file(exported)
    assert all(torch.equal(value, model[name]) for name, value in model_in(newest).items())


@pytest.mark.nightly
def test_a_process_that_is_killed_at_any_time_leaves_what_can_be_loaded(
    tmp_path: Path, undisturbed: dict[int, dict[str, Tensor]]
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, JOB, "--steps", str(STEPS), "--publish", str(out)]
    for number in range(by_depth(2, 10)):
        is_another = partial(leads_elsewhere, out / "latest", inode(out / "latest"))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
        try:
            wait_for(is_another)
            time.sleep(0.003 * number)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        check(out, undisturbed)
        assert (out / "latest").resolve().name in {each.name for each in out.glob("step-*")}
