"""Workers on other machines, reached through an agent on each: ``varuna manager`` and ``varuna run --on``."""

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from varuna.core.extras import extras
from varuna.core.messages import MAX_FRAME_BYTES, Assign, ToWorker
from varuna.fleet.manager.agent_server import AgentServer
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.manager.reconcile import node_of
from varuna.fleet.net.addresses import own_address
from varuna.fleet.net.ca import open_authority
from varuna.fleet.net.join_string import JoinString
from varuna.fleet.net.protocol import End, Tell
from varuna.fleet.net.serving import Serving, raise_open_files
from varuna.fleet.page.logins import Logins
from varuna.fleet.run_folder.join_file import renew_join
from varuna.fleet.run_folder.registry import TOKEN_LIFE_S, Registry
from varuna.fleet.run_folder.worker_logs import LogKeeper
from varuna.fleet.service.service import Parts, ServiceConfig, page_address
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import Notice
from varuna.fleet.state.stutter import SLOW_RATIO
from varuna.process.garbage import collect_rarely

_FAREWELL_S = 10.0
"""For agents to hear that the run is over, and to send the rest of their logs."""
FUTILE_S = 1800.0
"""Cables between machines have so long to come back: as long as agents without a manager and a step wait."""

_ODD = (
    "{} has the keys of a run but an empty journal: starting a new run. If run.db was copied without its "
    "run.db-wal, stop this manager, copy both, and start it again"
)


@dataclass(frozen=True)
class ClusterLaunch:
    """Machines come by themselves, each with an agent that starts its workers; they train on without their manager.

    Args:
        advertised: address under which agents reach the manager; empty: the one that it listens on, or this machine's
            own if that is 0.0.0.0.
    """

    advertised: str = ""
    outlives = True
    logs = "logs"

    def open(self, place: ServiceConfig, parts: Parts) -> "ClusterWorkers":
        """Build the back end.

        Raises:
            FleetError: the port is taken, or the folder is of no use.
        """
        return ClusterWorkers(self.advertised or own_address(place.host), place, parts)


class World(Protocol):
    """Machines that another launcher's agents speak for, such as torchrun's."""

    def routes(self) -> list[BaseRoute]:
        """Return the HTTP routes by which they report."""

    @property
    def nodes(self) -> list[str]:
        """Nodes that are there; any thread may ask."""

    def status(self) -> dict[str, object]:
        """Return what ``GET /status`` says of it; any thread may ask."""

    def stop(self, reason: str, exit_code: int) -> None:
        """Tell its nodes that the run is over, when they ask next."""


