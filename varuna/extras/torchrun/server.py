"""The manager as torchrun's rendezvous: the shell around ``world``, on the server's event loop."""

import asyncio
import time
from collections.abc import Callable

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from varuna.extras.torchrun.report import MAX_REPORT_BYTES, TorchrunReport
from varuna.extras.torchrun.world import LEASE_S, TorchrunWorld, answer, heard, passed, stopped
from varuna.fleet.net.connection_limits import welcome
from varuna.fleet.net.protocol import JobIdentity
from varuna.fleet.net.requests import address_of, bearer, first_problem, read_body
from varuna.fleet.page import answers
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.registry import RefusedError, Registry, hashed
from varuna.fleet.state.inputs import StopRequested
from varuna.fleet.state.run_events import Notice

_WATCH_S = 1.0


class TorchrunServer:
    """Takes reports of torchrun agents, which have joined as machines do.

    Args:
        registry: knows who may come.
        audit: hears of refusals.
        post: takes what people should know, and the end of the run.
        is_new: whether the run has had no manager before.
    """

    def __init__(
        self, registry: Registry, audit: Audit, post: Callable[[Notice | StopRequested], None], *, is_new: bool
    ) -> None:
        self._registry, self._audit, self._post = registry, audit, post
        self._world = TorchrunWorld(opens_s=0.0 if is_new else time.monotonic() + LEASE_S)
        self._watching: asyncio.Task[None] | None = None

    def routes(self) -> list[BaseRoute]:
        """Return the one route."""
        return [Route("/torchrun", self._report, methods=["POST"])]

    @property
    def nodes(self) -> list[str]:
        """Return the nodes that are there; any thread may ask."""
        return list(self._world.nodes)

    def status(self) -> dict[str, object]:
        """Return what ``GET /status`` says of the world, if there is one; any thread may ask."""
        world = self._world
        if not world.nodes:
            return {}
        told = {"world": world.number, "members": list(world.members), "nodes": list(world.nodes)}
        return {"torchrun": {**told, "broken": world.broken, "over": world.over}}

    def stop(self, reason: str, exit_code: int) -> None:
        """Stop the run: nodes are told when they ask next."""
        self._world = stopped(self._world, reason, exit_code)

    async def _report(self, request: Request) -> Response:
        node, address = request.query_params.get("node", "")[:64], address_of(request)
        try:
            await asyncio.to_thread(self._registry.check, node, bearer(request.headers.get("authorization", "")))
        except RefusedError as error:
            self._audit.refused("report to torchrun's rendezvous", address, str(error))
            return answers.error(403, str(error))
        welcome(request)
        body = await read_body(request, MAX_REPORT_BYTES)
        try:
            report = TorchrunReport.model_validate_json(body or b"")
        except ValidationError as error:
            return answers.error(422, f"the report is invalid: {first_problem(error)}")
        if node not in self._world.nodes:
            what = f"torchrun --rdzv-id={report.run_id}"
            job = JobIdentity(version=report.version, script=what, script_sha256=hashed(what), args_sha256=hashed(""))
            if (difference := await asyncio.to_thread(self._registry.agree, job)) is not None:
                self._audit.refused(f"report as torchrun node {node}", address, difference)
                return answers.error(409, difference)
        self._become(heard(self._world, node, report, time.monotonic()))
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return JSONResponse(answer(self._world, node).model_dump())

    async def _watch(self) -> None:
        """Look for lost nodes, which say nothing."""
        while True:
            await asyncio.sleep(_WATCH_S)
            self._become(passed(self._world, time.monotonic()))

    def _become(self, now: TorchrunWorld) -> None:
        before, self._world = self._world, now
        if now.broken and now.broken != before.broken:
            self._post(Notice(text=f"torchrun: world {now.number} ends, {now.broken}"))
        if now.number != before.number:
            self._post(Notice(text=f"torchrun: world {now.number}: {', '.join(now.members)}"))
        if now.over and not before.over:
            self._post(Notice(text=now.over))
            self._post(StopRequested(now.over, now.exit_code))
