"""Commands for a running job: list, status, logs, stop, morph, drain, join-token."""

import codecs
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna.cli.shared import options
from varuna.core.errors import FleetError, UsageError
from varuna.core.plain_text import plain
from varuna.core.units import format_duration
from varuna.process.console import say

if TYPE_CHECKING:
    from varuna.fleet.net.client import ManagerRemote

_WATCH_S = 1.0
_FOLLOW_S = 0.5
_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 2**20


def list_runs(as_json: options.AsJson = False) -> None:
    """List your runs on this machine, the newest first."""
    from varuna.fleet.run_folder.connection_file import known_runs

    runs: list[dict[str, Any]] = []
    for known in known_runs():
        ended = "" if known.is_live else _has_ended(known.folder)
        state = "running" if known.is_live else f"ended with {ended.splitlines()[0]}" if ended else "without a manager"
        runs.append({"run": str(known.folder), "started_s": known.started_s, "state": state})
    if as_json:
        print(json.dumps(runs, indent=1))
        return
    if not runs:
        say("no run of this user is on this machine")
    for row in runs:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["started_s"]))
        print(plain(f"{started}  {row['run']}  {row['state']}"))


def status(
    run: options.RunDir = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Stay, and show the run as it goes on; Ctrl-C ends the view.")
    ] = False,
    as_json: options.AsJson = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Say one line, for cron and probes. Exit code 0: it trains; 1: it stands still, or has failed; 2: it "
            "has no checkpoint as new as --checkpoint-age; 3: its manager is away.",
        ),
    ] = False,
    for_s: Annotated[
        float, typer.Option("--for", metavar="SECONDS", min=0, help="With --check: stand still for longer than this.")
    ] = 300.0,
    checkpoint_age_s: Annotated[
        float | None,
        typer.Option("--checkpoint-age", metavar="SECONDS", min=0, help="With --check: a newer checkpoint is there."),
    ] = None,
) -> None:
    """Show the plan, steps, machines and workers of a run."""
    if check:
        if watch or as_json:
            raise UsageError("--check says one line: give it without --watch and --json.")
        raise typer.Exit(_checked(run, for_s, checkpoint_age_s))
    from varuna.fleet.net.client import UnreachableError
    from varuna.fleet.run_folder.connection_file import find

    folder, access = find(run)
    remote = access.remote()
    try:
        said = _status(remote)
    except UnreachableError as error:
        text, code = _gone(folder, error)
        if code or as_json:
            raise FleetError(text) from error
        print(plain(text))
        return
    if as_json:
        _check(watch, "--watch")
        print(json.dumps(said, indent=1))
        return
    from rich.live import Live

    from varuna.observe.overview import overview
    from varuna.process.plain_console import PlainConsole

    console = PlainConsole()
    is_plain = not console.encoding.lower().startswith("utf")
    if not watch or not console.is_terminal:
        say(f"the run in {folder}")
        console.print(overview(said, console.width, plain=is_plain))
        return
    from rich.console import Group, RenderableType
    from rich.text import Text

    from varuna.observe.live_view import live_view

    def seen() -> RenderableType:
        return live_view(_status(remote), console.width, console.height - 2, plain=is_plain)

    picture = seen()
    try:
        with Live(picture, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_S)
                try:
                    picture = seen()
                    live.update(picture, refresh=True)
                except UnreachableError as error:
                    live.update(Group(picture, Text(_gone(folder, error)[0], style="red")), refresh=True)
                    if _has_ended(folder):
                        return
    except KeyboardInterrupt:
        return


def _checked(run: Path | None, for_s: float, checkpoint_age_s: float | None) -> int:
    """Say how a run is, and return the exit code that says so."""
    from varuna.fleet.net.client import UnreachableError
    from varuna.fleet.run_folder.connection_file import find
    from varuna.observe.health import health

    folder, access = find(run)
    try:
        found = health(_status(access.remote()), time.time(), for_s=for_s, checkpoint_age_s=checkpoint_age_s)
    except UnreachableError as error:
        text, code = _gone(folder, error)
        print(plain(text.splitlines()[0]))
        return code
    print(plain(found.text))
    return found.exit_code


