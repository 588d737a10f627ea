"""A manager that a JOIN string names, seen from a machine that is about to join it: nothing is spent."""

import time
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from varuna.core.errors import FleetError
from varuna.extras.doctor.judging.finding import Finding, fault, ok
from varuna.fleet.net.client import ManagerRemote, UnreachableError, fetch_certificate
from varuna.fleet.net.join_string import JoinString

_READINGS = 3
_SKEW_S = 5.0


class Answering(NamedTuple):
    """The program that answers at a JOIN string's address."""

    remote: ManagerRemote
    is_meeting: bool
    """a check before a run, and no manager"""


def find(invitation: JoinString) -> Answering:
    """Find the program that answers there.

    Raises:
        FleetError: no program answers, or another one than the JOIN string says.
    """
    certificate_pem = fetch_certificate(invitation)
    remote = ManagerRemote(invitation.host, invitation.port, certificate_pem, invitation.token)
    answer = remote.get("/meeting")
    return Answering(remote, answer.status == 200)


def judge_manager(invitation: JoinString, remote: ManagerRemote) -> tuple[Finding, ...]:
    """Judge whether an agent on this machine could join."""
    taken_s = []
    ahead_s = 0.0
    for _ in range(_READINGS):
        begin_s = time.monotonic()
        try:
            answer = remote.get("/ca")
        except FleetError as error:
            return (unreachable(error),)
        taken_s.append(time.monotonic() - begin_s)
        if told := answer.headers.get("date"):
            ahead_s = time.time() - parsedate_to_datetime(told).timestamp() - 0.5  # it tells whole seconds
    text = f"answers at {invitation.address}, and is the one of this JOIN string; {min(taken_s) * 1e3:.0f} ms"
    found = [ok("manager", f"{text} with TLS. The token was not used")]
    if abs(ahead_s) > _SKEW_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        remedy = "Run NTP on both: buckets, certificates and logs depend on clocks."
        found.append(fault("clock", f"this machine's clock is {abs(ahead_s):.0f} s {way} the manager's", remedy))
    return tuple(found)


def unreachable(error: FleetError) -> Finding:
    """Make the finding that no program, or another one, answers there."""
    remedy = "Open the manager's port for this machine, and start the manager with --host 0.0.0.0."
    return fault("manager", str(error), remedy if isinstance(error, UnreachableError) else "")
