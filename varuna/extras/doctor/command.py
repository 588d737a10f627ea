"""``varuna doctor``: checks machines before a run, and a run from outside."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.cli.shared import options
from varuna.core.errors import FleetError, UsageError
from varuna.core.units import counted
from varuna.process.console import say

if TYPE_CHECKING:
    from varuna.extras.doctor.judging.facts import MachineFacts

EXAMPLES = """Examples:

\b
varuna doctor                                  would a run work on this machine?
varuna doctor --checkpoints s3://bucket/runs   ... and save there?
varuna doctor --nodes 4                        would it on four? Prints a JOIN string
varuna doctor 'varuna://...'                   on each of the others, or to try a manager
varuna doctor --run runs/gpt2                  does this run keep its promises?
"""


def doctor(
    join: Annotated[
        str | None,
        typer.Argument(metavar="[JOIN]", help="What `varuna doctor --nodes`, or `varuna manager`, printed elsewhere."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=2, help="Check so many machines, this one included, and the links between them."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --nodes: port to meet at; 0 picks a free one.")] = 0,
    interface: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Private address of this machine for tensors. Default: the one that leads to the others.",
        ),
    ] = "",
    checkpoints: Annotated[
        str, typer.Option(metavar="PLACE", help="Also try this place for checkpoints: a folder or a bucket.")
    ] = "",
    run: options.RunDir = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Of a run: do not read the newest checkpoint, only check that it is complete."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check machines before a run, or a run from outside.

    Without arguments: the run that is going on, if there is one, else this
    machine. Exit code 1 if a run would fail, or is broken; 0 if there are only
    warnings. Changes nothing.
    """
    if join is not None and (nodes is not None or run is not None or checkpoints or port):
        raise UsageError("a JOIN string says what to check: leave out --nodes, --port, --checkpoints and --run")
    if run is not None and (nodes is not None or checkpoints or interface):
        raise UsageError("--run checks a run; --nodes, --interface and --checkpoints check machines. Leave out one")
    if port and nodes is None:
        raise UsageError("--port is where other machines come to: give --nodes too, or leave it out")
    if nodes is not None:
        is_well = _fleet(nodes, port, interface, checkpoints, as_json)
    elif join is not None:
        is_well = _joining(join, interface, as_json)
    elif run is not None or _is_running(checkpoints, interface):
        is_well = _living(run, quick, as_json)
    else:
        is_well = _machine(checkpoints, interface, as_json)
    if not is_well:
        raise typer.Exit(1)


def _is_running(checkpoints: str, interface: str) -> bool:
    from varuna.fleet.run_folder.connection_file import known_runs

    return not checkpoints and not interface and any(each.is_live for each in known_runs())


def _living(run: Path | None, quick: bool, as_json: bool) -> bool:
    from varuna.extras.doctor.diagnose import diagnose
    from varuna.extras.doctor.gather import gather
    from varuna.extras.doctor.view import show
    from varuna.fleet.run_folder.connection_file import find

    folder, access = find(run)
    return show(f"run {folder}", diagnose(gather(folder, access, reads=not quick)), {"run": str(folder)}, as_json)


def _machine(checkpoints: str, interface: str, as_json: bool) -> bool:
    from varuna.extras.doctor.judging.judge_machine import judge_machine
    from varuna.extras.doctor.machine.alone import look_alone
    from varuna.extras.doctor.view import looking, show

    with looking():
        facts = look_alone(checkpoints, interface)
    return show(f"this machine, {facts.name}", judge_machine(facts), {"machine": facts.name}, as_json)


def _fleet(nodes: int, port: int, interface: str, checkpoints: str, as_json: bool) -> bool:
    from varuna.extras.doctor.judging.finding import is_healthy
    from varuna.extras.doctor.judging.judge_fleet import judge_fleet
    from varuna.extras.doctor.meeting.convene import Convening, convene
    from varuna.extras.doctor.view import show_fleet

    def invite(join: str) -> None:
        say(f"start this on the other {counted(nodes - 1, 'machine')}, while this command waits:")
        print(f"varuna doctor '{join}'", file=sys.stderr if as_json else sys.stdout, flush=True)

    asked = Convening(nodes, port, interface, checkpoints)
    facts = convene(asked, invite, say, lambda facts: is_healthy(judge_fleet(facts)))
    return show_fleet(facts, judge_fleet(facts), as_json)


def _joining(join: str, interface: str, as_json: bool) -> bool:
    from varuna.extras.doctor.judging.judge_machine import judge_machine
    from varuna.extras.doctor.machine.alone import check_interface, look_alone
    from varuna.extras.doctor.meeting.guest import Guest
    from varuna.extras.doctor.meeting.manager_seen import find, judge_manager, unreachable
    from varuna.extras.doctor.view import looking, show
    from varuna.fleet.net.addresses import address_towards
    from varuna.fleet.net.join_string import parse_invitation

    invitation = parse_invitation(join)
    check_interface(interface)
    found, problem = None, None
    try:
        found = find(invitation)
    except FleetError as error:
        problem = unreachable(error)
    address = interface or address_towards(invitation.host)
    if found is not None and found.is_meeting:
        facts: list[MachineFacts] = []
        verdict = Guest(found.remote, address, say).attend(facts.append)
        own = judge_machine(facts[0])
        title = f"this machine, {facts[0].name}; the first machine shows all of them"
        return show(title, own, {"machine": facts[0].name}, as_json, healthy=bool(verdict.healthy))
    with looking():
        alone = look_alone(interface=address)
    manager = judge_manager(invitation, found.remote) if found is not None else (problem,) if problem else ()
    return show(f"this machine, {alone.name}", (*manager, *judge_machine(alone)), {"machine": alone.name}, as_json)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EXAMPLES)(doctor)
