"""Measure a manager of many machines under load: agents on real TLS WebSockets, each with a beat a second.

    python benchmarks/manager_load.py [--agents 1000] [--seconds 20] [--stalled 5] [--bare]

A manager runs in a process of its own, as `varuna manager` does: doors, journal, state machine. This process plays all
agents on one event loop: each greets, says that its worker is there, and sends a pulse a second, which the manager
answers. Some agents stop reading after a while. Printed: how long connecting took, round trips of the pulses, beside
them how late this process was woken (on a busy machine that is most of it), the time until an instruction has reached
everyone, and how the others fared while some were deaf.

With --bare the server has no manager: it reads each frame without looking at it, and answers as often. A beat then
costs TLS, system calls and the frames of the libraries.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from varuna import __version__
from varuna.core.devices import WorkerGroups
from varuna.core.messages import MAX_FRAME_BYTES, Beat, Finish
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.manager.reconcile import node_of
from varuna.fleet.net.beats import BeatMemory
from varuna.fleet.net.ca import SERVER_NAME, client_context, open_authority
from varuna.fleet.net.connection_limits import welcome
from varuna.fleet.net.protocol import (
    DownItem,
    Greet,
    Identity,
    JobIdentity,
    Pulse,
    PulseAnswer,
    Started,
    Tell,
    UpItem,
    Welcome,
    down_frame,
)
from varuna.fleet.net.serving import Serving, raise_open_files
from varuna.fleet.run_folder.registry import Registry, hashed
from varuna.fleet.service.cluster_workers import ClusterLaunch, cluster_config
from varuna.fleet.service.service import ManagerService, ServiceConfig

JOB = JobIdentity(version=__version__, script="train.py", script_sha256="0" * 64, args_sha256="0" * 64)

ASKS_EVERY = 5
"""Pulses: an agent that has heard nothing for 4 s asks for an answer."""


def manage(run_dir: Path, pipe: Connection) -> None:
    """The manager's process; ``tell`` on the pipe sends an instruction to every worker."""

    def no_plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        raise AssertionError("no worker ever says Hello here")

    cluster = ManagerService(
        ServiceConfig(run_dir=run_dir),
        ClusterLaunch(),
        config=cluster_config(10**6),
        planner=no_plan,
        write=lambda line: None,
    )

    def serve_pipe() -> None:
        pipe.send(cluster.port)
        while (order := pipe.recv()) != "end":
            if order == "tell":
                began_s = time.monotonic()
                for name in cluster.manager.fleet.workers:
                    cluster.workers.send(name, Finish(failure="an instruction for all"))
                pipe.send(time.monotonic() - began_s)
            elif order == "usage":
                pipe.send(usage())
        cluster.workers.close()
        pipe.send("ended")

    import threading

    threading.Thread(target=cluster.manager.run, daemon=True).start()
    cluster.open()
    serve_pipe()


def manage_nothing(run_dir: Path, pipe: Connection) -> None:
    """In place of ``manage``: the same server, behind which nobody listens."""
    greeting = Welcome(manager="m", run="r", resumed=False).model_dump_json()
    answer = PulseAnswer(received=0).model_dump_json()

    async def serve(websocket: WebSocket) -> None:
        welcome(websocket)  # strangers may be few, and for ten seconds
        await websocket.accept()
        await websocket.receive_text()
        await websocket.send_text(greeting)
        with suppress(WebSocketDisconnect):
            while True:
                if '"asks":true' in await websocket.receive_text():
                    await websocket.send_text(answer)

    tls = open_authority(run_dir / "tls").server_context()
    serving = Serving(port=0, max_frame_bytes=MAX_FRAME_BYTES, tls=tls)
    serving.start(Starlette(routes=[WebSocketRoute("/agent", serve)]))
    pipe.send(serving.port)
    while pipe.recv() == "usage":
        pipe.send(usage())


