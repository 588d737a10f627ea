"""Processes that start in milliseconds, forked from one that has imported everything already.

Python's start with torch and its export costs three seconds of a core, and scenarios start hundreds of workers. What a
nursery forks is a process like any other: a child of who asked for it, with its own session, environment and command
line (``ps`` shows it), and no thread before its script. Three things are not real: the start of Python itself, that
every process has another hash seed, and that it has to find out how many bytes each kind of section needs. Tests of the
start itself ask for the fixture ``cold_start``.
"""

import ctypes
import gc
import importlib.util
import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

CLI = "varuna.cli.main"
COLD = "COLD_START"
"""In the environment of a process that is to start for real, as all that it starts."""

_BOUND_S = 200.0
_ORDER_BYTES = 2**17
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROOM = "x" * 4096  # of the nursery's own command line, where those of its children are written
_prctl: Callable[..., int] = ctypes.CDLL(None).prctl
_setns: Callable[..., int] = ctypes.CDLL(None).setns
_CLONE_NEWNET = 0x40000000
_NAMESPACE = "NETWORK_NAMESPACE"  # see ``network``, which this file cannot import: it runs as a program
_cold_popen = subprocess.Popen
_started_with = inspect.signature(vars(subprocess.Popen)["_execute_child"])
_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
"""Of the three pipes, as ``Popen`` names them."""
_THEIR_ENDS = ("p2cread", "c2pwrite", "errwrite")
_asking = threading.Lock()
_nursery: "socket.socket | None" = None
_process: "subprocess.Popen[bytes] | None" = None  # the nursery's, where it is one of its own


class Order(NamedTuple):
    """What to start, and for whom."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    own_session: bool
    parent: int
    tethered: bool


# -- who asks --------------------------------------------------------------------------------------------------


class Process(subprocess.Popen[Any]):
    """A ``Popen``; scripts of this Python and its own command line are forked from the nursery."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        command = [os.fspath(part) for part in args] if isinstance(args, list | tuple) else []
        tethered = len(command) > 5 and command[3].endswith("tether.py")
        command = command[5:] if tethered else command  # what it does is done to what is forked
        given = _started_with.bind(self, args, *rest).arguments
        environment = dict(os.environ if given["env"] is None else given["env"])
        if COLD in environment or not _can_fork(command):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        fds = [given[end] if given[end] >= 0 else number for number, end in enumerate(_THEIR_ENDS)]
        folder, own_session = os.fspath(given["cwd"] or os.getcwd()), given["start_new_session"]
        order = Order(command, environment, folder, own_session, os.getpid(), tethered)
        try:
            self.pid = _ask(order, fds)
            self._child_created = True
        finally:
            self._close_pipe_fds(*(given[end] for end in _ENDS))  # type: ignore[attr-defined]


def _can_fork(command: list[str]) -> bool:
    is_ours = command[1:2] != [] and (command[1].endswith(".py") or command[1:3] == ["-m", CLI])
    return is_ours and command[0] == sys.executable


def _ask(order: Order, fds: list[int]) -> int:
    with _asking:
        nursery = _nursery or _open()
        socket.send_fds(nursery, [json.dumps(order).encode()], fds)
        answer = nursery.recv(64)
    if not answer:
        raise RuntimeError("the nursery of warm processes is gone; what it said is on standard error")
    return int(answer)


def _open() -> socket.socket:
    """Start the first nursery: for real."""
    global _nursery, _process
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(_BOUND_S)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with theirs:
        _process = _cold_popen(
            [sys.executable, __file__, str(theirs.fileno()), _ROOM],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert ours.recv(16) == b"ready"
    _nursery = ours
    return ours


def close() -> None:
    """End the first nursery, if there is one; what it forked lives on."""
    global _nursery, _process
    if _nursery is not None and _process is not None:
        _nursery.close()
        _process.wait(_BOUND_S)
        _nursery = _process = None


# -- the nursery -----------------------------------------------------------------------------------------------


def import_everything() -> None:
    """What workers and the command line import, and a first capture of their model, which imports more."""
    for name in (
        "cli.main",
        "fleet.agent.agent",
        "fleet.service.cluster_workers",
        "fleet.service.local_workers",
        "observe.progress",
        "trainer",
    ):
        importlib.import_module(f"varuna.{name}")

    import torch

    from tests.scenarios import job
    from varuna.data.samples import SampleSource
    from varuna.partition.capture.capture import Recipe
    from varuna.partition.model import partition

    partition(
        Recipe(lambda: job.Language(job.LAYERS, 0.1)),
        SampleSource(job.Sentences(unstable=False), seed=0).micro_batch([0, 1]).tensors,
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named]),
        cut_points=job.LAYERS + 1,
    )


def _serve(orders: socket.socket) -> Order | None:
    """Fork a process per order. Returns its order in each of them, and None once nobody can ask any more."""
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "what is imported starts a thread, which no fork would have"
    while True:
        data, fds, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 3)
        if not data:
            return None
        order = Order(*json.loads(data))
        if between := os.fork():
            for fd in fds:
                os.close(fd)
            os.waitpid(between, 0)
        elif os.fork():
            os._exit(0)  # so that the newborn becomes a child of the next subreaper above: of who asked
        else:
            _be_born(order, fds, orders)
            return order


def _be_born(order: Order, fds: list[int], orders: socket.socket) -> None:
    """All that makes this process the one that was ordered."""
    deadline_s = time.monotonic() + _BOUND_S
    while os.getppid() != order.parent:
        if time.monotonic() > deadline_s:
            os._exit(99)
        time.sleep(0.001)
    if order.tethered:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != order.parent:
            os._exit(99)
    if order.own_session:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order.environment)
    if namespace := os.environ.pop(_NAMESPACE, ""):
        with open(namespace) as entrance:
            assert _setns(entrance.fileno(), _CLONE_NEWNET) == 0, f"{namespace} cannot be entered"
    os.chdir(order.folder)
    random.seed()
    _show(order.command)
    orders.send(str(os.getpid()).encode())
    orders.close()


def _show(command: list[str]) -> None:
    """Write the command line where ``ps`` reads it, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(part) for part in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _program(command: list[str]) -> tuple[CodeType, ModuleType]:
    """What ``python COMMAND`` runs as ``__main__``."""
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    if command[1] == "-m":
        spec = importlib.util.find_spec(command[2])
        assert spec is not None
        assert spec.origin is not None
        sys.argv, path = [spec.origin, *command[3:]], spec.origin
        main.__spec__, sys.path[0] = spec, os.getcwd()
    else:
        sys.argv, path = command[1:], command[1]
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main.__file__ = path
    sys.modules["__main__"] = main
    return compile(Path(path).read_bytes(), path, "exec"), main


def _have_a_nursery() -> Order | None:
    """This process starts workers: in a fork of it, as it is now, they begin. Returns as ``_serve`` does, in those."""
    global _nursery
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        _show(["nursery"])
        ours.close()
        order = _serve(theirs)
        if order is None:
            os._exit(0)
        return order
    theirs.close()
    ours.settimeout(_BOUND_S)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _nursery, subprocess.Popen = ours, Process  # type: ignore[misc]
    return None


def _live(order: Order | None) -> None:
    if order is None:
        os._exit(0)
    starts_workers = order.command[1:4] in (["-m", CLI, "run"], ["-m", CLI, "agent"])
    if starts_workers and (newborn := _have_a_nursery()) is not None:
        order = newborn
    code, main = _program(order.command)
    exec(code, vars(main))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        import_everything()
        asked.send(b"ready")
        mine = _serve(asked)
    _live(mine)
