"""One training of a script: its session, or, once others have ended it, what this worker sees of it alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from varuna.checkpoint.manifest import Manifest, check_compatible, find_step, intact
from varuna.core.errors import FleetError
from varuna.core.messages import TrainingOver
from varuna.core.model import JobFacts
from varuna.data.randomness import generators_kept
from varuna.engine.base.transport import local_store
from varuna.engine.worker.generation import Generation
from varuna.engine.worker.loop_state import Committed, LoopStep
from varuna.engine.worker.session import Session
from varuna.job.adapter_export import ADAPTER
from varuna.job.spec import JobSpec
from varuna.job.start import Behind, begin, open_session
from varuna.membership.detect import solo_from_environment
from varuna.membership.launched import at_end, capturing, here, manager
from varuna.membership.static import StaticMembership, World
from varuna.planner.choose import plan_run
from varuna.process.console import say
from varuna.store.opening import open_store

SHOWN_BOUND_S = 60.0
"""From the last word of a training's workers until the manager has made their parts a checkpoint."""
_POLL_S = 0.1


def look_back(spec: JobSpec, facts: JobFacts, steps: int, behind: Behind) -> Session | None:
    """Open a session that has the state after ``steps`` steps once its ``steps()`` are through; None: it is not kept.

    Args:
        spec: the job.
        facts: as this worker told them when it began.
        steps: that the training has made.
        behind: how to look at it.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another job.
        NoPlanError: the model does not fit on one worker.
    """
    manifest = _shown(behind.place, steps)
    if manifest is None:
        return None
    check_compatible(manifest, facts)
    say(f"this worker reads what a training that is over has left: the checkpoint of step {steps} in {behind.place}")
    alone = StaticMembership(
        World(0, 1, local_store(), "127.0.0.1", 0),
        lambda job, workers, micro_batch: plan_run(job, workers=workers, micro_batch=micro_batch),
        found=manifest,
    )
    session = open_session(spec, steps, alone, behind=behind)
    at_end(session.leave)
    return session


def _shown(place: str, steps: int) -> Manifest | None:
    """Wait for the manifest of a step, which the manager may be about to write; None if it does not come."""
    store, until_s = open_store(place), time.monotonic() + SHOWN_BOUND_S
    while not (folder := find_step(store, steps)).is_committed:
        if time.monotonic() >= until_s:
            return None
        time.sleep(_POLL_S)
    return intact(store, folder)


T = TypeVar("T")


def generators_of_script() -> ExitStack:
    """Keep the state of the script's random generators; ``close`` puts it back.

    Ranks draw differently as they train. What the script draws afterwards, as for the next model, is the same on all.
    """
    kept = ExitStack()
    if here.get() is None:  # threads share them
        kept.enter_context(generators_kept())
    return kept


class Training:
    """A training, which begins when it is made; under a manager it outlives workers lost after its end, too."""

    def __init__(self, spec: JobSpec, n: int) -> None:
        """Prepare to train ``n`` steps.

        Raises:
            VarunaError: see ``job.start.begin``.
        """
        watched = manager()
        self._spec, self._number = spec, 0 if watched is None else watched.trainings
        self.is_managed = watched is not None
        with capturing():
            session = begin(spec, n, watched or solo_from_environment(), number=self._number)
        self.session: Session = session
        """The present one."""
        self._behind: Behind | None = None
        self._is_over = False

    @property
    def is_alone(self) -> bool:
        """Whether this worker only looks at it, for itself."""
        return self._behind is not None and self.session.current is not None

    def steps(self) -> Iterator[Committed]:
        """Yield this worker's steps, or, of a training that others have ended, the one that its loop lacks."""
        yield from self.session.steps()
        if (over := self.session.over) is not None and self._look_back(over.steps, self._unseen(over)):
            yield from self.session.steps()
        self._is_over = True

    def run_between_steps(self, run: Callable[[Generation], T], doing: str) -> T | None:
        """Use the state between two steps, or after the last; None if that was interrupted, and may be tried again.

        Raises:
            FleetError: the training ended without this worker, and no checkpoint has its state.
        """
        session = self.session
        if session.current is None and session.over is not None:
            raise FleetError(
                f"training {self._number + 1} of the script ended without this worker, which would read what it has "
                "left from its last checkpoint, and there is none. Pass checkpoints= to its Trainer."
            )
        found = session.run_between_steps(run, doing)
        return self.session.run_between_steps(run, doing) if found is None and self._is_left_alone() else found

    def export(self, write: Callable[[Generation | None], None], path: Path) -> None:
        """Write the model to ``path``; one that others have written there stays.

        Raises:
            VarunaError: what ``write`` raises.
        """
        if self._is_written(path):
            return
        try:
            write(self.session.current)
        except FleetError:
            if not self._is_left_alone():
                raise
            if not self._is_written(path):
                write(self.session.current)

    def _is_written(self, path: Path) -> bool:
        """Return whether a model is at ``path`` already, of a training that this worker only looks at."""
        names = ("", "model.safetensors", ADAPTER)
        is_other = self._behind is not None and not self._behind.is_main
        return is_other and any((path / name).is_file() for name in names)

    def _is_left_alone(self) -> bool:
        """Take the state for this worker alone, if workers were lost after the last step, whom no spare replaces.

        False as long as that is not so, or if the state is nowhere else.
        """
        if not (self._is_over and self.is_managed):
            return False
        generation = self.session.current
        is_main = generation is not None and generation.assignment.rank == 0
        if not self._look_back(self.session.standing.next_step or 0, Behind("", is_main=is_main, has_loop=False)):
            return False
        for _ in self.session.steps():  # none is left: it only takes the state up
            pass
        return True

    def _look_back(self, steps: int, behind: Behind) -> bool:
        """Take the state from the last checkpoint; return False if there is none."""
        facts = self.session.facts
        if self._behind is not None or facts.checkpoint_dir is None:
            return False
        self._behind = behind._replace(place=facts.checkpoint_dir)
        found = look_back(self._spec, facts, steps, self._behind)
        if found is None:
            return False
        self.session.drop()
        self.session = found
        return True

    def _unseen(self, over: TrainingOver) -> Behind:
        last = None if over.last is None else LoopStep(over.last.step, over.last.totals, over.last.wall_s)
        return Behind("", last=last, is_main=over.is_main)
