"""A run whose workers are threads of this process, around the manager of ``varuna run``.


script ──Trainer──> ManagedMembership ──frames──> _Workers ──events──> Manager
(a thread per worker)                 <──frames──          <──calls──  (the caller's thread)
"""

import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from varuna.core.devices import WorkerGroups, size_of
from varuna.core.errors import NoPlanError, UsageError, VarunaError, WorkerError
from varuna.core.messages import ToWorker, from_worker
from varuna.core.model import JobFacts
from varuna.core.node_notices import PreemptionNotice
from varuna.core.plan import Plan
from varuna.fleet.manager.checkpoint_coordinator import CheckpointCoordinator
from varuna.fleet.manager.loop import Manager
from varuna.fleet.manager.mailbox import Mailbox
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import Event, MessageReceived, NoticeReceived, StopRequested, WorkerExited
from varuna.fleet.state.run_events import GenerationStarted, Notice, RunEvent, StepRecorded
from varuna.membership.launched import WorkerThread, here
from varuna.membership.managed import ManagedMembership
from varuna.planner.choose import plan_run, run_request
from varuna.planner.copies import with_copies
from varuna.planner.sweep import rank_depths
from varuna.testing.faults import Fault, Killed, Warned, watching
from varuna.testing.threads import Threads

_END_S = 30.0
"""Seconds that workers get to return after they were told the end."""
_PLANNED_S = 10.0
"""Seconds, at most, that a rank with a notice waits for the manager to plan without it."""


@dataclass(frozen=True)
class RunResult:
    """A run that ended well."""

    losses: tuple[float, ...]
    """by step; of a step that was done again, the last. Of a script with several trainings: one after another"""
    plans: tuple[str, ...]
    """of each generation, as ``PxD``: the first, and one for each change"""
    kept: tuple[int, ...]
    """of each generation: how many micro-batches of the step that was broken off did not run again"""
    returned: Mapping[str, Any]
    """by worker: what ``script`` returned; nothing for a worker that was killed"""
    warnings: tuple[str, ...]
    """warnings of the manager and the workers"""


Stages = int | tuple[int, ...]
"""P, or the depth of each pipeline."""


def run(
    script: Callable[[], Any],
    *,
    workers: int = 1,
    stages: Stages | Mapping[int, Stages] | None = None,
    faults: Sequence[Fault] = (),
    bound_s: float = 100.0,
    captures: list[Any] | None = None,
) -> RunResult:
    """Run a training script on several workers, each a thread of this process.

    PyTorch can capture one model at a time in a process: captures take turns, and workers that give the same functions
    and first samples share one. Whatever ``script`` uses must bear threads: variables outside of it are shared by all
    workers, and so is PyTorch's random generator.

    Args:
        script: what each worker runs: makes a ``Trainer`` and loops over its steps.
        workers: P x D, or more: those that fit no plan wait as spares. A killed worker is not replaced.
        stages: P, or the depth of each pipeline, such as ``(3, 2)``; or either by the number of workers that are left,
            such as ``{5: (3, 2), 4: 2, 3: 3}``. Default: the planner's choice.
        faults: what goes wrong, see ``fail_at`` and ``notice_at``.
        bound_s: how long the run may take.
        captures: at first an empty list. Runs that are given the same one capture the same model once; what functions
            find in variables of modules must then be the same, too.

    Raises:
        VarunaError: the run failed, with the text that ``varuna run`` would end with; or the error of this kind that
            a worker's script raised.
        WorkerError: a worker's script raised something else, which is the cause; or a worker does not end.
        UsageError: a fault did not happen.
    """
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="varuna-testing-") as folder, watching(faults):
        crew = _Workers(script, Path(folder), workers, stages, bound_s, [] if captures is None else captures)
        for fault in faults:
            fault.lose = crew.lose
            if isinstance(fault, Warned):
                fault.tell, fault.wait = crew.warn, crew.wait_for_plan
        try:
            outcome = crew.manage()
        finally:
            crew.end()
            torch.set_num_threads(threads)  # workers compute with one
    if missed := ", ".join(str(fault) for fault in faults if not fault.happened):
        raise UsageError(
            f"{missed} did not happen in {len(outcome.losses)} steps of the plans {', '.join(outcome.plans)}: choose a "
            "rank, a step and a phase that this run has"
        )
    return outcome