def logs(
    run: options.RunDir = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Rank in the newest generation. Default: 0.")] = None,
    worker: Annotated[str, typer.Option(metavar="NAME", help="Name of a worker, also of one that is gone.")] = "",
    first_failure: Annotated[
        bool, typer.Option("--first-failure", help="The worker that failed or was lost first, and why.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more output.")] = False,
) -> None:
    """Print the output of a worker, even if its machine is gone."""
    if (rank is not None) + bool(worker) + first_failure > 1:
        raise UsageError("--rank, --worker and --first-failure each name a worker. Give one of them.")
    from varuna.fleet.net.client import UnreachableError
    from varuna.fleet.run_folder.connection_file import find

    folder, access = find(run)
    say(f"the run in {folder}")
    remote = access.remote()
    try:
        name = worker or _worker(_status(remote), rank, first_failure)
        _print_log(remote, name, f"-{_TAIL_BYTES}" if first_failure else "0", follow)
    except UnreachableError:
        _print_kept_log(folder, worker, rank, first_failure)
    except KeyboardInterrupt:
        return


class _PlainBytes:
    """Writes what a machine has said to standard output, as plain text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two pieces

    def write(self, data: bytes) -> None:
        sys.stdout.buffer.write(plain(self._decoder.decode(data), returns=True).encode())
        sys.stdout.buffer.flush()


def _print_log(remote: "ManagerRemote", worker: str, offset: str, follow: bool) -> None:
    shown = _PlainBytes()
    while True:
        newest, text = _chunk(remote, worker, offset)
        offset = str(newest)
        shown.write(text)
        if not text:
            if not follow:
                return
            time.sleep(_FOLLOW_S)


def _print_kept_log(folder: Path, worker: str, rank: int | None, first_failure: bool) -> None:
    """Print a log that the manager, which is gone, has kept."""
    from varuna.fleet.page.chronicle import Chronicle
    from varuna.fleet.run_folder.past_events import newest_events

    chronicle = Chronicle()
    for event in newest_events(folder, steps=0).events:
        chronicle.add_event(event, 0.0)
    members = () if chronicle.record is None else chronicle.record.members
    known = {"failures": chronicle.failures, "members": members, "generation": "the last one"}
    name = worker or _worker(known, rank, first_failure)
    for path in (folder / "logs" / f"{name}.log", folder / f"{name}.log"):
        if path.is_file():
            shown = _PlainBytes()
            with path.open("rb") as file:
                while text := file.read(_CHUNK_BYTES):
                    shown.write(text)
            return
    raise FleetError(f"no log of worker {name} was kept in {folder}")


def stop(run: options.RunDir = None) -> None:
    """Stop a run after the current step, with a checkpoint, and release its machines."""
    folder, remote = reached(run)
    ask(remote, "/stop", {})
    print(f"the run in {folder} will stop after the current step")


def morph(run: options.RunDir = None) -> None:
    """Switch to the best plan for the current workers, now."""
    folder, remote = reached(run)
    ask(remote, "/morph", {})
    print(f"the run in {folder} was asked for a morph; see `varuna status`")


def drain(
    node: Annotated[str, typer.Argument(help="Name of the machine in `varuna status`.")],
    run: options.RunDir = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not trust it any more: revoke its secret and drop its workers at once.")
    ] = False,
) -> None:
    """Release a machine without losing a step: its state moves, then its agent exits.

    If the machine's agent is away, its secret is revoked without waiting.
    """
    folder, remote = reached(run)
    said = ask(remote, "/drain", {"node": node, "now": now})
    done = "was removed from" if said["accepted"] == "send away" else "will be released by"
    print(f"node {node} {done} the run in {folder}")


def join_token(
    run: options.RunDir = None,
    uses: Annotated[int, typer.Option(min=1, help="Number of machines that may join with it.")] = 1,
    hours: Annotated[float, typer.Option(min=0.01, help="How long it is valid.")] = 24.0,
    void: Annotated[bool, typer.Option("--void", help="Revoke all JOIN strings printed before; print none.")] = False,
) -> None:
    """Print another JOIN string, for more machines."""
    folder, remote = reached(run)
    say(f"for the run in {folder}")
    if void:
        print(f"{ask(remote, '/tokens/void', {})['void']} tokens were revoked; machines that have joined stay")
        return
    print(ask(remote, "/tokens", {"uses": uses, "life_s": hours * 3600})["join"])


def reached(run: Path | None) -> "tuple[Path, ManagerRemote]":
    """The folder of a run, and its manager.

    Raises:
        FleetError: the run is over.
    """
    from varuna.fleet.net.client import UnreachableError
    from varuna.fleet.run_folder.connection_file import find

    folder, access = find(run)
    remote = access.remote()
    try:
        remote.get("/status")
    except UnreachableError as error:
        raise FleetError(_gone(folder, error)[0]) from error
    return folder, remote


def _gone(folder: Path, error: Exception) -> tuple[str, int]:
    """Reason for which a manager does not answer, and the exit code of a check: the run is over, or it is broken."""
    from varuna.core.errors import VarunaError
    from varuna.fleet.run_folder.past_events import newest_step
    from varuna.observe.health import Health

    if ended := _has_ended(folder):
        return f"the run in {folder} has ended with {ended}", int(not ended.startswith("exit code 0:"))
    try:
        newest = newest_step(folder)
    except VarunaError:
        newest = None
    knew = ""
    if newest is not None:
        knew = f" It knew of step {newest.step + 1} {format_duration(time.time() - newest.time_s)} ago."
    text = f"the manager is away: {error}{knew} The run in {folder} has not ended: start the same command again"
    return f"{text} to continue it.", int(Health.MANAGER_AWAY)


def _has_ended(folder: Path) -> str:
    """Exit code and reason as text; empty if the run has not ended."""
    from varuna.core.errors import VarunaError
    from varuna.fleet.run_folder.past_events import ending

    try:
        ended = ending(folder)
    except VarunaError:
        return ""
    return f"exit code {ended.exit_code}: {ended.text}" if ended is not None else ""


def _status(remote: "ManagerRemote") -> dict[str, Any]:
    answer = remote.get("/status")
    accept(answer.status, answer.body)
    status: dict[str, Any] = json.loads(answer.body)
    return status


def ask(remote: "ManagerRemote", path: str, body: Mapping[str, object]) -> dict[str, Any]:
    """Ask the manager for something, and return its answer.

    Raises:
        FleetError: it refuses.
    """
    answer = remote.post(path, body)
    accept(answer.status, answer.body)
    said: dict[str, Any] = json.loads(answer.body)
    return said


def accept(status: int, body: bytes) -> None:
    """Turn any answer but a success into an error with the manager's own words."""
    if status < 300:
        return
    from varuna.fleet.net.client import reason

    if status == 401:
        raise FleetError(
            "the manager does not accept this run's token: it belongs to another run, or the manager was started in "
            "another folder. Give --run that folder."
        )
    raise FleetError(f"the manager refused: {reason(body)}")


def _worker(status: Mapping[str, Any], rank: int | None, first_failure: bool) -> str:
    """Name of the worker whose log is asked for."""
    if first_failure:
        if not status["failures"]:
            raise FleetError("no worker of this run has failed or been lost")
        first = status["failures"][0]
        say(f"{first['worker']}: {first['cause']}")
        return str(first["worker"])
    members = status["members"]
    if not members:
        raise FleetError("no generation has begun: there are no ranks yet. Name a worker with --worker.")
    if rank is not None and rank >= len(members):
        raise UsageError(
            f"there is no rank {rank}: generation {status['generation']} has ranks 0 to {len(members) - 1}"
        )
    return str(members[rank or 0])


def _chunk(remote: "ManagerRemote", worker: str, offset: str) -> tuple[int, bytes]:
    answer = remote.get(f"/logs/{worker}?offset={offset}")
    accept(answer.status, answer.body)
    return int(answer.headers["x-varuna-next-offset"]), answer.body


def _check(given: bool, flag: str) -> None:
    if given:
        raise UsageError(f"{flag} and --json cannot be combined: JSON is printed once")
