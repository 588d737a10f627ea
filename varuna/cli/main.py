"""The ``varuna`` command: its commands in order, and what becomes of their errors."""

import os
import sys
import tempfile
import traceback
from typing import Annotated, Literal

import typer
from typer.completion import (  # type: ignore[attr-defined]  # it imports them for its own options
    completion_init,
    get_completion_script,
)

from varuna.cli import agent, calibrate, checkpoints, inspect, manager, opening, plan, run, run_commands
from varuna.cli.cluster.engine_options import EngineCommand
from varuna.core.errors import UsageError, VarunaError
from varuna.core.extras import extras
from varuna.core.version import __version__
from varuna.process.console import say

EXAMPLES = """Examples:

\b
varuna demo                                  kill workers, compare losses
varuna run --workers 4 train.py              train on 4 local workers
varuna run --workers 4 train.py --lr 1e-3    the script's own flags
varuna inspect --stages 4 --verify train.py  where the model is cut
varuna replay trace.csv --calibration c.json --global-batch 1024
varuna calibrate --workers 2 train.py        measure a job, once
varuna simulate --unit --stages 4 --micro-batches 5
"""

COMPLETION_EXAMPLES = """Examples:

\b
varuna completion bash >> ~/.bashrc
varuna completion zsh >> ~/.zshrc
varuna completion fish > ~/.config/fish/completions/varuna.fish
"""

app = typer.Typer(
    name="varuna",
    help="Train PyTorch models that are too big or too slow for one GPU, on machines that come and go.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"varuna {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_NO_TEMPORARY_FOLDER = (
    "no folder for temporary files can be written. In a container with a read-only root file system, mount a volume at "
    "/tmp; elsewhere, let TMPDIR name a folder."
)


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell to print for.")],
) -> None:
    """Print the lines that make a shell complete commands and options."""
    print(get_completion_script(prog_name="varuna", complete_var="_VARUNA_COMPLETE", shell=shell))


completion_init()  # a shell that completes runs the command itself, with the variable set

_PASSES_ON = {"allow_interspersed_args": False}  # what follows the script is the script's

app.command(cls=EngineCommand, epilog=run.EXAMPLES, context_settings=_PASSES_ON)(run.run)
app.command(context_settings=_PASSES_ON)(inspect.inspect)
app.command(context_settings=_PASSES_ON)(calibrate.calibrate)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.add_typer(checkpoints.app)
app.command(epilog=manager.EXAMPLES)(manager.manager)
app.command(epilog=agent.EXAMPLES)(agent.agent)
app.command("join-token")(run_commands.join_token)
app.command("list")(run_commands.list_runs)
for verb in (run_commands.status, run_commands.logs, run_commands.stop, run_commands.morph, run_commands.drain):
    app.command()(verb)
app.command("open")(opening.open_page)
for register in extras("commands"):
    register(app)
app.command(epilog=COMPLETION_EXAMPLES)(completion)


def main() -> int:
    """Entry point: errors become one message and an exit code, never a bare traceback."""
    try:
        if any(word.endswith(".py") for word in sys.argv[1:2]):
            raise UsageError(f"a script needs a command. To train: varuna run {' '.join(sys.argv[1:])}")
        app()
    except VarunaError as error:
        say(str(error))
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 1
    except Exception as error:  # noqa: BLE001 the last resort of a command line
        text = traceback.format_exc()
        try:
            with tempfile.NamedTemporaryFile("w", prefix="varuna-error-", suffix=".txt", delete=False) as file:
                file.write(text)
        except FileNotFoundError:  # where nothing can be written, Varuna itself has failed for that reason
            say(_NO_TEMPORARY_FOLDER)
            return UsageError.exit_code
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        say(f"internal error: {cause}. Please report it with the traceback in {file.name}")
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main())
