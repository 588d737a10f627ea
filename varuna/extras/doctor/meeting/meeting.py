"""Meeting of machines before a run: the first one listens, the others come with a JOIN string that it has printed.

The meeting says who is there and what comes next, keeps the keys with which pairs meet, and collects what they found.
"""

import asyncio
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from varuna.core.value import Value
from varuna.core.version import __version__
from varuna.extras.doctor.judging.facts import FleetFacts, FleetSums, LinkFacts, MachineFacts, ReachFacts
from varuna.fleet.net.ca import open_authority
from varuna.fleet.net.connection_limits import welcome
from varuna.fleet.net.join_string import JoinString
from varuna.fleet.net.requests import bearer, is_same_token, read_body
from varuna.fleet.net.serving import Serving

SILENT_S = 6.0
"""Seconds of silence after which a machine counts as gone: each asks several times a second."""
REACH_S = 15.0
LINKS_S = 45.0
"""Bounds on the parts of the check; what is missing then is named."""
_HOLD_S = 0.5
_LARGEST_BYTES = 1 << 18
_MOST_KEYS = 4096


class Arrival(Value):
    """A machine that has been looked at comes; the door is where others try to connect to it."""

    facts: MachineFacts
    door: int = Field(ge=1, le=65535)


class MeetingRequest(Value):
    """An arrival in an envelope that all versions of Varuna can read."""

    varuna: str = Field(max_length=64)
    name: str = Field(max_length=255)
    arrival: dict[str, object]


class Report(Value):
    """A machine's findings about the others, by name."""

    reaches: dict[str, ReachFacts] | None = None
    links: dict[str, LinkFacts] | None = None
    sums: tuple[FleetSums, ...] = ()


class Next(Value):
    """The phase of the check, and what all machines need to know for it."""

    phase: str
    """gather, reach, links or done"""
    came: int
    wanted: int
    names: tuple[str, ...] = ()
    """by rank, once all have come"""
    doors: tuple[tuple[str, int], ...] = ()
    """address and port, by rank"""
    pairs: tuple[tuple[int, int], ...] = ()
    """that can connect to each other, both ways"""
    nccl: bool = False
    healthy: bool | None = None
    """the verdict, at the end"""


class CheckPlan(Value):
    """The settings that a machine which comes needs before it looks at itself."""

    mark: str
    """names the folder of this check in the store"""
    checkpoints: str
    time_s: float
    """the first machine's clock"""


