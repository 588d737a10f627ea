"""Processes that start in milliseconds, forked from one that has imported everything already.

Python's start with torch and its export costs three seconds of a core, and scenarios start hundreds of workers. What a
nursery forks is a process like any other: a child of who asked for it, with its own session, environment and command
line (``ps`` shows it), and no thread before its script. Four things are not real: the start of Python itself, that
every process has another hash seed, that it has to find out how many bytes each kind of section needs, and that Python
takes itself apart at the end, which costs as much as a short run. Tests of start and end ask for the fixture
``cold_start``.
"""

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, NamedTuple

CLI = "varuna.cli.main"
TORCHRUN = "torch.distributed.run"
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
_OPTIONS = frozenset({"stdin", "stdout", "stderr", "env", "cwd", "start_new_session", "text"})
"""Of ``Popen``: what else is asked for, only a real one does."""
_asking = threading.Lock()
_nursery: "socket.socket | None" = None
_process: "subprocess.Popen[bytes] | None" = None  # the nursery's, where it is one of its own


class Order(NamedTuple):
    """A request to start a process, and for whom."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    own_session: bool
    parent: int
    tethered: bool


# -- who asks --------------------------------------------------------------------------------------------------


class Process(subprocess.Popen[Any]):
    """A ``Popen``; scripts of this Python, its own command line and torchrun are forked from the nursery."""

    def __init__(self, args: Any, **options: Any) -> None:
        command = [os.fspath(part) for part in args] if isinstance(args, list | tuple) else []
        tethered = len(command) > 5 and command[3].endswith("tether.py")
        command = command[5:] if tethered else command  # what it does is done to what is forked
        environment = dict(options.get("env") or os.environ)
        self._is_forked = COLD not in environment and _can_fork(command) and options.keys() <= _OPTIONS
        if not self._is_forked:
            super().__init__(args, **options)
            return
        self.args, self.returncode = args, None
        self._reaping = threading.Lock()
        folder = os.fspath(options.get("cwd") or os.getcwd())
        own_session = options.get("start_new_session", False)
        order = Order(command, environment, folder, own_session, os.getpid(), tethered)
        with ExitStack() as theirs:
            fds = self._open_streams(theirs, options)
            self.pid = _ask(order, fds)

    def _open_streams(self, theirs: ExitStack, options: Mapping[str, Any]) -> list[int]:
        """Open what is a pipe, and the null device; returns the child's standard streams."""
        fds: list[int] = []
        ours: list[IO[Any] | None] = []
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            wanted, pipe = options.get(name), None
            if wanted == subprocess.PIPE:
                ends = os.pipe()
                keeps, gives = ends if number else ends[::-1]
                pipe = os.fdopen(keeps, ("r" if number else "w") + ("" if options.get("text") else "b"))
                theirs.callback(os.close, gives)
            elif wanted == subprocess.DEVNULL:
                gives = os.open(os.devnull, os.O_RDWR)
                theirs.callback(os.close, gives)
            elif wanted == subprocess.STDOUT:
                gives = fds[1]
            elif wanted is None:
                gives = number
            else:
                gives = wanted if isinstance(wanted, int) else wanted.fileno()
            fds.append(gives)
            ours.append(pipe)
        self.stdin, self.stdout, self.stderr = ours
        return fds

    def poll(self) -> int | None:
        if not self._is_forked:
            return super().poll()
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._is_forked:
            return super().wait(timeout)
        if timeout is None:
            with suppress(ChildProcessError):  # another thread was told
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        deadline_s = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.005)
        return code

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        if not self._is_forked:
            return super().communicate(input, timeout)
        assert input is None, "nothing is said to a process that is forked"
        said: dict[str, Any] = {}

        def read(name: str, stream: IO[Any]) -> None:
            with stream:
                said[name] = stream.read()

        streams = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams.items() if each[1]]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said.get("stdout"), said.get("stderr")


def _can_fork(command: list[str]) -> bool:
    what = _words(command)
    return what[:1] != [] and (what[0].endswith(".py") or what[:2] in (["-m", CLI], ["-m", TORCHRUN]))


def _words(command: list[str]) -> list[str]:
    """Return the words for this Python to run; none if the command is another program."""
    if command[:1] != [sys.executable]:
        return []
    return command[2:] if command[1:2] == ["-u"] else command[1:]


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
    """Import what workers and the command line do, and capture their model once, which imports more."""
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
    """Return the code that ``python COMMAND`` runs as ``__main__``, and its module."""
    main, words = ModuleType("__main__"), _words(command)
    vars(main)["__builtins__"] = __builtins__
    if words != command[1:]:
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, TextIOWrapper)
            stream.reconfigure(write_through=True)
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in more if folder and folder not in sys.path]
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None
        assert spec.origin is not None
        sys.argv, path = [spec.origin, *words[2:]], spec.origin
        main.__spec__, sys.path[0] = spec, os.getcwd()
    else:
        sys.argv, path = words, words[0]
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
    _nursery, subprocess.Popen = ours, Process  # type: ignore[misc,assignment]
    return None


def _live(order: Order | None) -> None:
    if order is None:
        os._exit(0)
    words = _words(order.command)
    starts_workers = words[:3] in (["-m", CLI, "run"], ["-m", CLI, "agent"]) or words[:2] == ["-m", TORCHRUN]
    if starts_workers and (newborn := _have_a_nursery()) is not None:
        order = newborn
    code, main = _program(order.command)
    global _status
    try:
        exec(code, vars(main))
    except SystemExit as left:
        if isinstance(left.code, int | None):
            _status = left.code or 0
        raise
    _status = 0


_status: int | None = None  # of this process's end, if that was in order


def _leave() -> None:
    """Registered first, and so called last, after all that others have to do at the end: nothing is left but to go."""
    if _status is not None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                return  # which is Python's own to say
        os._exit(_status & 0xFF)


if __name__ == "__main__":
    atexit.register(_leave)
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        import_everything()
        asked.send(b"ready")
        mine = _serve(asked)
    _live(mine)
