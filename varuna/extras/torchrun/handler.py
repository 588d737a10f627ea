"""torchrun's view of a Varuna manager: a ``RendezvousHandler``, which says who is in the world, and when to restart."""

import atexit
import os
import random
import socket
import sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from varuna.core.errors import FleetError, UsageError
from varuna.core.node_notices import NodeNotice, PreemptionNotice
from varuna.extras.torchrun.node import Placed, TorchrunAgent, WaitedTooLong, WorldOver
from varuna.fleet.net.join_string import JOIN_VARIABLE, SCHEME, JoinString, parse_invitation
from varuna.fleet.notices.spot_notices import SpotNotices
from varuna.fleet.run_folder.join_file import read_join
from varuna.process.console import say

_BACKEND = "varuna"
_PATIENCE_S = 600
_STORE_S = 60.0
_PORTS, _TRIES = 12_000, 20
_OURS, _TORCHS = "join_timeout", ("timeout",)


class VarunaRendezvous(RendezvousHandler):
    """The manager's worlds. A store per world lies in the torchrun agent of rank 0, and the workers make their own.

    Args:
        agent: this node.
        run_id: of torchrun.
        local_addr: address of this node for others; None: the one that leads to the manager.
    """

    def __init__(self, agent: TorchrunAgent, run_id: str, local_addr: str | None) -> None:
        self._agent, self._run_id, self._local_addr = agent, run_id, local_addr
        self._store: Store | None = None
        self._has_worked = False

    def get_backend(self) -> str:
        """Return the name for ``--rdzv-backend``."""
        return _BACKEND

    def get_run_id(self) -> str:
        """Return the value of ``--rdzv-id``."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next world.

        Raises:
            RendezvousTimeoutError: what it waits for has not come in time.
            RendezvousClosedError: the run is over.
            RendezvousConnectionError: the manager refuses this node.
            SystemExit: with 0: the run does not need this node any more.
        """
        own_failure = self._has_worked and not self._agent.waiting
        self._store = None
        while True:
            try:
                placed = self._agent.join()
            except WorldOver as over:
                if over.code or own_failure:
                    raise RendezvousClosedError(str(over)) from over
                say(f"torchrun node {self._agent.node} ends: {over}")
                raise SystemExit(0) from over
            except WaitedTooLong as error:
                raise RendezvousTimeoutError(str(error)) from error
            except FleetError as error:
                raise RendezvousConnectionError(str(error)) from error
            self._has_worked = True
            try:
                return self._open(placed)
            except RuntimeError as error:  # its first node is gone: joining again makes the manager form the next one
                say(f"world {placed.world}: the store at {placed.store} does not answer ({error})")

    def _open(self, placed: Placed) -> RendezvousInfo:
        """Open the store of a world, and tell where its workers meet.

        Raises:
            RuntimeError: it cannot be reached.
        """
        address = self._local_addr or _address_towards(self._agent.place)
        bound = timedelta(seconds=_STORE_S)
        if placed.rank == 0:
            served = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=bound)
            self._agent.offer_store(f"{address}:{served.port}")
        else:
            host, _, port = placed.store.rpartition(":")
            served = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=bound)
        self._store = PrefixStore(f"{self._run_id}/{placed.world}", served)
        meeting = RendezvousStoreInfo.build(placed.rank, self._store, address, None if placed.rank else _worker_port())
        return RendezvousInfo(self._store, placed.rank, placed.size, meeting)

    def num_nodes_waiting(self) -> int:
        """Return more than 0 if workers must restart in another world; torchrun asks every moment while they run."""
        return self._agent.waiting

    def is_closed(self) -> bool:
        """Return False: the manager says so when it is asked for a world."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the manager knows by itself."""

    def shutdown(self) -> bool:
        """Tell the manager how this torchrun ends."""
        error = sys.exception()
        self._agent.leave("finished" if error is None else "departed" if isinstance(error, SystemExit) else "failed")
        return True


def create(parameters: RendezvousParameters) -> VarunaRendezvous:
    """Create the handler for torchrun's flags.

    Raises:
        UsageError: a flag has something else than is needed.
    """
    unknown = sorted(set(parameters.config) - {_OURS, *_TORCHS})
    if unknown:
        raise UsageError(f"--rdzv-conf {unknown[0]}: --rdzv-backend={_BACKEND} has no such setting, only {_OURS}")
    endpoint = parameters.endpoint.strip()
    text = endpoint or os.environ.pop(JOIN_VARIABLE, "")  # it may admit many machines: nothing for workers
    join_file = Path(endpoint).absolute() if endpoint and not endpoint.startswith(SCHEME) else None

    def invited() -> JoinString:
        if join_file is None:
            return parse_invitation(text)
        try:
            return read_join(join_file)
        except OSError as error:
            raise UsageError(
                f"--rdzv-endpoint {endpoint} is neither a JOIN string, as `varuna join-token` prints it, nor a file "
                f"that has one ({error.strerror}). It may also be in {JOIN_VARIABLE}, and --rdzv-endpoint empty."
            ) from error

    invited()
    agent = TorchrunAgent(
        invited,
        join_file,
        run_id=parameters.run_id,
        least=parameters.min_nodes,
        most=parameters.max_nodes,
        patience_s=float(parameters.get_as_int(_OURS, _PATIENCE_S) or _PATIENCE_S),
        tell=say,
    )

    def warn(notice: NodeNotice) -> None:
        if isinstance(notice, PreemptionNotice):
            agent.leave_soon(notice.reason)

    SpotNotices(warn).start()
    atexit.register(agent.leave, "departed")  # a signal ends torchrun without a word to its rendezvous
    return VarunaRendezvous(agent, parameters.run_id, parameters.local_addr)


def _worker_port() -> int | None:
    """Find a free port for the store of the workers, which open it only seconds later; None: torchrun picks one.

    It lies below those that outgoing connections take: on a busy machine one of them would have it by then.
    """
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return None
    for port in random.sample(range(max(1024, first - _PORTS), first), k=min(_TRIES, first - 1024)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return None


def _address_towards(place: str) -> str:
    """Return this machine's address on the way to ``host:port``; no packet is sent."""
    host, _, port = place.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError:
            return socket.getfqdn()
        address: str = probe.getsockname()[0]
    return address
