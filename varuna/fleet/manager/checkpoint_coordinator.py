"""The manager's part in checkpoints: it alone makes shards into a checkpoint, and says which one is the newest."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from varuna.checkpoint.collector import Gathered
from varuna.checkpoint.committer import CheckpointCommitter
from varuna.checkpoint.names import checkpoint_place
from varuna.core.errors import CheckpointError
from varuna.core.model import JobFacts
from varuna.core.saved import SavedShard
from varuna.core.units import format_duration
from varuna.fleet.manager.resume import KnownCheckpoint
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import GenerationRecord
from varuna.store.opening import location

_COMPLAINS_AGAIN_S = 300.0


class CheckpointCoordinator:
    """Commits, retains and finds checkpoints in the job's ``checkpoint_dir``; without one it does nothing.

    For one thread, which waits for the store in ``newest``, ``resume`` and ``close``; ``warn``, and ``committed`` with
    the steps of a new checkpoint, are called by any. ``completed`` is called as ``committed`` is, and also for
    checkpoints that do not outlive the run. The job comes from the first
    machine that joins: with ``allowed`` it chooses a directory there or below, or none. ``known`` is what a manager
    before this one has committed.

    Raises:
        UsageError: ``allowed`` is no place.
    """

    def __init__(
        self,
        *,
        new: bool,
        overwrite: bool,
        warn: Callable[[str], None],
        allowed: str = "",
        committed: Callable[[int], None] = lambda step: None,
        completed: Callable[[int], None] = lambda step: None,
        known: KnownCheckpoint | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._committed, self._completed = committed, completed
        self._new, self._overwrite, self._warn, self._known = new, overwrite, warn, known
        self._allowed = location(allowed) if allowed else ""
        self._keeper: CheckpointCommitter | None = None
        self._is_rescue = False
        self.is_refused = False
        """Another run has the directory, or it cannot be used."""
        self._clock_s = clock_s
        self._complained_at = -2  # newest complete step when a worker complained
        self._complained_s = self._said_s = 0.0  # when one did so first with that step, and when it was said last

    def newest(self, job: JobFacts, *, waits: bool = True) -> Checkpoint | None:
        """The newest checkpoint that can be used; the first call takes the directory for this run.

        It waits for one that was committed and is not there, unless ``waits`` is false: nobody needs it yet.

        Raises:
            CheckpointError: the directory cannot be used, is not allowed, or its checkpoints are damaged or of
                another job.
            UsageError: ``overwrite`` without ``new``, or a place that is none.
        """
        if job.checkpoint_dir is None:
            return None
        self._is_rescue = job.rescues
        if self._allowed and not is_within(location(job.checkpoint_dir), self._allowed):
            raise CheckpointError(
                f"the job saves its checkpoints in {job.checkpoint_dir}, but this manager only allows "
                f"{self._allowed} (--checkpoints). Change one of them."
            )
        if self._keeper is None:
            self._keeper = self._taken(job)
        found = self._keeper.newest(waits=waits)
        if found is None:
            return None
        manifest, warnings = found
        for warning in warnings:
            self._warn(warning)
        place = checkpoint_place(job.checkpoint_dir, manifest.step)
        return Checkpoint(place, manifest.step, manifest.micro_batch, self._keeper.sums_after(manifest))

    def stop_waiting(self) -> None:
        """Let ``newest`` wait for no store, since the newest checkpoint is not needed; any thread may call it."""
        if (keeper := self._keeper) is not None:
            keeper.stop_waiting()

    def _taken(self, job: JobFacts) -> CheckpointCommitter:
        """Take the job's directory for this run."""
        known = self._known if self._known is not None and self._known.directory == job.checkpoint_dir else None
        try:
            return CheckpointCommitter(
                job,
                new=self._new,
                overwrite=self._overwrite,
                say=self._warn,
                warn=self._warn,
                committed=self._tell,
                committed_step=-1 if known is None else known.step,
            )
        except CheckpointError:
            self.is_refused = True
            raise

    def _tell(self, step: int) -> None:
        self._completed(step)
        if not self._is_rescue:  # there is one every few seconds, and none outlives the run
            self._committed(step)

    @property
    def standing(self) -> str | None:
        """Place of the newest complete checkpoint that outlives the run, if there is one."""
        return None if self._keeper is None or self._is_rescue else self._keeper.committed_place

    @property
    def gathered(self) -> Gathered | None:
        """Progress of the newest unfinished checkpoint that outlives the run; any thread may ask."""
        keeper = self._keeper
        return None if keeper is None or self._is_rescue else keeper.gathered

    def begin_generation(self, record: GenerationRecord) -> None:
        """Note the generation that manifests will name."""
        if self._keeper is not None:
            self._keeper.begin(record.generation, record.plan, first_step=record.first_step, rollback=record.rollback)

    def resume(self, job: JobFacts, history: Sequence[GenerationRecord]) -> None:
        """Take over from a keeper that is gone: workers say again which shards are durable.

        Raises:
            CheckpointError: the directory cannot be used.
        """
        self.newest(job, waits=False)
        since = max((record.generation for record in history if record.rollback), default=0)
        for record in history[since:]:
            if self._keeper is not None:  # what is complete is known: no rollback, which would forget it
                self._keeper.begin(record.generation, record.plan, first_step=record.first_step, rollback=False)

    def collect(self, shard: SavedShard) -> None:
        """Note a durable shard, and commit if its checkpoint is complete; a failure costs a checkpoint, not the run."""
        if self._keeper is not None:
            self._keeper.collect(shard)

    def tell_missing_shard(self, worker: str, reason: str) -> None:
        """Say now and then that a checkpoint will lack a shard, until another one is complete."""
        if self._keeper is None:
            return
        now_s, lasting = self._clock_s(), ""
        if self._complained_at != self._keeper.committed_step:
            self._complained_at, self._complained_s = self._keeper.committed_step, now_s
        elif now_s < self._said_s + _COMPLAINS_AGAIN_S:
            return
        else:
            lasting = f" None was complete in the last {format_duration(now_s - self._complained_s)}."
        self._said_s = now_s
        self._warn(
            f"worker {worker} did not save its part of a checkpoint: {reason.rstrip('.')}. {self._standing()}{lasting}"
        )
        self._keeper.make_room()

    def begin_training(self, steps: int) -> None:
        """Begin the next training, which may save elsewhere; the one before is over after ``steps`` steps.

        Workers that come later read the last checkpoint, so it is finished first: this waits for the store.
        """
        self.close()
        if (missing := self.account(steps)) is not None:
            self._warn(missing)
        self._keeper, self._known, self._is_rescue = None, None, False
        self._complained_at = -2

    def account(self, steps: int) -> str | None:
        """Return what no checkpoint has of a run that is over after ``steps`` steps, after ``close``; None: nothing."""
        if self._keeper is None or self._is_rescue or max(0, self._keeper.committed_step) >= steps:
            return None
        return (
            f"the last steps were not checkpointed: the run ended after step {steps - 1}. {self._standing()} Look "
            "at the warnings before this one, fix the cause, and rerun the same command to train the missing "
            "steps."
        )

    def _standing(self) -> str:
        assert self._keeper is not None
        step = self._keeper.committed_step
        return (
            f"The newest complete checkpoint is that of step {step}."
            if step >= 0
            else "There is no complete checkpoint."
        )

    def close(self) -> None:
        """Finish what is under way, and give the directory free."""
        if self._keeper is not None:
            self._keeper.close()


def is_within(place: str, allowed: str) -> bool:
    """Return whether a directory is ``allowed``, or below it, as ``location`` names both, without a way out."""
    if "://" in place or "://" in allowed:
        parts, prefix = place.rstrip("/").split("/"), allowed.rstrip("/").split("/")
        return parts[: len(prefix)] == prefix and not {"..", "."} & set(parts)
    return Path(place).resolve().is_relative_to(Path(allowed).resolve())
