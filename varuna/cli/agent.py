"""``varuna agent``: one machine's part in a run."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.core.errors import UsageError
from varuna.process.console import say
from varuna.process.gpus import default_workers
from varuna.process.scripts import check_script

if TYPE_CHECKING:
    from varuna.fleet.net.join_string import JoinString
    from varuna.process.machine_port import Address

_ZONE_VARIABLE = "VARUNA_ZONE"

EXAMPLES = """Examples:

\b
varuna agent 'varuna://...' -- train.py
varuna agent --join-file /run/secrets/varuna-join --state-dir /var/lib/varuna -- train.py --lr 1e-3
"""


def agent(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOIN] -- SCRIPT [ARGS]...", help="What `varuna manager` printed, then the script to run."
        ),
    ] = None,
    join_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the JOIN string, which is read again if the manager moves. Others can see arguments.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=0, help="Number of workers. Default: one per GPU, else 1.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the agent's identity here: a restarted agent is the same machine."),
    ] = None,
    interface: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Private address of this machine for tensors. Default: the one that leads to the manager.",
        ),
    ] = "",
    announce: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where other machines reach this one, if that is not --port of its own address: behind NAT.",
        ),
    ] = "",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="The one port of this machine for all tensors. Default: that of --announce; without it, free ones.",
        ),
    ] = None,
) -> None:
    """Join a run with this machine; start one agent per VM.

    Starts one worker per GPU, restarts workers that are killed, and sends their
    output to the manager. SIGTERM counts as a preemption notice. Tensors travel
    unencrypted, so the interface must be private. Other users of the machine
    can see arguments: give the JOIN string in --join-file or VARUNA_JOIN.
    """
    from varuna.core.node_notices import NodeNotice, ZoneNotice
    from varuna.fleet.agent.agent import Agent, AgentConfig
    from varuna.fleet.agent.agent_folder import AgentFolder, AgentIdentity
    from varuna.fleet.agent.join import serve_as_agent
    from varuna.fleet.agent.manager_client import ManagerAddress
    from varuna.fleet.net.addresses import address_towards
    from varuna.fleet.notices.spot_notices import SpotNotices
    from varuna.process.machine_port import Address
    from varuna.process.output_pump import unread_allowed

    zone = zone_given()
    invitation, (script, *args) = invited(words or [], join_file)
    announced = announced_at(announce) if announce else None
    if announced is None and port is not None:
        announced = Address(interface or address_towards(invitation.host) or invitation.host, port)
    count = default_workers() if workers is None else workers
    if not count and announced is None:
        raise UsageError("a machine without workers has nothing to do but to relay: give it --port, or --announce")
    check_script(Path(script))
    folder = state_dir or Path(tempfile.mkdtemp(prefix="varuna-agent-"))
    home = AgentFolder(folder)
    ownership = home.own()
    config = AgentConfig(Path(script), tuple(args), count, interface, announced=announced, port=port)

    def run(card: AgentIdentity) -> int:
        place = ManagerAddress(invitation.host, invitation.port, card.certificate_pem, join_file)
        member = Agent(place, home, card, config, say)

        def warn(notice: NodeNotice) -> None:
            if not (isinstance(notice, ZoneNotice) and zone):  # the environment's word counts
                member.notify(notice)

        if zone:
            member.notify(ZoneNotice(zone=zone))
        notices = SpotNotices(warn)
        notices.start()
        exit_code = member.run()
        if member.is_released and (untold := notices.acknowledge()):
            say(untold)
        return exit_code

    with unread_allowed():
        exit_code = serve_as_agent(lambda: invited(words or [], join_file)[0], home, run, say)
    ownership.release()
    if exit_code == 0 and state_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(exit_code)


def announced_at(text: str) -> "Address":
    """Read what ``--announce`` says.

    Raises:
        UsageError: it is no address and port.
    """
    from varuna.process.machine_port import Address

    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--announce {text!r} is not where others reach this machine: write HOST:PORT, such as 203.0.113.7:40123, "
            "as your cloud or router maps it"
        )
    return Address(host, int(port))


def zone_given() -> str:
    """The zone of this machine, if the environment names one.

    Raises:
        UsageError: it cannot be one.
    """
    from varuna.core.devices import MAX_ZONE, is_zone

    zone = os.environ.get(_ZONE_VARIABLE, "")
    if zone and not is_zone(zone):
        raise UsageError(
            f"{_ZONE_VARIABLE}={zone!r} is not a zone: write a region, or a region, a slash and a zone, such as "
            f"office/rack-1, in letters, digits and . : + - _, of at most {MAX_ZONE} characters"
        )
    return zone


def invited(words: list[str], join_file: Path | None) -> "tuple[JoinString, list[str]]":
    """Return the JOIN string, from wherever it is, and the words after it.

    Raises:
        UsageError: there is none, or no script.
    """
    from varuna.fleet.net.join_string import JOIN_VARIABLE, SCHEME, parse_invitation
    from varuna.fleet.run_folder.join_file import read_join

    join = os.environ.get(JOIN_VARIABLE, "")
    if join_file is not None:
        try:
            join = str(read_join(join_file))
        except OSError as error:
            raise UsageError(f"cannot read --join-file {join_file}: {error}") from error
    if words and (not join or words[0].startswith(SCHEME)):
        join, words = words[0], words[1:]
    if not words:
        raise UsageError("say what to join and what to run: varuna agent JOIN -- train.py")
    return parse_invitation(join), words