def _plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, stages: Stages | None) -> Plan:
    if not isinstance(stages, tuple):
        return plan_run(job, workers=workers, stages=stages, micro_batch=micro_batch, copies=True)
    depths = sorted(stages, reverse=True)
    if sum(depths) > size_of(workers):
        raise NoPlanError(f"stages={stages} needs {sum(depths)} workers, and there are {size_of(workers)}")
    request = run_request(job, workers=workers, micro_batch=micro_batch)
    ranking = rank_depths(request, depths)
    if not ranking.plans:
        raise NoPlanError(
            f"stages={stages} does not fit: the model has {len(job.model.sections)} sections, and a pipeline needs a "
            f"micro-batch of the {job.global_batch} examples. Pass fewer stages, or cut= or a smaller micro_batch= to "
            "Trainer."
        )
    return with_copies(ranking.plans[0], request, measured=False)


class _Line:
    """A worker's connection to the manager; both ends are in this process."""

    def __init__(self, worker: str, post: Callable[[Event], None]) -> None:
        self._worker, self._post = worker, post
        self._frames: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.close_reason: str | None = None

    def send(self, frame: str) -> None:
        self._post(MessageReceived(self._worker, from_worker.validate_json(frame)))

    def deliver(self, message: ToWorker) -> None:
        self._frames.put(message.model_dump_json())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *outcome: object) -> None:
        self._frames.put(None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._frames.get, None)