def usage() -> tuple[float, float]:
    """Seconds of processor time, and MiB of memory at most."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


class Crowd:
    """All agents, on one event loop."""

    def __init__(self, port: int, certificate_pem: str, identities: list[Identity]) -> None:
        self.port, self.identities = port, identities
        self.tls = client_context(certificate_pem)
        self.round_trips_s: list[float] = []
        self.beats = 0
        self.reached_s: dict[str, float] = {}
        self.connected = self.refused = 0
        self.broken = 0
        self.deaf: set[str] = set()
        self.stop = asyncio.Event()

    async def play(self, identity: Identity, gate: asyncio.Semaphore) -> None:
        async with gate:
            while (websocket := await self.meet(identity)) is None:
                self.refused += 1
                await asyncio.sleep(random.uniform(0.5, 1.0))
            worker = f"{identity.node}.0"
            await websocket.send(UpItem(number=1, received=0, body=Started(worker=worker)).model_dump_json())
            self.connected += 1
        asked: list[float] = []
        received = [0]
        pulses = asyncio.create_task(self.beat(websocket, worker, asked, received))
        try:
            async for text in websocket:
                frame = down_frame.validate_json(text)
                if isinstance(frame, PulseAnswer):
                    self.round_trips_s.append(time.monotonic() - asked.pop(0))
                elif isinstance(frame, DownItem):
                    received[0] = frame.number
                    if isinstance(frame.body, Tell):
                        self.reached_s[node_of(frame.body.worker)] = time.monotonic()
                if identity.node in self.deaf:
                    websocket.transport.pause_reading()
                    await self.stop.wait()
        except Exception:  # noqa: BLE001 counted below
            self.broken += not self.stop.is_set() and identity.node not in self.deaf
        finally:
            pulses.cancel()
            websocket.transport.abort()

    async def meet(self, identity: Identity) -> ClientConnection | None:
        """A connection that is welcome; None if there was no time for it, as for agents, which come again."""
        try:
            websocket = await connect(
                f"wss://127.0.0.1:{self.port}/agent?node={identity.node}",
                ssl=self.tls,
                server_hostname=SERVER_NAME,
                additional_headers={"Authorization": f"Bearer {identity.secret}"},
                compression=None,
                ping_interval=None,
                open_timeout=60,
                proxy=None,
            )
            await websocket.send(Greet(session=identity.node, job=JOB).model_dump_json())
            down_frame.validate_json(await websocket.recv())
        except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed):
            return None
        return websocket

    async def beat(self, websocket: ClientConnection, worker: str, asked: list[float], received: list[int]) -> None:
        await asyncio.sleep(random.random())
        beat, memory = Beat(generation=-1, step=0, activity="waits for an assignment"), BeatMemory()
        for number in itertools.count():
            asks = number % ASKS_EVERY == 0
            if asks:
                asked.append(time.monotonic())
            self.beats += 1
            beats = memory.shorten({worker: beat})
            await websocket.send(Pulse(received=received[0], asks=asks, beats=beats).model_dump_json())
            await asyncio.sleep(1.0)


async def measure(args: argparse.Namespace, pipe: Connection, crowd: Crowd) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(64)
    pipe.send("usage")
    idle = pipe.recv()
    began_s = time.monotonic()
    tasks = [asyncio.create_task(crowd.play(identity, gate)) for identity in crowd.identities]
    while crowd.connected < args.agents:
        await asyncio.sleep(0.02)
        assert time.monotonic() < began_s + 300, f"{crowd.connected} of {args.agents} connected in five minutes"
    connected_s = time.monotonic() - began_s
    pipe.send("usage")
    busy = pipe.recv()
    own_s = usage()[0]
    await asyncio.sleep(2.0)

    async def ask(order: str) -> object:
        pipe.send(order)
        return await loop.run_in_executor(None, pipe.recv)

    async def watch(seconds: float) -> tuple[list[float], float]:
        """Round trips, and how late this process itself was woken, both in 99 of 100 cases."""
        crowd.round_trips_s.clear()
        lags_s = []
        until_s = time.monotonic() + seconds
        while (begin_s := time.monotonic()) < until_s:
            await asyncio.sleep(0.01)
            lags_s.append(time.monotonic() - begin_s - 0.01)
        return sorted(crowd.round_trips_s), sorted(lags_s)[int(0.99 * len(lags_s))]

    async def tell() -> float:
        crowd.reached_s.clear()
        begin_s = time.monotonic()
        await ask("tell")
        wanted = args.agents - len(crowd.deaf)
        while len([node for node in crowd.reached_s if node not in crowd.deaf]) < wanted:
            await asyncio.sleep(0.005)
            assert time.monotonic() < begin_s + 120, f"{len(crowd.reached_s)} of {wanted} were reached in two minutes"
        return max(crowd.reached_s.values()) - begin_s

    async def tell_all() -> dict[str, float]:
        """Time an instruction to everybody, and to all who read it while some do not."""
        reached_s = [await tell() for _ in range(5)]
        crowd.deaf = {identity.node for identity in crowd.identities[: args.stalled]}
        for _ in range(20):  # the deaf ones are owed more and more
            await tell()
        mixed, mixed_lag_s = await watch(args.seconds)
        return {
            "instruction_to_all_s": statistics.median(reached_s),
            "stalled_agents": args.stalled,
            "stalled_beat_p99_ms": 1e3 * mixed[int(0.99 * len(mixed))],
            "stalled_beats": len(mixed),
            "stalled_own_lag_p99_ms": 1e3 * mixed_lag_s,
            "stalled_instruction_to_all_s": statistics.median([await tell() for _ in range(5)]),
        }

    before, begun = await ask("usage"), crowd.beats
    calm, calm_lag_s = await watch(args.seconds)
    after, beats = await ask("usage"), crowd.beats - begun
    assert isinstance(before, tuple)
    assert isinstance(after, tuple)
    found = {
        "agents": args.agents,
        "connect_s": connected_s,
        "connect_again": crowd.refused,
        "manager_ms_per_connect": 1e3 * (busy[0] - idle[0]) / args.agents,
        "own_ms_per_connect": 1e3 * own_s / args.agents,
        "beats": beats,
        "answers": len(calm),
        "beat_p50_ms": 1e3 * statistics.median(calm),
        "beat_p99_ms": 1e3 * calm[int(0.99 * len(calm))],
        "beat_max_ms": 1e3 * calm[-1],
        "own_lag_p99_ms": 1e3 * calm_lag_s,
        "manager_us_per_beat": 1e6 * (after[0] - before[0]) / beats,
        "manager_cpu_share": (after[0] - before[0]) / args.seconds,
        "manager_memory_mib": after[1],
    }
    if not args.bare:
        found |= await tell_all()
    crowd.stop.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found | {"broken_connections_of_others": crowd.broken}


@contextmanager
def manager(run_dir: Path, *, bare: bool) -> Iterator[tuple[Connection, int]]:
    ours, theirs = multiprocessing.Pipe()
    target = manage_nothing if bare else manage
    process = multiprocessing.get_context("spawn").Process(target=target, args=(run_dir, theirs), daemon=True)
    process.start()
    try:
        yield ours, ours.recv()
    finally:
        process.kill()
        process.join(10)


def event_loop() -> Callable[[Coroutine[Any, Any, dict[str, float]]], dict[str, float]]:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--stalled", type=int, default=5)
    parser.add_argument("--bare", action="store_true")
    args = parser.parse_args()
    raise_open_files()
    with tempfile.TemporaryDirectory() as folder, manager(Path(folder), bare=args.bare) as (pipe, port):
        registry = Registry(Path(folder))
        token = registry.mint(uses=args.agents)
        identities = [
            Identity(node=registry.join(token, f"vm{number}", hashed(f"secret{number}")), secret=f"secret{number}")
            for number in range(args.agents)
        ]
        registry.close()
        crowd = Crowd(port, (Path(folder) / "tls" / "ca.pem").read_text(), identities)
        print(json.dumps(event_loop()(measure(args, pipe, crowd)), indent=1))


if __name__ == "__main__":
    main()