class MachineMeeting:
    """The server. Any thread may call it; its state is only touched under one lock.

    Args:
        host: address to listen on.
        port: 0 picks a free one.
        wanted: how many machines are to come, the first one included.
        checkpoints: the store that each of them tries; empty: none.
        clock: seconds.

    Raises:
        FleetError: the port is taken, or the address is not one of this machine.
    """

    def __init__(
        self, host: str, port: int, wanted: int, checkpoints: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.token, self.mark = secrets.token_urlsafe(24), secrets.token_hex(6)
        self._folder = Path(tempfile.mkdtemp(prefix="varuna-doctor-"))
        self._wanted, self._checkpoints, self._clock = wanted, checkpoints, clock
        self._lock, self._came = threading.RLock(), asyncio.Condition()
        self._machines: list[Arrival] = []
        self._others: dict[str, str] = {}
        self._heard_s: dict[int, float] = {}
        self._reports: dict[int, dict[str, Report]] = {}
        self._lost: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._phase, self._until_s = "gather", float("inf")
        self._healthy: bool | None = None
        self._told: set[int] = set()
        """numbers of the machines that know the verdict"""
        try:
            self._authority = open_authority(self._folder)
            self._serving = Serving(
                host=host, port=port, max_frame_bytes=_LARGEST_BYTES, tls=self._authority.server_context()
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.port = self._serving.port
        self._serving.start(self._app())

    @property
    def certificate_pem(self) -> str:
        """The certificate of this meeting's own authority."""
        return self._authority.certificate_pem

    def invitation(self, host: str) -> JoinString:
        """Return the JOIN string for all machines, which reach this one at ``host``."""
        return JoinString(host=host, port=self.port, fingerprint=self._authority.fingerprint, token=self.token)

    def close(self) -> None:
        """Stop listening."""
        self._serving.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def names(self) -> tuple[str, ...]:
        """Return the names of the machines that have come."""
        with self._lock:
            return (*(each.facts.name for each in self._machines), *self._others)

    def begin(self) -> None:
        """Do not wait for any more machines."""
        with self._lock:
            if self._phase == "gather":
                self._enter("reach", REACH_S)

    def tell_verdict(self, healthy: bool) -> None:
        """Tell all machines the verdict."""
        with self._lock:
            self._healthy = healthy

    def all_told(self) -> bool:
        """Return whether every machine that is there has asked since the verdict, or is gone."""
        with self._lock:
            return self._healthy is not None and not [r for r in self._present() if r not in self._told]

    def facts(self) -> FleetFacts:
        """Return all that is known now."""
        with self._lock:
            names = [each.facts.name for each in self._machines]
            sums = {names[rank]: found["links"].sums for rank, found in self._reports.items() if "links" in found}
            return FleetFacts(
                wanted=self._wanted,
                machines=tuple(each.facts for each in self._machines),
                others=dict(self._others),
                lost=dict(self._lost),
                reaches={names[r]: f["reach"].reaches or {} for r, f in self._reports.items() if "reach" in f},
                links={names[r]: f["links"].links or {} for r, f in self._reports.items() if "links" in f},
                sums={name: found for name, found in sums.items() if found},
            )

    def advance(self) -> str:
        """Begin the next phase when all that are there have reported, or the time is up; return the phase."""
        with self._lock:
            now_s = self._clock()
            if self._phase == "done":
                return self._phase
            for rank in self._present():
                if now_s - self._heard_s[rank] > SILENT_S:
                    self._lose(rank, f"{SILENT_S:.0f} s ago")
            if self._phase == "gather":
                if len(self._machines) + len(self._others) >= self._wanted:
                    self._enter("reach", REACH_S)
                return self._phase
            missing = [rank for rank in self._present() if self._phase not in self._reports.get(rank, {})]
            if missing and now_s > self._until_s:
                for rank in missing:
                    self._lose(rank, "although it is there")
                missing = []
            if not missing:
                self._enter(*(("links", LINKS_S) if self._phase == "reach" else ("done", 0.0)))
            return self._phase

    # -- under the lock ----------------------------------------------------------------------------------

    def _enter(self, phase: str, bound_s: float) -> None:
        self._phase, self._until_s = phase, self._clock() + bound_s

    def _present(self) -> list[int]:
        return [rank for rank, each in enumerate(self._machines) if each.facts.name not in self._lost]

    def _lose(self, rank: int, how: str) -> None:
        doing = {"gather": "while it waited for others", "reach": "while it connected to others"}
        what = doing.get(self._phase, "while links were measured")
        self._lost[self._machines[rank].facts.name] = f"{what} ({how})"

    def _next(self) -> Next:
        pairs: tuple[tuple[int, int], ...] = ()
        if self._phase == "links":
            here = self._present()
            names = [each.facts.name for each in self._machines]
            pairs = tuple(
                (a, b)
                for a in here
                for b in here
                if a < b and self._reached(a, names[b]) and self._reached(b, names[a]) and self._has_torch(a, b)
            )
        is_open = self._phase == "gather"
        return Next(
            phase=self._phase,
            came=len(self._machines) + len(self._others),
            wanted=self._wanted,
            names=() if is_open else tuple(each.facts.name for each in self._machines),
            doors=() if is_open else tuple((each.facts.address, each.door) for each in self._machines),
            pairs=pairs,
            nccl=all(each.facts.torch.gpus and each.facts.torch.nccl for each in self._machines),
            healthy=self._healthy,
        )

    def _reached(self, rank: int, name: str) -> bool:
        report = self._reports.get(rank, {}).get("reach")
        found = (report.reaches or {}).get(name) if report is not None else None
        return found is not None and not found.problem

    def _has_torch(self, *ranks: int) -> bool:
        return all(
            not self._machines[r].facts.torch.problem and not self._machines[r].facts.torch.missing for r in ranks
        )

    def _arrive(self, arrival: Arrival) -> tuple[int, str]:
        """Return the rank and the unique name of a machine that comes; -1 if it is too late."""
        if self._phase != "gather":
            return -1, ""
        taken, name, number = set(self.names()), arrival.facts.name, 2
        while name in taken:
            name, number = f"{arrival.facts.name}#{number}", number + 1
        facts = arrival.facts.model_copy(update={"name": name})
        self._machines.append(Arrival(facts=facts, door=arrival.door))
        rank = len(self._machines) - 1
        self._heard_s[rank] = self._clock()
        return rank, name

    # -- requests ----------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/ca", self._get_ca),
                Route("/meeting", self._guarded(self._get_welcome)),
                Route("/arrive", self._guarded(self._post_arrival), methods=["POST"]),
                Route("/next/{rank:int}", self._guarded(self._get_next)),
                Route("/report/{rank:int}/{phase}", self._guarded(self._post_report), methods=["POST"]),
                Route("/keys", self._guarded(self._post_key), methods=["POST"]),
                Route("/keys/{key:path}", self._guarded(self._get_key)),
            ]
        )

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if not is_same_token(bearer(request.headers.get("authorization", "")), self.token):
                return _error(401, "this JOIN string is of another check: use the one that was printed last")
            welcome(request)
            return await answer(request)

        return checked

    async def _get_ca(self, request: Request) -> Response:
        return PlainTextResponse(self.certificate_pem)

    async def _get_welcome(self, request: Request) -> Response:
        welcome = CheckPlan(mark=self.mark, checkpoints=self._checkpoints, time_s=time.time())
        return JSONResponse(welcome.model_dump())

    async def _post_arrival(self, request: Request) -> Response:
        body = await read_body(request, _LARGEST_BYTES)
        try:
            knock = MeetingRequest.model_validate_json(body or b"")
            if knock.varuna != __version__:
                with self._lock:
                    self._others[knock.name] = knock.varuna
                text = f"this machine has varuna {knock.varuna}, the first one {__version__}: install the same one"
                return _error(409, text)
            with self._lock:
                rank, name = self._arrive(Arrival.model_validate(knock.arrival))
        except ValidationError:
            return _error(400, "the description of this machine cannot be read")
        if rank < 0:
            return _error(409, "the check has begun without this machine: start it again on the first one")
        return JSONResponse({"rank": rank, "name": name})

    async def _get_next(self, request: Request) -> Response:
        rank = request.path_params["rank"]
        with self._lock:
            if rank >= len(self._machines):
                return _error(404, "who is this?")
            self._heard_s[rank] = self._clock()
            if self._healthy is not None:
                self._told.add(rank)
            return JSONResponse(self._next().model_dump())

    async def _post_report(self, request: Request) -> Response:
        body = await read_body(request, _LARGEST_BYTES)
        try:
            report = Report.model_validate_json(body or b"")
        except ValidationError:
            return _error(400, "the report cannot be read")
        with self._lock:
            self._reports.setdefault(request.path_params["rank"], {})[request.path_params["phase"]] = report
        return JSONResponse({})

    async def _post_key(self, request: Request) -> Response:
        asked = await request.json()
        async with self._came:
            if len(self._keys) >= _MOST_KEYS * max(1, self._wanted):
                return _error(400, "too many keys")
            self._keys[str(asked["key"])] = str(asked["value"])
            self._came.notify_all()
        return JSONResponse({})

    async def _get_key(self, request: Request) -> Response:
        """Return the value of a key, which may take a moment to come; 410 if the machine that would set it is gone."""
        key, owner = request.path_params["key"], request.query_params.get("of", "")
        async with self._came:
            try:
                async with asyncio.timeout(_HOLD_S):
                    await self._came.wait_for(lambda: key in self._keys)
            except TimeoutError:
                with self._lock:
                    is_gone = owner.isdigit() and int(owner) not in self._present()
                return _error(410 if is_gone else 404, "not there")
            return PlainTextResponse(self._keys[key])


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)
