"""The specification in one file computes the product's bits, and a loss costs it one step at most: real processes."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import varuna
from examples import nano_varuna as nano
from tests.depth import nightly, nightly_rows
from tests.scenarios.nano_runs import JOB, PADDED
from tests.unit.engine.models import SmallLanguage, adamw
from varuna.data.order import sample_index
from varuna.testing import run

ROOT = Path(__file__).parents[2]
Train = Callable[..., dict[str, Any]]


class InOrder:
    """Samples so that the product, which shuffles otherwise, reads what the other one reads."""

    def __init__(self) -> None:
        self._samples = PADDED()
        size = len(self._samples)
        numbers = [{"number": torch.tensor(index)} for index in range(size)]
        micro_batches = [(step, j) for step in range(JOB.steps) for j in range(JOB.micro_batches)]
        order = torch.cat([nano.read(JOB, numbers, step, j)["number"] for step, j in micro_batches]).tolist()
        self._of = {sample_index(place, size=size, seed=JOB.seed): number for place, number in enumerate(order)}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[self._of.get(index, index)]


def script() -> None:
    trainer = varuna.Trainer(SmallLanguage, InOrder(), adamw, JOB.global_batch, micro_batch=JOB.micro_batch)
    for _ in trainer.steps(JOB.steps):
        pass


@pytest.fixture(scope="module")
def of_the_product() -> dict[tuple[int, int], list[float]]:
    """Losses by P and D."""
    captures: list[object] = []
    plans = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 3)]
    return {(p, d): list(run(script, workers=p * d, stages=p, captures=captures).losses) for p, d in plans}


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    """Trains under a plan, with faults; torch is imported once for all runs."""
    command = [sys.executable, "-m", "tests.scenarios.nano_runs"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(stages: int, replicas: int, *faults: tuple[Any, ...], dropout: bool = False) -> dict[str, Any]:
            asked = {"stages": stages, "replicas": replicas, "faults": faults, "dropout": dropout}
            print(json.dumps(asked), file=process.stdin, flush=True)
            found: dict[str, Any] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            return found

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def undisturbed(train: Train) -> list[float]:
    """Losses of one worker."""
    losses: list[float] = train(1, 1)["losses"]
    return losses


@pytest.mark.parametrize("stages", [*nightly(1, 2), 3])
def test_its_losses_are_the_products_bits_over_stages(
    of_the_product: dict[tuple[int, int], list[float]], train: Train, stages: int
) -> None:
    """Same model, data, seed and optimizer; the head is tied to the embedding, and targets are padded."""
    assert train(stages, 1)["losses"] == of_the_product[stages, 1]


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), *nightly_rows((1, 3))])
def test_over_replicas_they_are_the_products_bits_too(
    of_the_product: dict[tuple[int, int], list[float]], train: Train, stages: int, replicas: int
) -> None:
    """Both add up the sums of replicas in the order of replicas."""
    assert train(stages, replicas)["losses"] == of_the_product[stages, replicas]


@pytest.mark.parametrize(
    ("plan", "rank", "step", "place"),
    [
        ("2x2", 1, 1, "B"),
        ("3x1", 1, 2, "apply"),
        *nightly_rows(
            *(("2x2", rank, 1, place) for rank in (0, 3) for place in ("F", "reduce", "vote", "applied")),
            *(("3x1", rank, 0, place) for rank in range(3) for place in ("F", "B", "keep", "vote", "applied")),
            ("3x1", 1, 1, "R"),
            ("4x1", 0, 3, "apply"),
            ("1x3", 2, 1, "reduce"),
            ("1x2", 0, 0, "vote"),
            ("2x1", 1, 3, "applied"),
        ),
    ],
)
def test_a_lost_worker_costs_one_step_at_most(
    undisturbed: list[float], train: Train, plan: str, rank: int, step: int, place: str
) -> None:
    """And no bit, where D stays 1; with more replicas, what the order of a sum changes."""
    stages, replicas = map(int, plan.split("x"))
    found = train(stages, replicas, (rank, step, place))
    assert len(found["lost"]) == 1
    (_, first), (after, second) = found["generations"]
    assert (first, second) in ((0, step), (0, step + 1)), "a step that all had applied runs again"
    is_exact = replicas == 1 and after.endswith("x1")
    assert found["losses"] == (undisturbed if is_exact else pytest.approx(undisturbed, rel=1e-6))


@pytest.mark.nightly
def test_a_frozen_worker_is_lost_when_its_lease_ends(undisturbed: list[float], train: Train) -> None:
    found = train(2, 2, (2, 1, "F", int(signal.SIGSTOP)))
    assert "silent" in found["lost"][0]
    assert found["losses"] == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.nightly
def test_dropout_is_drawn_alike_in_all_plans(train: Train) -> None:
    alone = train(1, 1, dropout=True)["losses"]
    assert train(3, 1, dropout=True)["losses"] == alone
    assert train(2, 2, (0, 1, "B"), dropout=True)["losses"] == pytest.approx(alone, rel=1e-6)


@pytest.mark.nightly
def test_a_second_loss_while_state_moves_ends_well_or_in_words(undisturbed: list[float], train: Train) -> None:
    """Each of four replicas has everything; in one pipeline, a rank and the one that keeps its copy have something."""
    again = int(signal.SIGKILL), 2
    assert train(1, 4, (3, 1, "B"), (2, 1, "move", *again))["losses"] == pytest.approx(undisturbed, rel=1e-6)
    assert "nobody has sections" in train(3, 1, (1, 1, "B"), (1, 1, "move", *again))["error"]


@pytest.mark.timeout(600)
def test_the_demonstration_shows_the_losses_of_a_plain_loop() -> None:
    command = [sys.executable, str(ROOT / "examples" / "nano_varuna.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.findall(r"^step (\d+): plan (\w+) ", done.stdout, re.M) == [("0", "2x2"), ("5", "3x1")]
    assert re.search(r"^w1 \(plan 2x2, rank 1, stage 1\), step 5, action 1B\d: lost, ", done.stdout, re.M)
    rows = re.findall(r"^ *\d+  ([\d.]+)  ([\d.]+) ", done.stdout, re.M)
    assert len(rows) == nano.DEMONSTRATION.steps
    assert [float(ours) for ours, _ in rows] == pytest.approx([float(plain) for _, plain in rows], rel=1e-6)
    assert float(rows[-1][0]) < float(rows[0][0]) - 1, "it learns"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "7x1"], "6 sections and 8 micro-batches are too few for 7 stages"),
        (["--plan", "two"], "invalid literal"),
        (["--fault", "3@99:B"], "a fault did not happen"),
        (["--plan", "1x1", "--fault", "0@1:F"], "all workers are lost"),
    ],
)
@pytest.mark.timeout(600)
def test_what_the_demonstration_cannot_do_it_says(arguments: list[str], words: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "nano_varuna.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_workers_end_with_their_manager() -> None:
    command = [sys.executable, "-u", str(ROOT / "examples" / "nano_varuna.py"), "--fault"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as manager:
        assert manager.stdout is not None
        assert next(line for line in manager.stdout if "plan 2x2" in line)
        manager.kill()
        assert manager.stdout.read() is not None, "it ends when no worker has it open"
