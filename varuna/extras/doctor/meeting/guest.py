"""A machine's part in a meeting: it looks at itself, comes, tries the others when all are there, and tells."""

import contextlib
import errno
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from pydantic import ValidationError

from varuna.core.errors import FleetError
from varuna.core.value import Value
from varuna.core.version import __version__
from varuna.extras.doctor.judging.facts import LinkOrder, MachineFacts, ReachFacts
from varuna.extras.doctor.links.torch_child import TorchChild
from varuna.extras.doctor.machine.look import Wanted, look_at_machine, owner_here
from varuna.extras.doctor.meeting.meeting import LINKS_S, SILENT_S, Arrival, CheckPlan, MeetingRequest, Next, Report
from varuna.fleet.net.client import ManagerRemote, UnreachableError, reason
from varuna.fleet.net.serving import bind
from varuna.process.bounded import Bounded

CONNECT_S = 3.0
_NONCE_BYTES = 16
_WHY = {
    errno.ECONNREFUSED: "refused: nobody listens there, so that address leads to another machine",
    errno.EHOSTUNREACH: "no route to that host",
    errno.ENETUNREACH: "no route to that network",
}


class ProbePort:
    """A free port at which this machine answers those that know the secret of the meeting."""

    def __init__(self, address: str, secret: str) -> None:
        """Listen at ``address``.

        Raises:
            FleetError: it is not one of this machine's.
        """
        self._secret, self._listener = secret.encode(), bind(address, 0)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._answer, name="varuna-door", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits on it
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
            except OSError:
                return
            with guest:
                guest.settimeout(CONNECT_S)
                try:
                    guest.sendall(_proof(self._secret, _read(guest, _NONCE_BYTES)))
                except OSError:
                    continue


def try_all(doors: Mapping[str, tuple[str, int]], secret: str, source: str) -> dict[str, ReachFacts]:
    """Connect to all doors (address and port, by machine) at once, from the address ``source``."""
    trying = {name: Bounded(partial(_try, door, secret.encode(), source)) for name, door in doors.items()}
    found = {}
    deadline_s = time.monotonic() + 3 * CONNECT_S
    for name, work in trying.items():
        try:
            found[name] = work.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            found[name] = ReachFacts(problem=f"no answer within {3 * CONNECT_S:.0f} s")
    return found


def _try(door: tuple[str, int], secret: bytes, source: str) -> ReachFacts:
    begin_s = time.monotonic()
    try:
        with socket.create_connection(door, CONNECT_S, (source, 0)) as connection:
            took_s = time.monotonic() - begin_s
            nonce = hashlib.sha256(f"{door}{begin_s}".encode()).digest()[:_NONCE_BYTES]
            connection.sendall(nonce)
            if not hmac.compare_digest(_read(connection, 32), _proof(secret, nonce)):
                return ReachFacts(problem="another process answers there: the address is not that machine's alone")
    except TimeoutError:
        return ReachFacts(problem=f"no answer within {CONNECT_S:.0f} s: packets are dropped, as by a firewall")
    except OSError as error:
        return ReachFacts(problem=_WHY.get(error.errno or 0, f"{error.strerror or error}"))
    return ReachFacts(took_s=took_s)


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("the connection was closed")
        found += part
    return found


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


_EVERY_S = 0.3
_GIVE_UP_S = 1800.0
_READINGS = 3


class Seat(Value):
    """A machine's rank and name at the meeting."""

    rank: int
    name: str


