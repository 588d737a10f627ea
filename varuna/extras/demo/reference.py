"""The proof's other half: a plain PyTorch loop in its own process, on the samples that the run used."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from varuna.core.errors import WorkerError
from varuna.data import sample_index


def sample_order(steps: int, *, global_batch: int, size: int, seed: int) -> list[list[int]]:
    """Samples of each step: what every P x D of the run trained on.

    Args:
        steps: of the run.
        global_batch: M, examples per step.
        size: of the dataset.
        seed: of the run.

    Returns:
        For each step, the dataset indices of its M samples.
    """
    return [
        [sample_index(step * global_batch + place, size=size, seed=seed) for place in range(global_batch)]
        for step in range(steps)
    ]


def train_reference(
    script: Path, order: Sequence[Sequence[int]], flags: Sequence[str], folder: Path, show: Callable[[str], None]
) -> list[float]:
    """Run ``script`` over ``order`` and return its losses.

    Args:
        script: reference.py of the example.
        order: samples of each step.
        flags: the model's flags, as in the run.
        folder: where its input, output and errors go.
        show: takes a progress line.

    Raises:
        WorkerError: the script failed.
    """
    order_file, losses_file, errors_file = (folder / name for name in ("order.json", "losses.json", "errors.txt"))
    order_file.write_text(json.dumps(order))
    command = [sys.executable, str(script), "--order", str(order_file), "--out", str(losses_file), *flags]
    with (
        errors_file.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for done, line in enumerate(process.stdout, start=1):
                show(f"plain PyTorch  step {done}/{len(order)}  loss {line.split()[-1]}")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise WorkerError(f"the reference loop ended with exit code {process.returncode}; its errors: {errors_file}")
    losses = json.loads(losses_file.read_text())
    assert isinstance(losses, list)
    return [float(loss) for loss in losses]
