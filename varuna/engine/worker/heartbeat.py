"""Activity of a worker's training thread, as it tells the manager every second, and the ranks that wait for it."""

import os
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from varuna.core.devices import DeviceFacts, DeviceFault
from varuna.core.membership import Membership
from varuna.core.messages import Beat, WorkerPhase
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.wait_bounds import Doing, Waiting, doing_of
from varuna.engine.device.faults import HANGS
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.pipeline.runtime import Runtime
from varuna.engine.pipeline.timeline import StepTimes
from varuna.engine.shown.recent_steps import RecentSteps
from varuna.engine.worker.reporting import Reporter
from varuna.engine.worker.worker_state import WorkerState
from varuna.process.console import warn
from varuna.process.frames import stacks_of

_OWN = str(Path(__file__).parents[2])
_SKIPPED = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<")
_SITE = "site-packages"
_READS = "varuna-loader"
_DEBUGGERS = ("pdb.py", "bdb.py", "debugpy", "pydevd", "IPython")
"""Parts of paths of debuggers: a debugged process may take any time."""


class Whereabouts(NamedTuple):
    """The place where a thread is."""

    place: str
    """``file:line`` of the user's code that runs; empty if none does"""
    is_debugged: bool
    frame: FrameType | None
    """the innermost one"""

    @property
    def stack(self) -> str:
        """The stack as text. Heartbeats do not ask for it, so that they read no source files."""
        return "" if self.frame is None else "".join(traceback.format_stack(self.frame))


def whereabouts(thread: int, *, reads: bool) -> Whereabouts:
    """Find the place of a training thread, or of the thread that reads samples for it.

    Args:
        thread: its identifier.
        reads: it waits for samples.
    """
    threads = [each.ident or 0 for each in threading.enumerate() if reads and each.name.startswith(_READS)]
    found = [_of(stack) for stack in stacks_of((*threads, thread))]
    return next((each for each in found if each.place), found[-1] if found else Whereabouts("", False, None))


def _of(stack: Sequence[FrameType]) -> Whereabouts:
    place, is_open, is_debugged = "", True, False
    for frame in stack:
        file = frame.f_code.co_filename
        is_debugged |= _debugs(file)
        is_open &= not file.startswith(_OWN)  # what called the engine does not run
        if not place and is_open and not _is_skipped(file):
            place = f"{file}:{frame.f_lineno}"
    return Whereabouts(place, is_debugged, stack[0])


@cache
def _debugs(file: str) -> bool:
    return not set(_DEBUGGERS).isdisjoint(Path(file).parts)


def _is_skipped(file: str) -> bool:
    return file.startswith(_SKIPPED) and _SITE not in file.removeprefix(_SKIPPED[0])


_BOUNDED = (WorkerPhase.STEPS, WorkerPhase.LOOP)
"""Other ranks wait for the end of these, so this rank's own work in them must end within a bound."""


class Activity(NamedTuple):
    """The activity of a training thread."""

    text: str
    phase: WorkerPhase = WorkerPhase.OTHER


class Heartbeat:
    """Set by the training thread, read by threads that tell others.

    Args:
        state: of this worker.
        compiler: of the job, if it compiles.
        recent: tells what people ask to see, with every beat.
        membership: hears of a device that hangs.
    """

    def __init__(
        self, state: WorkerState, compiler: Compiler | None, recent: RecentSteps, membership: Membership
    ) -> None:
        self._membership = membership
        self._state, self._compiler, self._thread = state, compiler, threading.get_ident()
        self._recent = recent
        self.activity = Activity("starting")
        self.inbox = Inbox()
        """of the newest generation"""
        self.runtime: Runtime | None = None
        """of the present generation, if there is one"""
        self.reporter = Reporter()
        self.is_settled = False
        """a whole round of the loop was made; before that, anything may take long"""
        self._told_times: StepTimes | None = None  # of the newest beat that carried any

    def train_here(self) -> None:
        """Note that the calling thread is the one that trains."""
        self._thread = threading.get_ident()

    def at(self, text: str, phase: WorkerPhase = WorkerPhase.OTHER) -> None:
        """Note that the training thread begins something else."""
        self.activity = Activity(text, phase)

    def doing(self, tick: int = 0) -> Doing:
        """Describe what this rank does or waits for."""
        (text, phase), waiting, runtime = self.activity, self.inbox.waiting, self.runtime
        if runtime is not None and waiting is None and phase is WorkerPhase.STEPS:
            text = runtime.activity
        there = self._where(waiting)
        is_compiling = self._compiler is not None and self._compiler.is_compiling
        bounded = phase in _BOUNDED and self.is_settled and not (there.is_debugged or is_compiling)
        return doing_of(text, waiting, tick=tick, place=there.place, bounded=bounded)

    def beat(self) -> Beat:
        """Return the next sign of life; what steps took is in one of them only."""
        self._recent.answer()
        doing, waiting, runtime, phase = self.doing(), self.inbox.waiting, self.runtime, self.activity.phase
        beat = Beat(
            generation=self._state.generation,
            step=self._state.next_step or 0,
            activity=doing.text,
            phase=WorkerPhase.CHECKS if waiting is not None and waiting.awaited().checks else phase,
            at_work=not doing.on,
            waits_s=time.monotonic() - waiting.since_s if waiting is not None and doing.on else 0.0,
            whole=self._state.is_whole,
            times=self.reporter.drain(),
        )
        times = runtime.times if runtime is not None else None
        # By identity of ``actions``: a step's times are replaced when its phases are known, its actions are not.
        if times is None or (self._told_times is not None and times.actions is self._told_times.actions):
            return beat
        self._told_times = times
        forward_s, backward_s = times.per_micro_batch_s()
        return beat.model_copy(update={"forward_s": forward_s, "backward_s": backward_s})

    def give_up(self, why: str) -> None:
        """End this process, whose training thread cannot be made to stop: a morph leaves it out."""
        warn(f"{why} It is here:\n{self._where(self.inbox.waiting).stack}")
        self._end()

    def hangs(self, device: DeviceFacts | None, why: str) -> None:
        """End this process, whose device hangs."""
        stack = self._where(self.inbox.waiting).stack
        warn(f"{why} The training thread is here:\n{stack}")
        self._membership.failed(why, stack, 1, DeviceFault(error=HANGS, device=device.name if device else ""))
        self._end()

    def _end(self) -> None:
        """End as if killed, which is a loss and not a bug, if there is a manager that makes good for it."""
        if self._membership.survives:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def _where(self, waiting: Waiting | None) -> Whereabouts:
        return whereabouts(self._thread, reads=waiting is not None and not waiting.awaited().on)
