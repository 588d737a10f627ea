"""A learner and its rollout processes are killed: the losses are those of a plain loop over the order it wrote down."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.scenarios.launch import environment, run, varuna_command
from tests.waiting import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.nightly]
EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts"
STEPS, BATCH, STALENESS = 14, 64, 6


@contextmanager
def rolling(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, str(EXAMPLE / "roll.py"), str(folder), "--pause", "0.2"]
    with (folder / "roll.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def end_and_replace(folder: Path, ended: list[int]) -> None:
    """Kill the rollout processes, one after the other, while the learner needs what they make."""
    with rolling(folder) as first, rolling(folder) as second:
        for step, process in ((3, first), (6, second)):
            wait_for((folder / f"rollouts/order/step-{step:08d}.json").exists)
            process.send_signal(signal.SIGKILL)
            ended.append(process.wait())
    with rolling(folder):
        wait_for((folder / f"rollouts/order/step-{STEPS - 1:08d}.json").exists)


def orders(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rollouts/order/step-{step:08d}.json").read_text()) for step in range(STEPS)]


def replayed(folder: Path) -> list[float]:
    """Losses of plain PyTorch over the recorded order."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from policy import Policy, clipped_loss
    finally:
        sys.path.remove(str(EXAMPLE))
    torch.manual_seed(0)
    policy, losses = Policy(), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3, eps=1e-5)
    for order in orders(folder):
        rows = [(load_file(folder / "rollouts" / name), row) for name, row in order["samples"]]
        batch = {key: torch.stack([samples[key][row] for samples, row in rows]) for key in rows[0][0]}
        loss = clipped_loss(policy(batch["state"]), batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return losses


def test_rollout_processes_and_a_worker_die_and_each_sample_counts_once(tmp_path: Path) -> None:
    ended: list[int] = []
    others = threading.Thread(target=end_and_replace, args=(tmp_path, ended))
    others.start()
    script = str(Path(__file__).with_name("learner.py"))
    options = ("--steps", str(STEPS), "--global-batch", str(BATCH), "--staleness", str(STALENESS))
    done = run(
        varuna_command(2, ["--stages", "2"], str(tmp_path), "F:begin:5:1", *options, script=script),
        PYTHONPATH=str(EXAMPLE.parents[1]),
    )
    assert done.code == 0, done.err
    others.join()
    assert ended == [-signal.SIGKILL] * 2
    assert (tmp_path / "done-0").exists()
    used = [(step, name, row) for step, order in enumerate(orders(tmp_path)) for name, row in order["samples"]]
    assert len({(name, row) for _, name, row in used}) == STEPS * BATCH
    assert all(0 <= step - int(name[8:16]) <= STALENESS for step, name, _ in used)
    assert max(int(name[8:16]) for _, name, _ in used) >= STEPS - 1 - STALENESS
    assert [done.losses[step] for step in range(STEPS)] == pytest.approx(replayed(tmp_path), rel=1e-4, abs=2e-6)