class _Turn:
    """One worker's turn to capture the model: from its start to its first word to the manager.

    Of a later training of the script: a block.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._is_mine, self._is_block = lock, False, False

    def __enter__(self) -> Self:
        if not self._is_mine:
            self.begin()
            self._is_block = True
        return self

    def __exit__(self, *outcome: object) -> None:
        if self._is_block:
            self._is_block = False
            self.end()

    def begin(self) -> None:
        self._is_mine = self._lock.acquire()

    def end(self) -> None:
        if self._is_mine:
            self._is_mine = False
            self._lock.release()


class _Workers:
    """The manager's ``Executor``: starts all workers, speaks to them, and ends them."""

    def __init__(
        self,
        script: Callable[[], Any],
        folder: Path,
        workers: int,
        stages: Stages | Mapping[int, Stages] | None,
        bound_s: float,
        captures: list[Any],
    ) -> None:
        self._script, self._bound_s = script, bound_s
        self._capturing, self._captures = threading.Lock(), captures
        self._turns: dict[str, _Turn] = {}
        self._lines: dict[str, _Line] = {}
        self._threads = Threads()
        self._places: dict[str, WorkerThread] = {}
        self._is_over, self._lost, self._warned = False, set[str](), set[str]()
        self._returned: dict[str, Any] = {}
        self._errors: list[BaseException] = []
        self._events: list[RunEvent] = []
        self._mailbox = Mailbox()
        self._journal = Journal(folder, None)
        self._journal.begin_run("testing")
        self._manager = Manager(
            FleetConfig(
                workers=workers,
                replace=False,
                exit_grace_s=0.1,
                gather_s=bound_s,  # all begin together, however slow the machine is
                lease_s=bound_s,  # a thread that ends is always heard of, and silence is a busy machine's
                suspect_lease_s=bound_s,
            ),
            lambda job, workers, micro_batch: _plan(
                job, workers, micro_batch, stages.get(size_of(workers)) if isinstance(stages, Mapping) else stages
            ),
            hands=self,
            mailbox=self._mailbox,
            journal=self._journal,
            keeper=CheckpointCoordinator(new=False, overwrite=False, warn=self._mailbox.warn),
            observer=self._events.append,
        )

    def manage(self) -> RunResult:
        """Run the manager until the run is over; return its outcome."""
        late = f"the run was not over after {self._bound_s:g} s (bound_s=)"
        alarm = threading.Timer(self._bound_s, lambda: self._mailbox.post(StopRequested(late, 1)))
        alarm.start()
        try:
            ended = self._manager.run()
        finally:
            alarm.cancel()
            self._is_over = True
        assert ended is not None  # this manager is never told to leave
        if ended.exit_code:
            for name in self._places:
                self.kill(name)
        self._join()
        if self._errors:
            raise self._errors[0]
        if ended.exit_code:
            raise VarunaError(ended.text)
        recorded = [event for event in self._events if isinstance(event, StepRecorded)]
        # in the order of events: of a step that ran again, the last loss stays
        losses = {(event.training, event.step): event.loss for event in recorded}
        records = [event.record for event in self._events if isinstance(event, GenerationStarted)]
        return RunResult(
            losses=tuple(losses[step] for step in sorted(losses)),
            plans=tuple(record.plan.shape for record in records),
            kept=tuple(record.kept_micro_batches for record in records),
            returned=dict(self._returned),
            warnings=tuple(event.text for event in self._events if isinstance(event, Notice) and event.warning),
        )

    def warn(self, rank: int, seconds: float) -> None:
        """Give notice that a rank's machine goes away in ``seconds``; any thread may call it."""
        name = self._manager.fleet.members[rank]
        self._warned.add(name)
        self._mailbox.post(NoticeReceived(name, PreemptionNotice(in_s=seconds, reason="preemption notice")))

    def wait_for_plan(self) -> None:
        """Wait until the manager has planned without the ranks that were given notice; not on its own thread."""
        deadline_s = time.monotonic() + _PLANNED_S
        while time.monotonic() < deadline_s and not self._is_over:
            fleet = self._manager.fleet
            if not fleet.questions.open and self._warned <= fleet.machines.departing.keys():
                return
            time.sleep(0.002)

    def lose(self, rank: int) -> None:
        """Let the worker of a rank die here and now, as far as a thread can: it says nothing any more."""
        name = self._manager.fleet.members[rank]
        self._lost.add(name)
        self._places[name].membership.close()
        self.kill(name)

    def end(self) -> None:
        """Leave nothing behind."""
        for name in self._places:
            self.kill(name)
        self._journal.close()

    def _join(self) -> None:
        try:
            self._threads.join(_END_S)
        except WorkerError as error:
            raise error from (self._errors[0] if self._errors else None)

    # -- what the manager asks for ---------------------------------------------------------------------------

    def spawn(self, avoided: Collection[str]) -> str:
        """Start a worker; threads have no GPUs to avoid."""
        name = f"w{len(self._lines)}"
        line = self._lines[name] = _Line(name, self._mailbox.post)
        turn = self._turns[name] = _Turn(self._capturing)

        def dial() -> _Line:
            turn.end()  # captured; the run begins once all are here
            return line

        membership = ManagedMembership("this process", "", name, dial=dial, measures=False)
        self._places[name] = WorkerThread(membership, self._captures, turn)
        self._threads.start(f"worker {name}", partial(self._live, name))
        return name

    def kill(self, name: str, *, rests: bool = False) -> None:
        """End a worker as far as a thread can be ended: its waits end, and so does its connection."""
        self._places[name].leave()

    def set_main(self, name: str) -> None:
        """Do nothing: all workers print here."""

    def send(self, name: str, message: ToWorker) -> None:
        """Tell a worker."""
        self._lines[name].deliver(message)

    def release(self, node: str, *, drained: bool) -> None:
        """Do nothing: threads are no machines to give back."""

    def heard_s(self) -> float:
        """Return the time now: no network lies between workers and the manager."""
        return time.monotonic()

    # -- a worker's thread -----------------------------------------------------------------------------------

    def _live(self, name: str) -> None:
        here.set(self._places[name])
        turn, code = self._turns[name], 0
        turn.begin()
        try:
            self._returned[name] = self._script()
        except Killed:
            code = -9
        except BaseException as error:  # noqa: BLE001 - for the caller of run
            code = -9 if name in self._lost else 1
            if code == 1 and not self._is_over:
                self._errors.append(_described(name, error))
            self._places[name].membership.failed(str(error), traceback.format_exc(), code)
        finally:
            turn.end()
            self._places[name].leave()
            self._mailbox.post(WorkerExited(name, code))


def _described(name: str, error: BaseException) -> VarunaError:
    """Return the error that the caller sees for an exception that ended a worker's script."""
    if isinstance(error, VarunaError):
        return error
    described = WorkerError(f"the script of worker {name} raised {type(error).__name__}: {error}")
    described.__cause__ = error
    return described
