"""The ``varuna`` command: parses, calls, prints. What a command needs is imported when it runs."""

import os
import sys
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from varuna.core.errors import UsageError, VarunaError
from varuna.core.units import parse_bytes

EXAMPLES = """Examples:

\b
varuna demo                                  kill workers, compare losses
varuna run --workers 4 train.py              train on 4 local workers
varuna run --workers 4 train.py --lr 1e-3    the script's own flags
varuna inspect --stages 4 --verify train.py  where the model is cut
"""

RUN_EXAMPLES = """Examples:

\b
varuna run --workers 4 train.py
varuna run --workers 4 --memory-per-worker 2GiB train.py --lr 1e-3
varuna run --workers 4 --stages 2 --json-log steps.jsonl train.py
"""

app = typer.Typer(
    name="varuna",
    help="Train PyTorch models too big or too slow for one GPU on machines that come and go.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"varuna {version('varuna')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=RUN_EXAMPLES, context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="Training script; the same file that runs as `python train.py`.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Worker processes to keep alive.")] = 1,
    stages: Annotated[
        int | None,
        typer.Option(min=1, envvar="VARUNA_STAGES", help="Pipeline stages P, instead of the planner's choice."),
    ] = None,
    memory_per_worker: Annotated[
        str | None,
        typer.Option(metavar="SIZE", envvar="VARUNA_MEMORY_PER_WORKER", help="Plans must fit in this, such as 2GiB."),
    ] = None,
    json_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append one JSON line per committed step.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start afresh instead of resuming from the checkpoints.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --new: replace existing checkpoints.")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the manager on loopback; 0 picks a free one.")
    ] = 0,
) -> None:
    """Train SCRIPT on N local workers; dead ones are replaced and training goes on.

    Only the main worker's standard output is shown. Morphs and warnings go to
    standard error. With a checkpoint_dir in the script, the same command resumes.
    """
    if not script.is_file():
        raise UsageError(f"no script at {script}. Name a Python file: varuna run --workers {workers} train.py")
    if overwrite and not new:
        raise UsageError("--overwrite says what --new may replace. Give both: --new --overwrite")
    memory_bytes = parse_bytes(memory_per_worker, "--memory-per-worker") if memory_per_worker else None

    from rich.console import Console

    from varuna.fleet.run import run_job
    from varuna.observe.progress import Progress, RunView

    with Progress(Console(stderr=True), live_line=False) as progress:
        exit_code = run_job(
            script,
            args or [],
            workers=workers,
            stages=stages,
            memory_bytes=memory_bytes,
            json_log=json_log,
            new=new,
            overwrite=overwrite,
            port=port,
            on_event=RunView(progress),
        )
    raise typer.Exit(exit_code)


@app.command(context_settings={"allow_interspersed_args": False})
def inspect(
    script: Annotated[Path, typer.Argument(help="Training script; it runs until it asks its Trainer for steps.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Group the sections into P stages.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run split against unsplit; print the errors.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Dry-run a whole step; print what crosses stages unseen.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where Varuna cuts the model of SCRIPT, and what crosses each cut."""
    from varuna.cli.inspect import inspect_job

    inspect_job(script, args or [], stages=stages, verifies=verify, traces=trace, as_json=as_json)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where report.json and the logs go.")] = Path(
        "demo-output"
    ),
    steps: Annotated[int, typer.Option(min=60, help="Optimizer steps to train.")] = 72,
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
    from varuna.demo.run import run_demo

    raise typer.Exit(run_demo(output, steps))


def main() -> int:
    """Entry point: errors become one message and an exit code, never a bare traceback."""
    try:
        app()
    except VarunaError as error:
        print(f"varuna: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 1
    except Exception as error:  # noqa: BLE001 the last resort of a command line
        with tempfile.NamedTemporaryFile("w", prefix="varuna-error-", suffix=".txt", delete=False) as file:
            file.write(traceback.format_exc())
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        print(f"varuna: internal error: {cause}. Please report it with the traceback in {file.name}", file=sys.stderr)
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main())
