"""``varuna timeline`` and ``varuna profile``: what the ranks of a run did in some steps."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.cli.shared import options
from varuna.core.errors import FleetError, UsageError
from varuna.core.units import format_bytes, format_duration
from varuna.process.console import say

if TYPE_CHECKING:
    from varuna.core.times import StepTimeline
    from varuna.fleet.net.client import ManagerReply

EXAMPLES = """Examples:

\b
varuna timeline --step 120 --simulated
varuna timeline --run /scratch/gpt2 -o step.json
"""
PROFILE_EXAMPLES = """Examples:

\b
varuna profile --steps 120:122
varuna profile --rank 0 --rank 3 --steps 500:500 -o profiles
"""
_ASK_S = 0.5
_STILL_S = 600.0  # a run that makes no step for that time is not waited for

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Picture (.svg) or trace (.json). Default: step-N.svg."),
]


def timeline(
    run: options.RunDir = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step to show; it may lie ahead. Default: the newest.")
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Add the same step as the simulator expects it.")
    ] = False,
    output: Output = None,
) -> None:
    """Show what each rank did in one step, and when.

    FILE.svg is a picture, FILE.json a trace for https://ui.perfetto.dev.
    """
    if output is not None and output.suffix not in (".svg", ".json"):
        raise UsageError(f"{output} has no known format. End the name in .svg for a picture, in .json for a trace.")
    from varuna.extras.pictures.chrome_trace import chrome_trace
    from varuna.extras.pictures.step_picture import picture, simulation_of

    found = _timeline_of(run, step)
    trace = simulation_of(found) if simulated else None
    output = output or Path(f"step-{found.step}.svg")
    is_picture = output.suffix == ".svg"
    _write(output, (picture(found, trace) if is_picture else json.dumps(chrome_trace(found, trace))).encode())
    took_s = format_duration(max(rank.end_s for rank in found.ranks))
    expected = f", simulated {format_duration(trace.step_s)}" if trace is not None else ""
    print(f"step {found.step} of plan {found.plan.shape}: {took_s}{expected}; written to {output}")
    for rank, why in list(found.missing.items())[:3]:
        say(f"rank {rank} is missing: {why}")


def profile(
    run: options.RunDir = None,
    steps: Annotated[str, typer.Option(metavar="FIRST:LAST", help="Steps that lie ahead, at most 20.")] = "",
    rank: Annotated[list[int] | None, typer.Option(min=0, help="May be repeated. Default: 0.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the traces.")] = Path("."),
) -> None:
    """Run PyTorch's profiler on some ranks, in some steps of a living run.

    Writes one trace per rank, for https://ui.perfetto.dev. Losses stay the same.
    """
    first, last = _range(steps)
    from varuna.cli.run_commands import reached

    folder, remote = reached(run)
    ranks = sorted(set(rank or [0]))
    for number in ranks:
        _accept(remote.post("/profile", {"rank": number, "first": first, "last": last}))
    say(f"profiles steps {first} to {last} of {_listed(ranks)} of the run in {folder}")
    for number in ranks:
        data = _wait(lambda path=f"/profile/{number}/{first}": remote.get(path), last)  # type: ignore[misc]
        file = output / f"rank-{number}-steps-{first}-{last}.json.gz"
        output.mkdir(parents=True, exist_ok=True)
        _write(file, data)
        print(f"{file} ({format_bytes(len(data))})")


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _range(steps: str) -> tuple[int, int]:
    """Parse ``FIRST:LAST``, or one step."""
    first, _, last = steps.partition(":")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise UsageError(f"--steps {steps!r} names no steps. Write FIRST:LAST, such as --steps 120:122")
    return int(first), int(last or first)


def _timeline_of(run: Path | None, step: int | None) -> "StepTimeline":
    """Read a timeline from the manager, or from the folder of a run that is over."""
    from varuna.fleet.net.client import UnreachableError
    from varuna.fleet.run_folder.connection_file import find
    from varuna.fleet.run_folder.timelines import kept_steps, parse_timeline, read_timeline

    folder, access = find(run)
    say(f"the run in {folder}")
    remote = access.remote()
    try:
        path = "/timeline" if step is None else f"/timeline?step={step}"
        answer = remote.get(path)
        if answer.status == 202:  # from now on it is this one, whatever the newest is by then
            path = f"/timeline?step={json.loads(answer.body)['step']}"
        return parse_timeline(_wait(lambda: remote.get(path), step), "the manager's answer")
    except UnreachableError:
        kept = kept_steps(folder)
        wanted = kept[-1] if step is None and kept else step
        found = read_timeline(folder, wanted) if wanted is not None else None
        if found is not None:
            return found
        recorded = f"Recorded: {', '.join(map(str, kept))}. Name one of these with --step" if kept else "None was"
        which = "no step" if step is None else f"step {step}"
        raise FleetError(
            f"the run in {folder} has no manager now, and {which} was recorded in its folder. {recorded}."
        ) from None


def _wait(ask: "Callable[[], ManagerReply]", step: int | None) -> bytes:
    """Ask until the answer is there, while the run makes steps.

    Raises:
        FleetError: the manager refuses, or the run stands still.
    """
    newest, since_s, is_told = -1, time.monotonic(), False
    while True:
        answer = ask()
        _accept(answer)
        if answer.status != 202:
            return answer.body
        told = json.loads(answer.body)
        if told["newest"] != newest:
            newest, since_s = told["newest"], time.monotonic()
        elif time.monotonic() > since_s + _STILL_S:
            raise FleetError(
                f"waited for step {told['step']}, but the run has made no step for {_STILL_S / 60:.0f} minutes: the "
                f"newest is {newest}. Look at `varuna status`."
            )
        if not is_told and told["step"] > newest:
            say(f"waits for step {told['step']}; the newest is {newest}. Ctrl-C gives up")
            is_told = True
        time.sleep(_ASK_S)


def _accept(answer: "ManagerReply") -> None:
    """Let answers through that are no errors.

    Raises:
        FleetError: it is one.
    """
    from varuna.cli.run_commands import accept

    if answer.status == 404 and not answer.body.startswith(b"{"):
        raise FleetError(
            "the manager of this run is of an older version of Varuna, which records no steps. Restart the run with "
            "this version."
        )
    accept(answer.status, answer.body)


def _write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}. Name another place with -o.") from error


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog=EXAMPLES)(timeline)
    app.command(epilog=PROFILE_EXAMPLES)(profile)
