"""The first machine: it listens, waits for the others, takes part itself, and ends up with the facts of all."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from varuna.core.errors import FleetError, VarunaError
from varuna.core.units import counted
from varuna.extras.doctor.judging.facts import FleetFacts
from varuna.extras.doctor.machine.alone import check_interface, remove_empty
from varuna.extras.doctor.machine.store_probe import put_mark, remove_mark
from varuna.extras.doctor.meeting.guest import Guest
from varuna.extras.doctor.meeting.meeting import MachineMeeting, Next
from varuna.fleet.net.addresses import own_address
from varuna.fleet.net.client import ManagerRemote
from varuna.process.bounded import Bounded
from varuna.store.opening import is_local, location

ARRIVAL_S = 600.0
"""Seconds for a person to start the command on all machines."""
_FAREWELL_S = 3.0
_EVERY_S = 0.1
_PHASES = {"reach": "connecting all machines to all", "links": "measuring links", "done": "done"}


@dataclass(frozen=True)
class Convening:
    """Settings of a meeting, as the first machine was given them.

    Args:
        nodes: how many machines there will be, this one included.
        port: to meet at; 0 picks a free one.
        interface: this machine's address for the others; empty: the one by which it reaches others.
        checkpoints: the store that all try; empty: none.
        arrival_s: how long to wait for the others.
    """

    nodes: int
    port: int = 0
    interface: str = ""
    checkpoints: str = ""
    arrival_s: float = ARRIVAL_S


def convene(
    asked: Convening,
    invite: Callable[[str], None],
    tell: Callable[[str], None],
    judge: Callable[[FleetFacts], bool],
) -> FleetFacts:
    """Wait for the others, measure, and tell them the verdict.

    Args:
        asked: what.
        invite: shows the JOIN string.
        tell: shows a line.
        judge: whether a run would work, for the verdict.

    Raises:
        FleetError: the port is taken, or this machine cannot take part in its own meeting.
        UsageError: ``checkpoints`` is no place for them.
    """
    place = location(asked.checkpoints) if asked.checkpoints else ""
    check_interface(asked.interface)
    address = asked.interface or own_address("0.0.0.0")
    meeting = MachineMeeting("::" if ":" in address else "0.0.0.0", asked.port, asked.nodes, place)
    is_new = bool(place) and is_local(place) and not Path(place).exists()
    try:
        if place:
            _mark(place, meeting.mark)
        invite(str(meeting.invitation(address)))
        loopback = "::1" if ":" in address else "127.0.0.1"
        remote = ManagerRemote(loopback, meeting.port, meeting.certificate_pem, meeting.token)
        own = Bounded(lambda: Guest(remote, address, tell, is_first=True).attend())
        _conduct(meeting, asked, tell, own)
        facts = meeting.facts()
        meeting.tell_verdict(judge(facts))
        until_s = time.monotonic() + _FAREWELL_S
        while not meeting.all_told() and time.monotonic() < until_s:
            time.sleep(_EVERY_S)
        return facts
    finally:
        meeting.close()
        if place:
            remove_mark(place, meeting.mark)
        if is_new:
            remove_empty(Path(place))


def _conduct(meeting: MachineMeeting, asked: Convening, tell: Callable[[str], None], own: Bounded[Next]) -> None:
    """Conduct the meeting until all is done."""
    until_s, phase, came = time.monotonic() + asked.arrival_s, "gather", 0
    while phase != "done":
        time.sleep(_EVERY_S)
        _check(own)
        if phase == "gather" and time.monotonic() > until_s:
            meeting.begin()
        now = meeting.advance()
        names = meeting.names()
        if len(names) != came:
            came = len(names)
            left = asked.nodes - came
            more = f"; waiting for {left} more, up to {asked.arrival_s / 60:.0f} minutes" if left > 0 else ""
            tell(f"{came} of {counted(asked.nodes, 'machine')} here: {', '.join(names)}{more}")
        if now != phase:
            phase = now
            tell(_PHASES[phase])


def _check(own: Bounded[Next]) -> None:
    """Raise what ended this machine's own part."""
    try:
        own.result(0.0)
    except TimeoutError:
        return
    raise FleetError("this machine ended its part of the check too early. Start it again.")


def _mark(place: str, mark: str) -> None:
    try:
        Bounded(lambda: put_mark(place, mark)).result(10.0)
    except (VarunaError, OSError, TimeoutError):
        return  # trying the store, which comes next, says why