class Guest:
    """One machine at a meeting; for one caller.

    Args:
        remote: the meeting.
        address: of this machine, at which the others reach it.
        tell: shows a line.
        is_first: this is the machine at which the others meet.
        wall_clock: seconds since 1970, as this machine believes.
    """

    def __init__(
        self,
        remote: ManagerRemote,
        address: str,
        tell: Callable[[str], None],
        *,
        is_first: bool = False,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._wall_clock = wall_clock
        self._remote, self._address, self._tell, self._is_first = remote, address, tell, is_first
        self._newest: Next | None = None
        self._error: FleetError | None = None
        self._heard = threading.Condition()
        self._closed = threading.Event()

    def attend(self, on_facts: Callable[[MachineFacts], None] = lambda facts: None) -> Next:
        """Take part to the end; returns what the meeting said last, with the verdict.

        Raises:
            FleetError: the meeting is over, or does not want this machine.
        """
        child = TorchChild()
        door = None
        try:
            welcome, ahead_s = self.welcome()
            wanted = Wanted(
                checkpoints=welcome.checkpoints,
                mark=welcome.mark,
                owner=owner_here(),
                seeks_mark=not self._is_first,
                address=self._address,
            )
            facts = look_at_machine(child, wanted).model_copy(update={"clock_ahead_s": ahead_s})
            on_facts(facts)
            door = ProbePort(self._address, self._remote.token)
            return self._stay(facts, door, child)
        finally:
            self._closed.set()
            if door is not None:
                door.close()
            child.close()

    def _stay(self, facts: MachineFacts, door: ProbePort, child: TorchChild) -> Next:
        rank, name = self._arrive(facts, door.port)
        threading.Thread(target=self._listen, args=(rank,), name="varuna-guest", daemon=True).start()
        now = self._until(lambda now: now.phase != "gather")
        others = {other: now.doors[n] for n, other in enumerate(now.names) if other != name}
        self._report(rank, "reach", Report(reaches=try_all(others, self._remote.token, self._address)))
        now = self._until(lambda now: now.phase in ("links", "done"))
        if now.phase == "links":
            ask = LinkOrder(
                host=self._remote.host,
                port=self._remote.port,
                certificate_pem=self._remote.certificate_pem or "",
                token=self._remote.token,
                rank=rank,
                address=self._address,
                names=now.names,
                pairs=now.pairs,
                nccl=now.nccl,
            )
            links, sums = child.links(ask, 0.8 * LINKS_S) if now.pairs else ({}, ())
            self._report(rank, "links", Report(links=links, sums=sums))
        return self._until(lambda now: now.healthy is not None)

    def welcome(self) -> tuple[CheckPlan, float]:
        """Ask for the meeting's plan, and measure how much this machine's clock is ahead of the first machine's.

        Raises:
            FleetError: the meeting does not want this machine, or is another version's.
        """
        best_s, ahead_s, welcome = float("inf"), 0.0, None
        for _ in range(_READINGS):
            before_s, begin_s = self._wall_clock(), time.monotonic()
            answer = self._remote.get("/meeting")
            took_s = time.monotonic() - begin_s
            if answer.status != 200:
                raise FleetError(reason(answer.body))
            try:
                welcome = CheckPlan.model_validate_json(answer.body)
            except ValidationError as error:
                raise FleetError(
                    "the first machine has another version of Varuna. Install the same one on all machines."
                ) from error
            if took_s < best_s:
                best_s, ahead_s = took_s, before_s + took_s / 2 - welcome.time_s
        assert welcome is not None
        return welcome, ahead_s

    def _arrive(self, facts: MachineFacts, door: int) -> tuple[int, str]:
        arrival = Arrival(facts=facts, door=door).model_dump(mode="json")
        knock = MeetingRequest(varuna=__version__, name=facts.name, arrival=arrival)
        answer = self._remote.post("/arrive", knock.model_dump())
        if answer.status != 200:
            raise FleetError(f"the first machine does not let this one take part: {reason(answer.body)}")
        told = Seat.model_validate_json(answer.body)
        return told.rank, told.name

    def _report(self, rank: int, phase: str, report: Report) -> None:
        answer = self._remote.post(f"/report/{rank}/{phase}", report.model_dump())
        if answer.status != 200:
            raise FleetError(f"the first machine does not understand this one: {reason(answer.body)}")

    def _until(self, is_it: Callable[[Next], bool]) -> Next:
        deadline_s = time.monotonic() + _GIVE_UP_S
        with self._heard:
            while True:
                if self._newest is not None and is_it(self._newest):
                    return self._newest
                if self._error is not None:
                    raise self._error
                if not self._heard.wait(max(0.0, deadline_s - time.monotonic())):
                    raise FleetError(f"the first machine did not go on within {_GIVE_UP_S / 60:.0f} minutes")

    def _listen(self, rank: int) -> None:
        """Ask what comes next, again and again; this is also how the meeting hears that this machine lives."""
        heard_s, came = time.monotonic(), -1
        while not self._closed.wait(_EVERY_S):
            try:
                now = Next.model_validate_json(self._remote.get(f"/next/{rank}").body)
            except (UnreachableError, ValidationError, FleetError) as error:
                if time.monotonic() - heard_s > SILENT_S:
                    where = f"{self._remote.host}:{self._remote.port}"
                    text = f"the first machine, at {where}, stopped answering ({error}). Start the check again."
                    with self._heard:
                        self._error = FleetError(text)
                        self._heard.notify_all()
                    return
                continue
            heard_s = time.monotonic()
            if now.came != came and now.phase == "gather" and not self._is_first:
                came = now.came
                self._tell(f"{now.came} of {now.wanted} machines are here")
            with self._heard:
                self._newest = now
                self._heard.notify_all()
