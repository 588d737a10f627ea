"""One script, three ways to start it, equal losses."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.depth import of_depth
from tests.scenarios.launch import json_log, processes_with, python, run, torchrun, varuna

pytestmark = pytest.mark.timeout(300)
STEPS = 10
ARGS = ("--steps", str(STEPS), "--dropout", "0.1")


@pytest.mark.usefixtures("cold_start")
def test_the_same_file_trains_the_same_in_every_way(tmp_path: Path) -> None:
    """Each launcher once as its user has it; more stages and replicas, and other ends, are tried below."""
    alone = python(*ARGS)
    assert alone.code == 0, alone.err
    assert len(alone.losses) == STEPS
    fixed = torchrun(2, *ARGS, VARUNA_STAGES="1")
    assert fixed.code == 0, fixed.err
    assert fixed.losses == pytest.approx(alone.losses, rel=1e-5)
    assert "1x2" in fixed.err
    flags, temporary = ["--stages", "2", "--json-log", str(tmp_path / "log.jsonl")], tmp_path / "temporary"
    temporary.mkdir()
    elastic = varuna(2, flags, *ARGS, "--folder", str(tmp_path), TMPDIR=str(temporary))
    assert elastic.code == 0, elastic.err
    assert f"logs in {temporary}/varuna-run-" in elastic.err
    assert [path.name for path in temporary.rglob("*") if path.name.startswith("varuna")] == []
    assert not processes_with(str(tmp_path))
    assert elastic.losses == alone.losses  # D = 1: not a bit differs
    log = json_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in log] == list(range(STEPS))
    assert {line["step"]: line["loss"] for line in log} == alone.losses
    assert log[0]["plan"] == {"stages": 2, "replicas": 1, "shape": "2x1", "micro_batch": 2, "micro_batches": 6}
    assert log[0].keys() == {"step", "loss", "generation", "training", "plan", "examples_per_s", "wall_time"}


def test_all_ranks_leave_together_when_one_breaks() -> None:
    done = torchrun(2, "--break-at", "3", VARUNA_STAGES="2")
    assert done.code == 0, done.err
    assert sorted(done.losses) == [0, 1, 2, 3]
    assert done.err.count("after the loop") == 2


@pytest.mark.parametrize(
    ("stages", "replicas"),
    of_depth(((2, 1), (4, 1), (2, 2), (1, 3)), {(2, 1)}),
)
def test_losses_and_exports_do_not_depend_on_the_plan(stages: int, replicas: int, tmp_path: Path) -> None:
    flags = ("--steps", "4", "--dropout", "0.1", "--export")
    one = python(*flags, str(tmp_path / "one"))
    assert one.code == 0, one.err
    several = torchrun(stages * replicas, *flags, str(tmp_path / "several"), VARUNA_STAGES=str(stages))
    assert several.code == 0, several.err
    assert f"{stages}x{replicas}" in several.err
    assert several.losses == pytest.approx(one.losses, rel=1e-5)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "several"))
    assert first.keys() == second.keys()
    assert {"embed.weight", "blocks.1.up.weight"} <= first.keys()
    assert "head.weight" not in first
    if replicas == 1:  # more replicas change the order of sums
        assert all(first[name].equal(second[name]) for name in first)


READS_AHEAD = """
import torch
import varuna

class Slow:
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        for _ in range(60):  # longer than a step: the loader is nearly always inside torch
            torch.randn(200, 200) @ torch.randn(200, 200)
        return {"x": torch.ones(8)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).pow(2).mean()

def sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

trainer = varuna.Trainer(model=Model, dataset=Slow(), optimizer=sgd, global_batch=4, micro_batch=2)
for step in trainer.steps(20):
    if step.index == 2:
        break
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)  # of a busy machine
def test_a_process_whose_loader_is_inside_torch_ends_in_order(tmp_path: Path) -> None:
    """A thread in C++ while the interpreter finalises aborts the process (SIGABRT): nothing may be left running."""
    (tmp_path / "job.py").write_text(READS_AHEAD)
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, tmp_path / "job.py"], check=False, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr


TWO = """
import torch
from torch import nn
import varuna

def samples(index):
    return {"input": torch.randn(4, generator=torch.Generator().manual_seed(index)), "y": torch.ones(1)}

for batch in (8, 4):
    trainer = varuna.Trainer(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        dataset=[samples(index) for index in range(24)],
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch=batch,
        micro_batch=2,
        loss=lambda output, batch: nn.functional.mse_loss(output, batch["y"]),
    )
    for step in trainer.steps(3):
        if step.is_main:
            print(batch, step.index, step.loss, flush=True)
"""


def test_trainers_one_after_another_are_jobs_of_their_own(tmp_path: Path) -> None:
    """Under torchrun they share a store: keys of the first job must not answer questions of the second."""
    script = tmp_path / "two.py"
    script.write_text(TWO)
    alone = run([sys.executable, str(script)])
    fixed = run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)], VARUNA_STAGES="2"
    )
    assert (alone.code, fixed.code) == (0, 0), fixed.err
    assert len(alone.out.splitlines()) == 6
    assert fixed.out == alone.out
