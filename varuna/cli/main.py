"""The ``varuna`` command: parses, calls, prints. What a command needs is imported when it runs."""

import os
import sys
import tempfile
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from varuna.cli import checkpoints, cluster, doctor, opening, options, run_commands
from varuna.core.errors import UsageError, VarunaError
from varuna.core.units import parse_bytes
from varuna.core.version import __version__

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

RUN_EXAMPLES = """Examples:

\b
varuna run --workers 4 train.py
varuna run --workers 4 --memory-per-worker 2GiB train.py --lr 1e-3
varuna run --workers 4 --stages 2 --json-log steps.jsonl train.py
"""

PLAN_EXAMPLES = """Examples:

\b
varuna plan train.py --gpus 36
varuna plan train.py --gpus 36 --calibration calibration.json -- --lr 1e-3
varuna plan --calibration examples/calibrations/gpt2-8.3b-v100.json --gpus 128 --json
"""

SIMULATE_EXAMPLES = """Examples:

\b
varuna simulate --unit --stages 4 --micro-batches 5 --policy varuna
varuna simulate --unit --stages 8 --micro-batches 32 --network 0.05,0.4,0.2 --svg step.svg
varuna simulate --calibration calibration.json --gpus 64 --global-batch 8192 --json
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


class ReplayPolicy(StrEnum):
    """What a replayed job does when machines come and go."""

    MORPH = "morph"
    RESTART = "restart"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"varuna {__version__}")
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
    script: Annotated[Path, typer.Argument(help="Training script: the same file that runs with `python train.py`.")],
    args: options.ScriptArguments = None,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Worker processes to keep alive.")] = 1,
    stages: options.Stages = None,
    memory_per_worker: options.MemoryPerWorker = None,
    json_log: options.JsonLog = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep logs and journal here. Default: only if the run fails.")
    ] = None,
    new: options.New = False,
    overwrite: options.Overwrite = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the status page on loopback; 0 picks a free one.")
    ] = 0,
) -> None:
    """Train SCRIPT on N local workers; workers that die are replaced.

    Only the main worker's standard output is shown. Morphs and warnings go to
    standard error. With a checkpoint_dir in the script, the same command resumes.
    Ctrl-C stops after the current step; a second Ctrl-C stops at once.
    """
    if not script.is_file():
        raise UsageError(f"no script at {script}. Name a Python file: varuna run --workers {workers} train.py")
    options.check_replacing(new, overwrite)
    memory_bytes = options.memory_bytes_of(memory_per_worker)

    from rich.console import Console

    from varuna.fleet.manager.local_run import run_job
    from varuna.observe.progress import Progress, RunView
    from varuna.process.output_pump import unread_allowed

    with unread_allowed(), Progress(Console(stderr=True), live_line=False) as progress:
        exit_code = run_job(
            script,
            args or [],
            workers=workers,
            stages=stages,
            memory_bytes=memory_bytes,
            json_log=json_log,
            run_dir=run_dir,
            new=new,
            overwrite=overwrite,
            port=port,
            on_event=RunView(progress),
        )
    raise typer.Exit(exit_code)


@app.command(context_settings={"allow_interspersed_args": False})
def inspect(
    script: options.JobScript,
    args: options.ScriptArguments = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Group the sections into P stages.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with plain PyTorch; exit code 1 if it differs.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run a step; report code that needs values of several stages.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show where Varuna cuts the model of SCRIPT, and what crosses each cut."""
    from varuna.cli.inspect import inspect_job

    if not inspect_job(script, args or [], stages=stages, verifies=verify, traces=trace, as_json=as_json):
        raise typer.Exit(1)


@app.command(context_settings={"allow_interspersed_args": False})
def calibrate(
    script: options.JobScript,
    args: options.ScriptArguments = None,
    workers: Annotated[
        int,
        typer.Option("--workers", "-n", min=1, help="Processes that measure at once; with 1, no network is measured."),
    ] = 2,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the calibration.")] = Path(
        "calibration.json"
    ),
) -> None:
    """Measure the job of SCRIPT on this hardware, once, for plans of any size.

    Times the model's sections, links, all-reduces and a few real steps. Take as
    many workers as will share this machine.
    """
    from varuna.cli.calibrate import calibrate_job

    calibrate_job(script, args or [], workers=workers, output=output)