class ClusterWorkers:
    """A ``service.BackEnd``; ``invite`` and ``send_away`` may be called by any thread."""

    def __init__(self, advertised: str, place: ServiceConfig, parts: Parts) -> None:
        raise_open_files()
        self._advertised, self._run_dir = advertised, place.run_dir
        self._is_odd = parts.is_new and (place.run_dir / "tls" / "ca.pem").exists()
        self._registry = Registry(place.run_dir)
        self._authority = open_authority(place.run_dir / "tls")
        self.certificate_pem = self._authority.certificate_pem
        self._door = AgentServer(
            registry=self._registry,
            certificate_pem=self.certificate_pem,
            manager=secrets.token_hex(8),
            run=parts.run,
            post=parts.mailbox.post,
            logs=LogKeeper(place.run_dir / "logs"),
            audit=parts.audit,
            write=parts.write,
        )
        self._worlds: list[World] = [
            make(self._registry, parts.audit, parts.mailbox.post, is_new=parts.is_new) for make in extras("worlds")
        ]
        self._serving = Serving(
            host=place.host, port=place.port, max_frame_bytes=MAX_FRAME_BYTES, tls=self._authority.server_context()
        )
        self.port = self._serving.port
        self.access_host = "127.0.0.1" if place.host in ("0.0.0.0", "127.0.0.1") else place.host

    # -- what the manager wants --------------------------------------------------------------------------

    def spawn(self, avoided: Collection[str]) -> str:
        """Never asked for: machines come by themselves."""
        raise AssertionError("an elastic run cannot start workers")

    def send(self, name: str, message: ToWorker) -> None:
        """Send a message to a worker; with its part in a generation it learns who relays."""
        if isinstance(message, Assign):
            message = Assign(assignment=message.assignment.model_copy(update={"relays": self._door.relays()}))
        self._serving.call(self._door.send, node_of(name), Tell(worker=name, message=message))

    def kill(self, name: str, *, rests: bool = False) -> None:
        """End a worker, as soon as its agent is there."""
        self._serving.call(self._door.send, node_of(name), End(worker=name, rests=rests))

    def set_main(self, name: str) -> None:
        """Show the output of this worker."""
        self._serving.call(self._door.set_main, name)

    def heard_s(self) -> float | None:
        """The newest moment at which agents could be heard."""
        return self._serving.ran_s

    def release(self, node: str, *, drained: bool) -> None:
        """Give back a machine that the run has left; one that was drained needs another secret to come back."""
        reason = "drained" if drained else "the run no longer uses this machine"
        if drained:
            self._registry.revoke(node, reason)
        self._serving.call(lambda: self._door.dismiss(node, reason, 0, drained=drained))

    # -- what its operator wants -------------------------------------------------------------------------

    def operator_api(self, plain: OperatorApi) -> OperatorApi:
        """Machines can join, and be sent away."""
        return replace(
            plain,
            hosts=self._door.hosts,
            mint=lambda uses, life_s: str(self.invite(uses=uses, life_s=life_s)),
            void_tokens=self._registry.void_tokens,
            send_away=self.send_away,
        )

    def invite(self, *, uses: int = 1, life_s: float = TOKEN_LIFE_S) -> JoinString:
        """Create a JOIN string."""
        return JoinString(
            host=self._advertised,
            port=self.port,
            fingerprint=self._authority.fingerprint,
            token=self._registry.mint(uses=uses, life_s=life_s),
        )

    def send_away(self, node: str) -> bool:
        """Void a machine's secret, and drop its workers, now; False if no such machine ever joined."""
        if not self._registry.revoke(node, "sent away"):
            return False
        self._serving.call(self._door.send_away, node, "its machine was removed")
        return True

    @property
    def machines(self) -> int:
        """Number of connected agents; for any thread."""
        return len(self._door.connected)

    def status(self) -> dict[str, object]:
        """Say which agents are there."""
        told: dict[str, object] = {"connected": self._door.connected}
        for world in self._worlds:
            told |= world.status()
        return told

    def introduction(self, logins: Logins) -> list[Notice]:
        """Say where the manager is, and whether its folder is as it should be."""
        page = page_address("https", self._advertised, self.port, logins)
        where = f"manager at {self._advertised}:{self.port}, run folder {self._run_dir}"
        notices = [Notice(text=where), Notice(text=f"page at {page}")]
        try:
            renew_join(self._run_dir, self._advertised, self.port, self._authority.fingerprint)
        except OSError as error:
            text = f"agents do not learn where this manager is from {error.filename}: {error.strerror}"
            notices.append(Notice(text=text, warning=True))
        return [*notices, *([Notice(text=_ODD.format(self._run_dir), warning=True)] if self._is_odd else [])]

    # -- from start to end -------------------------------------------------------------------------------

    def start(self, routes: Sequence[BaseRoute]) -> None:
        """Let agents and people in from now on."""
        collect_rarely()
        self._serving.start(Starlette(routes=[*self._door.routes(), *self._world_routes(), *routes]))

    def leave(self, ended: Ended | None) -> str:
        """Agents leave by themselves once the run has ended and they have sent what they still had."""
        if ended is not None:
            reason = f"the run is over: {ended.text.splitlines()[0] if ended.text else 'done'}"
            self._serving.call(self._door.dismiss, None, reason, ended.exit_code)
            for world in self._worlds:
                self._serving.call(world.stop, reason, ended.exit_code)
            deadline_s = time.monotonic() + _FAREWELL_S
            while self._has_guests() and time.monotonic() < deadline_s:
                time.sleep(0.05)
        return ""

    def _world_routes(self) -> list[BaseRoute]:
        return [route for world in self._worlds for route in world.routes()]

    def _has_guests(self) -> bool:
        return bool(self._door.connected) or any(world.nodes for world in self._worlds)

    def close(self) -> None:
        """Give back the port, and close the registry."""
        self._serving.stop()
        self._registry.close()


def cluster_config(workers: int) -> FleetConfig:
    """Settings of a manager for machines that come by themselves."""
    return FleetConfig(
        workers=workers,
        elastic=True,
        futile_s=FUTILE_S,
        replace=False,
        wait_s=float("inf"),
        suspect_lease_s=2.5,  # agents pass beats on once a second
        slow_ratio=SLOW_RATIO,
        exit_grace_s=0.5,  # an agent reports an exit at once, and its own end has had a moment's grace already
    )
