"""The actor that keeps ``varuna agent`` on one node of a Ray cluster. Runs in a process of Ray's."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from varuna.extras.ray.cluster import draining
from varuna.fleet.engines.engine import AgentCommand
from varuna.process.tethering import tether

_LOOK_S = 2.0
_UNASKED_S = 60.0
"""Seconds after which an actor whose agent has ended goes by itself, if no manager asks."""
_TAIL_LINES = 12


class AgentActor:
    """One agent, from the actor's start to its end; it dies with the actor, and its workers with it.

    Args:
        command: what to start; a script that is not absolute is looked for in the actor's working directory.
        workers: how many.
    """

    def __init__(self, command: AgentCommand, workers: int) -> None:
        import ray

        self._node = ray.get_runtime_context().get_node_id()
        self._folder = Path(tempfile.mkdtemp(prefix="varuna-agent-"))
        script = replace(command, script=command.script.absolute(), workers=workers)
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray's, not ours
        self._child = subprocess.Popen(
            [*tether(), *script.argv(python=sys.executable, state_dir=str(self._folder))],
            env={**inherited, **script.environ()},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._asked_s = time.monotonic()
        threading.Thread(target=self._read, name="varuna-agent-stderr", daemon=True).start()
        threading.Thread(target=self._watch, name="varuna-agent-watch", daemon=True).start()

    def state(self) -> tuple[int | None, str]:
        """Return the agent's exit code, None while it lives, and what it said last."""
        self._asked_s = time.monotonic()
        return self._child.poll(), "\n".join(self._tail)

    def _read(self) -> None:
        assert self._child.stderr is not None
        for line in self._child.stderr:
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            print(text, file=sys.stderr, flush=True)  # for `ray logs`

    def _watch(self) -> None:
        """Pass on Ray's notice that this node will be taken away; clean up."""
        is_told = False
        while self._child.poll() is None:
            if not is_told and self._node in draining():
                is_told = True
                self._child.send_signal(signal.SIGTERM)
            time.sleep(_LOOK_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        while time.monotonic() < self._asked_s + _UNASKED_S:
            time.sleep(_LOOK_S)
        os._exit(0)