@app.command(epilog=PLAN_EXAMPLES)
def plan(
    script: Annotated[
        Path | None, typer.Argument(help="Training script; it runs until it asks its Trainer for steps.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured or written by hand. Default: nominal figures.")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Plan from what the steps of this run took.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", "-n", min=1, help="Number of GPUs.")] = ...,  # type: ignore[assignment]
    gpus_per_vm: Annotated[int | None, typer.Option(min=1, help="GPUs per VM, if not the calibration's.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per step. Default: the script's, or 8192.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per micro-batch. Default: the planner's choice.")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Pipeline stages P. Default: all that fit.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory per GPU, such as 16GB. Default: the calibration's.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="DOLLARS", help="Price per GPU and hour. Default: the calibration's.")
    ] = None,
    objective: Annotated[
        str,
        typer.Option("--objective", metavar="time|dollar", help="The fastest step, or the most examples per dollar."),
    ] = "time",
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Keep optimizer state in host memory, like the Trainer's.")
    ] = False,
    shard_optimizer: Annotated[
        bool,
        typer.Option("--shard-optimizer", help="Distribute optimizer state over replicas, like the Trainer's option."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Rank the plans for N GPUs, and show what each step spends its time on.

    With --calibration this needs neither torch nor a GPU. Nothing is started.
    """
    if objective not in ("time", "dollar"):
        raise UsageError(f"--objective {objective} is unknown. Choose time or dollar.")

    from varuna.cli.plan import calibration_of_run, plan_command

    if calibration is not None and from_run is not None:
        raise UsageError("--calibration and --from-run both name what to plan from. Give one of them.")
    plan_command(
        script,
        args or [],
        calibration=calibration if from_run is None else calibration_of_run(from_run),
        gpus=gpus,
        gpus_per_vm=gpus_per_vm,
        global_batch=global_batch,
        micro_batch=micro_batch,
        stages=stages,
        memory_bytes=parse_bytes(memory, "--memory") if memory else None,
        price_per_hour=price,
        objective="dollar" if objective == "dollar" else "time",
        offload_optimizer=offload_optimizer,
        shard_optimizer=shard_optimizer,
        as_json=as_json,
    )


@app.command(epilog=SIMULATE_EXAMPLES)
def simulate(
    unit: Annotated[
        bool, typer.Option("--unit", help="Equal stages, in units of one forward: F = R = I = W = 1, B = 2.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Simulate the best plan for this calibration, in seconds.")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Number of pipeline stages P.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Number of micro-batches; with --unit.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs to plan for; with --calibration.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Examples per step; with --calibration.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per micro-batch. Default: the planner's choice.")
    ] = None,
    gpus_per_vm: Annotated[int | None, typer.Option(min=1, help="GPUs per VM, if not the calibration's.")] = None,
    policy: Annotated[str, typer.Option(help="One of gpipe, 1f1b, varuna, varuna-strict and adaptive.")] = "adaptive",
    network: Annotated[
        str | None,
        typer.Option(metavar="LATENCY,SERIALISATION,JITTER", help="Of each link, in units of a forward; with --unit."),
    ] = None,
    split_last: Annotated[
        int | None, typer.Option(min=0, help="How many of the last backwards run in two halves.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the jitter.")] = 0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the step to this file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Simulate one step of a pipeline, with the policies that the engine runs.

    Prints the length of the step and, for each stage, how long it computes and
    waits, and what it holds.
    """
    from varuna.cli.simulate import Options, simulate_command

    chosen = Options(
        unit=unit,
        calibration=calibration,
        stages=stages,
        micro_batches=micro_batches,
        gpus=gpus,
        global_batch=global_batch,
        micro_batch=micro_batch,
        gpus_per_vm=gpus_per_vm,
        policy=policy,
        network=network,
        split_last=split_last,
        seed=seed,
    )
    simulate_command(chosen, as_json=as_json, svg=svg)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="CSV: `time, add|remove, node` or `time, number of nodes`.")],
    calibration: Annotated[Path, typer.Option(metavar="FILE", help="Calibration of the model on the hardware.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Examples per step.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Number of workers per node.")] = 1,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per micro-batch. Default: the planner's choice.")
    ] = None,
    policy: Annotated[
        ReplayPolicy,
        typer.Option(
            help="morph; or restart, which kills all workers and reads the last checkpoint, with morph for comparison."
        ),
    ] = ReplayPolicy.MORPH,
    notice: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How early a node gives notice.")] = 0.0,
    as_json: options.AsJson = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw examples per second over time.")] = None,
) -> None:
    """Replay a recorded cluster in virtual time, with the real state machine and planner.

    Goodput is the number of committed examples relative to a run that is always
    on the best plan and whose morphs cost nothing. Times in the trace are
    milliseconds or timestamps.
    """
    from varuna.calibration.file import read_calibration
    from varuna.cli.replay import replay_trace

    replay_trace(
        trace,
        read_calibration(calibration),
        gpus_per_node=gpus_per_node,
        global_batch=global_batch,
        micro_batch=micro_batch,
        policy=policy.value,
        notice_s=notice,
        as_json=as_json,
        svg=svg,
    )


@app.command()
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
    from varuna.demo.run import run_demo

    raise typer.Exit(run_demo(output, steps))


app.add_typer(checkpoints.app)
app.command(epilog=cluster.MANAGER_EXAMPLES)(cluster.manager)
app.command(epilog=cluster.AGENT_EXAMPLES)(cluster.agent)
app.command("join-token")(run_commands.join_token)
for verb in (run_commands.status, run_commands.logs, run_commands.stop, run_commands.morph, run_commands.drain):
    app.command()(verb)
app.command("open")(opening.open_page)
app.command()(doctor.doctor)


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
