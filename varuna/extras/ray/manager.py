"""The actor that keeps a run's manager on the head node of a Ray cluster. Runs in a process of Ray's.

It runs the user's own command line again, as a process of its own. Ray starts the actor anew where it was lost, and the
actor starts the process anew where that was killed; the run's folder says where it was.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from varuna.core.errors import UsageError
from varuna.extras.ray import cluster as ray_cluster
from varuna.fleet.engines.engine import EnginePlace
from varuna.fleet.run_folder.connection_file import read_access
from varuna.process.tethering import tether

KEPT_VARIABLE, RUNTIME_ENV_VARIABLE = "VARUNA_RAY_KEPT", "VARUNA_RAY_RUNTIME_ENV"
"""In the environment of a manager that an actor keeps: that it is one, and the environment of Ray's for its agents."""
_EXIT_FILE = "manager.exit"
_KEPT_BYTES = 2**20
_AGAIN_S = 1.0
_UNREAD_S = 30.0
"""Seconds that the actor of a run that is over waits for a command that reads how it ended."""


def run_name(place: EnginePlace, options: Mapping[str, str]) -> str:
    """Return the name of a run in its cluster.

    Raises:
        UsageError: it has characters that could be mistaken.
    """
    name = options["name"] or place.run_dir.name
    if not name or not all(char.isalnum() or char in "._-" for char in name):
        raise UsageError(f"{name!r} is not a name: use letters, digits, dots, dashes. Give --name.")
    return name


def actor_name(name: str) -> str:
    """Return the name of a manager's actor."""
    return f"{name}/manager"


@dataclass(frozen=True)
class KeptCommand:
    """A command line of Varuna's that an actor runs.

    Args:
        name: of the run.
        words: the command line, without the program.
        folder: where it runs; empty: in the actor's own working directory, a copy of the job's.
        run_dir: the run's folder.
        environment: more variables.
        runtime_env: Ray's environment of the job, as JSON, which agents get too.
    """

    name: str
    words: tuple[str, ...]
    folder: str
    run_dir: str
    environment: Mapping[str, str]
    runtime_env: str


@dataclass(frozen=True)
class ManagerOutput:
    """Output of the manager since it was asked last.

    Args:
        life: of the actor; offsets count from its start.
        out: standard output, up to ``out_end``.
        err: standard error, up to ``err_end``.
        code: exit code, once the run is over.
    """

    life: int
    out: bytes
    out_end: int
    err: bytes
    err_end: int
    code: int | None


class ManagerActor:
    """One manager, for as long as its run lasts."""

    def __init__(self, command: KeptCommand) -> None:
        import ray

        self._command, self._life = command, time.time_ns()
        self._out, self._err = _Kept(), _Kept()
        self._code: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._heard_s = time.monotonic()
        self._exit_file = Path(command.run_dir) / _EXIT_FILE
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            self._exit_file.unlink(missing_ok=True)
        threading.Thread(target=self._keep, name="varuna-manager", daemon=True).start()

    def command(self) -> KeptCommand:
        """Return the command that this actor runs."""
        return self._command

    def output_after(self, life: int, out: int, err: int) -> ManagerOutput:
        """Return the output after these offsets, which are of that life."""
        self._heard_s = time.monotonic()
        code = self._code  # first: what was said before the end is all there then
        out_end, said = self._out.after(out if life == self._life else 0)
        err_end, warned = self._err.after(err if life == self._life else 0)
        return ManagerOutput(self._life, said, out_end, warned, err_end, code)

    def interrupt(self) -> None:
        """Interrupt the run, as Ctrl-C does."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)

    def access(self) -> str:
        """Return where the manager answers people, from each node, with the operator's token (JSON); empty: not yet."""
        import ray

        known = read_access(Path(self._command.run_dir))
        if known is None:
            return ""
        return known.model_copy(update={"host": ray.util.get_node_ip_address()}).model_dump_json()

    def _keep(self) -> None:
        """Run the manager until its run is over; this thread lives as long as the manager, which is tied to it."""
        with contextlib.suppress(OSError, ValueError):
            self._code = int(self._exit_file.read_text())  # an actor before this one saw the end
        while self._code is None:
            code = self._run()
            if code >= 0:
                with contextlib.suppress(OSError):
                    self._exit_file.write_text(str(code))
                with contextlib.suppress(Exception):  # the manager does it too, unless it failed
                    ray_cluster.give_back(self._command.name)
                self._code = code
            else:
                self._err.add(f"varuna: the manager was killed by signal {-code}; starting it again\n".encode())
                time.sleep(_AGAIN_S)
        self._heard_s = time.monotonic()
        while time.monotonic() < self._heard_s + _UNREAD_S:
            time.sleep(_AGAIN_S)
        self._leave()

    def _leave(self) -> None:
        """End this actor; Ray must not start it again."""
        import ray

        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(actor_name(self._command.name)), no_restart=True)

    def _run(self) -> int:
        """Run the manager to its end; returns the exit code, or minus a signal."""
        import ray

        command = self._command
        flags = ["--advertise", ray.util.get_node_ip_address()]  # given again by the user, it is theirs that counts
        words = [command.words[0], *flags, *command.words[1:]]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},  # Ray's, not the user's
            **command.environment,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            KEPT_VARIABLE: command.name,
            RUNTIME_ENV_VARIABLE: command.runtime_env,
        }
        try:
            self._child = subprocess.Popen(
                [*tether(), sys.executable, "-m", "varuna", *words],
                cwd=command.folder or None,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._err.add(
                f"varuna: the manager cannot be started on the head node: {error}. Use a folder that all nodes share, "
                "or `ray job submit --working-dir .`\n".encode()
            )
            return 1
        readers = [
            threading.Thread(target=kept.read, args=(pipe.fileno(),), daemon=True)
            for kept, pipe in ((self._out, self._child.stdout), (self._err, self._child.stderr))
            if pipe is not None
        ]
        for reader in readers:
            reader.start()
        code = self._child.wait()
        for reader in readers:
            reader.join(2.0)
        return code


class _Kept:
    """The newest bytes of a stream, by their offset."""

    def __init__(self) -> None:
        self._bytes, self._end = b"", 0
        self._lock = threading.Lock()

    def add(self, data: bytes) -> None:
        with self._lock:
            self._bytes, self._end = (self._bytes + data)[-_KEPT_BYTES:], self._end + len(data)

    def after(self, offset: int) -> tuple[int, bytes]:
        with self._lock:
            return self._end, self._bytes[max(0, len(self._bytes) - (self._end - offset)) :]

    def read(self, pipe: int) -> None:
        while data := os.read(pipe, 2**16):
            self.add(data)
