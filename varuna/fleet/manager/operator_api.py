"""The door for people: status, logs and the page for readers; what changes the run for its operator alone."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from varuna.core.extras import extras
from varuna.core.value import Value
from varuna.fleet.manager.prometheus import CONTENT_TYPE, exposition, scraper_token
from varuna.fleet.manager.step_desk import StepRecorder
from varuna.fleet.net.connection_limits import welcome
from varuna.fleet.net.protocol import WORKER_NAME, WorkerName
from varuna.fleet.net.requests import address_of, bearer, first_problem, is_same_token, read_body
from varuna.fleet.page.answers import HEADERS, error, finite
from varuna.fleet.page.live_feed import MOST_PAGES, LiveFeed
from varuna.fleet.page.logins import Logins
from varuna.fleet.page.step_sheet import DeskAnswer, recorded_step
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.registry import TOKEN_LIFE_S
from varuna.fleet.run_folder.timelines import kept_steps
from varuna.fleet.state.inputs import DrainRequested, Event, FinishRequested, MorphRequested, SaveRequested

_MAX_BODY_BYTES = 4096
_LOG_CHUNK_BYTES = 2**20

V = TypeVar("V", bound=Value)
Answer = Callable[[Request], Awaitable[Response]]


class Drain(Value):
    """Body of ``POST /drain``."""

    node: WorkerName
    now: bool = Field(default=False, description="its state is not moved first")


class CreateToken(Value):
    """Body of ``POST /tokens``."""

    uses: int = Field(default=1, ge=1, le=100_000)
    life_s: float = Field(default=TOKEN_LIFE_S, gt=0, le=365 * 24 * 3600)


class WantedProfile(Value):
    """Body of ``POST /profile``."""

    rank: int = Field(ge=0, le=10**6)
    first: int = Field(ge=0, le=10**12, description="step")
    last: int = Field(ge=0, le=10**12)


class Login(Value):
    """Body of ``POST /login``."""

    code: str = Field(max_length=64, description="of a link")


class Nothing(Value):
    """Body of what needs no arguments."""


@dataclass(frozen=True)
class OperatorApi:
    """Access to the run, for the routes that serve people."""

    status: Callable[[], dict[str, object]]
    logs: Path
    ask: Callable[[Event], bool]
    """Whether it is written down, so that it will be carried out; may wait for a few seconds."""
    audit: Audit
    feed: LiveFeed | None = None
    """For pages."""
    plans: Callable[[], dict[str, object]] = dict
    """The planner's table for the workers that there are now."""
    desk: StepRecorder | None = None
    """Shows what happened in a step; None: there is only what was recorded."""
    run_dir: Path | None = None
    """Timelines are recorded there."""
    hosts: Callable[[], dict[str, object]] = dict
    """Facts that other machines have told of themselves, by machine."""
    mint: Callable[[int, float], str] | None = None
    """A JOIN string; None for a run that nobody can join."""
    void_tokens: Callable[[], int] | None = None
    """Makes all JOIN strings void that were given out; returns how many."""
    send_away: Callable[[str], bool] | None = None
    """Voids a machine's secret and drops its workers at once; False if no such machine ever joined."""
    operator_token: str = ""
    logins: Logins = field(default_factory=Logins)
    """Browsers that may read."""

    def routes(self) -> list[Route]:
        """Everything that people may ask for."""
        return [
            *(route for routes in extras("page") for route in routes()),
            Route("/login", self._login, methods=["POST"]),
            self._reading("/status", "read the status", self._status),
            self._reading("/events", "read the events", self._events),
            self._reading("/plans", "read the plans", self._plans),
            self._reading("/hosts", "read what machines tell", self._hosts),
            self._reading("/timeline", "read a timeline", self._timeline),
            self._reading("/timeline.svg", "read a timeline", self._timeline_picture),
            self._reading("/timelines", "read what is recorded", self._timelines),
            self._reading("/profile/{rank:int}/{first:int}", "read a profile", self._profiled),
            self._reading("/metrics", "read the metrics", self._metrics, may=self._may_scrape),
            self._reading("/logs/{worker}", "read a log", self._log),
            self._changing("/links", "make a link to the page", Nothing, self._link),
            self._changing("/links/void", "void all links to the page", Nothing, self._void_links),
            self._changing("/profile", "profile a rank", WantedProfile, self._profile),
            self._changing("/stop", "stop the run", Nothing, self._stop),
            self._changing("/morph", "morph", Nothing, self._morph),
            self._changing("/checkpoint", "save a checkpoint", Nothing, self._checkpoint),
            self._changing("/drain", "drain a node", Drain, self._drain),
            self._changing("/tokens", "mint a join token", CreateToken, self._token),
            self._changing("/tokens/void", "void all join tokens", Nothing, self._void_tokens),
        ]

    def _reading(
        self, path: str, action: str, answer: Answer, *, may: Callable[[Request], bool] | None = None
    ) -> Route:
        """Answer readers only."""
        admits = may or self._may_read

        async def checked(request: Request) -> Response:
            return await answer(request) if admits(request) else self._refuse(request, action)

        return Route(path, checked)

    def _changing(self, path: str, action: str, kind: type[V], act: Callable[[V], Awaitable[Response]]) -> Route:
        """Obey only the operator, only small well-formed bodies; each attempt is written down."""

        async def checked(request: Request) -> Response:
            if not self._may_change(request):
                return self._refuse(request, action)
            body = await read_body(request, _MAX_BODY_BYTES)
            if body is None:
                return error(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
            try:
                value = kind.model_validate_json(body or b"{}")
            except ValidationError as invalid:
                return error(422, f"the body is invalid: {first_problem(invalid)}")
            response = await act(value)
            if response.status_code < 300:
                self.audit.did(action, address_of(request))
            return response

        return Route(path, checked, methods=["POST"])

    def _may_read(self, request: Request) -> bool:
        return self._may_change(request) or self._admits(request, is_known=self.logins.admits(_token_of(request)))

    def _may_scrape(self, request: Request) -> bool:
        """Prometheus's token reads the metrics, and nothing else."""
        is_scraper = is_same_token(_token_of(request), scraper_token(self.operator_token))
        return self._admits(request, is_known=is_scraper) or self._may_read(request)

    def _may_change(self, request: Request) -> bool:
        return self._admits(request, is_known=is_same_token(_token_of(request), self.operator_token))

    def _admits(self, request: Request, *, is_known: bool) -> bool:
        if is_known:
            welcome(request)
        return is_known

    def _refuse(self, request: Request, action: str) -> Response:
        self.audit.refused(action, address_of(request), "wrong token")
        return error(401, "wrong token")

    # -- reading -----------------------------------------------------------------------------------------

    async def _status(self, _: Request) -> Response:
        return JSONResponse(finite(self.status()), headers=HEADERS)

    async def _events(self, request: Request) -> Response:
        """All that happened, and then what happens, as server-sent events."""
        if self.feed is None or not self.feed.has_room:
            return error(503, f"there is no room for another page, which has room for {MOST_PAGES}. Close one.")
        return self.feed.stream(request.headers.get("last-event-id", ""), lambda: self._may_read(request))

    async def _plans(self, _: Request) -> Response:
        """Answer with the planner's table for the workers that there are now; takes a moment."""
        return JSONResponse(finite(await asyncio.to_thread(self.plans)), headers=HEADERS)

    async def _hosts(self, _: Request) -> Response:
        return JSONResponse(finite(self.hosts()), headers=HEADERS)

    async def _timeline(self, request: Request) -> Response:
        """``?step=``, of a step that may lie ahead (202 until it is over); without it the newest one."""
        answer = await asyncio.to_thread(self._told_of, request.query_params.get("step", ""))
        return _told(answer, "application/json")

    async def _timeline_picture(self, request: Request) -> Response:
        """The same as a picture, with the step as it would be if nothing had taken longer than usual below."""
        step = request.query_params.get("step", "")
        [drawn] = extras("pictures of steps")
        answer: DeskAnswer = await asyncio.to_thread(lambda: drawn(self._told_of(step)))
        return _told(answer, "image/svg+xml")

    def _told_of(self, step: str) -> DeskAnswer:
        if not re.fullmatch(r"\d{0,12}", step):
            return DeskAnswer(422, b'{"error": "pass step= as the number of a step"}')
        number = int(step) if step else None
        return recorded_step(self.run_dir, number) if self.desk is None else self.desk.timeline(number)

    async def _timelines(self, _: Request) -> Response:
        """Steps whose timelines are recorded."""
        steps = [] if self.run_dir is None else await asyncio.to_thread(kept_steps, self.run_dir)
        return JSONResponse({"steps": steps}, headers=HEADERS)

    async def _profiled(self, request: Request) -> Response:
        """202 until the steps are over; then the trace, compressed."""
        if self.desk is None:
            return error(409, "this run has nobody to profile")
        return _told(self.desk.profiled(request.path_params["rank"], request.path_params["first"]), "application/gzip")

    async def _metrics(self, _: Request) -> Response:
        return Response(exposition(self.status()), media_type=CONTENT_TYPE, headers=HEADERS)

    async def _log(self, request: Request) -> Response:
        """Bytes of a worker's log from ``?offset=``, at most 1 MiB; a negative offset counts from the end."""
        worker, offset = request.path_params["worker"], request.query_params.get("offset", "0")
        if not re.fullmatch(WORKER_NAME, worker) or not re.fullmatch(r"-?\d{1,15}", offset):
            return error(422, "pass the name of a worker, and offset= as a number of bytes")
        path = self.logs / f"{worker}.log"
        if not path.is_file():
            return error(404, f"there is no log of a worker {worker!r}")
        start, data, size = await asyncio.to_thread(_chunk, path, int(offset))
        headers = {**HEADERS, "x-varuna-next-offset": str(start + len(data)), "x-varuna-size": str(size)}
        return Response(data, media_type="application/octet-stream", headers=headers)

    async def _login(self, request: Request) -> Response:
        """A session for a link's code, once."""
        body = await read_body(request, _MAX_BODY_BYTES)
        try:
            login = Login.model_validate_json(body or b"")
        except ValidationError as invalid:
            return error(422, f"the body is invalid: {first_problem(invalid)}")
        session = self.logins.redeem(login.code)
        if session is None:
            self.audit.refused("open the page", address_of(request), "the link was used, has expired, or is invalid")
            return error(403, "this link was used already, or has expired. Run `varuna open` for a new one.")
        self.audit.did("open the page", address_of(request))
        return JSONResponse({"session": session}, 201, headers=HEADERS)

    # -- changing ----------------------------------------------------------------------------------------

    async def _stop(self, _: Nothing) -> Response:
        return await self._accept(FinishRequested("requested with `varuna stop`"), {"accepted": "stop"})

    async def _morph(self, _: Nothing) -> Response:
        return await self._accept(MorphRequested(), {"accepted": "morph"})

    async def _checkpoint(self, _: Nothing) -> Response:
        status = self.status()
        if status.get("checkpoint_dir") is None or status.get("rescues"):
            return error(409, "the script keeps no checkpoints. Pass checkpoints= to its Trainer.")
        return await self._accept(SaveRequested(), {"accepted": "checkpoint"})

    async def _drain(self, drain: Drain) -> Response:
        nodes = self.status().get("nodes", [])
        assert isinstance(nodes, list)
        at_once = self.send_away if drain.now or drain.node not in nodes else None
        if at_once is not None and await asyncio.to_thread(at_once, drain.node):
            return JSONResponse({"accepted": "send away", "node": drain.node}, 202)
        if drain.node not in nodes:
            known = ", ".join(nodes) or "none"
            return error(404, f"there is no node {drain.node!r} in this run, which has: {known}")
        return await self._accept(DrainRequested(drain.node), {"accepted": "drain", "node": drain.node})

    async def _profile(self, wanted: WantedProfile) -> Response:
        if self.desk is None:
            return error(409, "this run has nobody to profile")
        return _told(self.desk.profile(wanted.rank, wanted.first, wanted.last), "application/json")

    async def _accept(self, wanted: Event, answer: dict[str, str]) -> Response:
        """Promise it once it is on disk, and not before."""
        if await asyncio.to_thread(self.ask, wanted):
            return JSONResponse(answer, 202)
        return error(
            503, "the manager has not recorded the request in time; it may be busy, or its disk may be full. Try again."
        )

    async def _token(self, wanted: CreateToken) -> Response:
        if self.mint is None:
            return error(409, "nobody can join this run: it was started by `varuna run`, not `varuna manager`")
        return JSONResponse({"join": self.mint(wanted.uses, wanted.life_s)}, 201)

    async def _link(self, _: Nothing) -> Response:
        return JSONResponse({"code": self.logins.invite()}, 201, headers=HEADERS)

    async def _void_links(self, _: Nothing) -> Response:
        return JSONResponse({"void": self.logins.void()}, 200)

    async def _void_tokens(self, _: Nothing) -> Response:
        if self.void_tokens is None:
            return error(409, "nobody can join this run: there are no tokens")
        return JSONResponse({"void": await asyncio.to_thread(self.void_tokens)}, 200)


def _token_of(request: Request) -> str:
    return bearer(request.headers.get("authorization", ""))


def _told(answer: DeskAnswer, kind: str) -> Response:
    """An answer of this kind, or, as long as there is none, JSON that says so."""
    kind = kind if answer.status == 200 else "application/json"
    return Response(answer.body, answer.status, media_type=kind, headers=HEADERS)


def _chunk(path: Path, offset: int) -> tuple[int, bytes, int]:
    """Read a part of a log: return where it begins, its bytes, and how large the log is."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = file.seek(min(size, offset) if offset >= 0 else max(0, size + offset))
        return start, file.read(_LOG_CHUNK_BYTES), size
