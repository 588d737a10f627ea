"""``varuna demo``: a run that loses workers, and the proof that its losses do not care."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from varuna.core.errors import UsageError
from varuna.core.version import TORCH_RANGE


def demo(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for report.json and the logs.")] = Path(
        "demo-output"
    ),
    steps: Annotated[int, typer.Option(min=60, help="Number of optimizer steps.")] = 72,
) -> None:
    """Train GPT-2 on 4 local workers, kill two of them, and check every loss.

    The model is an unmodified Hugging Face GPT2LMHeadModel with random weights;
    the text is the source code of Python's own standard library, read where it
    is installed. Nothing is downloaded.

    Each worker may use so little memory that the model does not fit into one
    pipeline stage. Two workers are killed with SIGKILL at different steps, and
    one returns later; each time the run morphs to a new plan and goes on.

    Then a plain PyTorch loop, which uses nothing of Varuna, trains the same
    model on the same samples, and the losses are compared. Exit code 0 means
    that every morph happened and that no loss differs by more than 1e-5.
    """
    absent = [name for name in ("torch", "transformers") if not _is_installed(name)]
    if absent:
        install = f"pip install 'torch{TORCH_RANGE}' transformers"
        raise UsageError(f"varuna demo needs {' and '.join(absent)}. Install: {install}")

    from varuna.extras.demo.run import run_demo

    raise typer.Exit(run_demo(output, steps))


def _is_installed(name: str) -> bool:
    return sys.modules.get(name, ...) is not None and find_spec(name) is not None


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(demo)
