"""The committer turns shards into checkpoints: one per run, beside the manager or rank 0, on a thread of its own.

    any thread              thread "commit", one piece of work after another
    begin, collect  ----->  collector: are all parts of one step and generation there?
                              | yes: a manifest
                            is the lease still this run's?  -- no --> error, nothing is written
                              |
                            commit: the manifest is written last; from here on it is a checkpoint
                              |
                            look at it in the store  -- damaged --> marked; an older one counts
                              |
    committed(step) <-----  told; then older ones are removed
    thread "lease": a beat every 5 s; without one for 20 s, another run may claim the directory

Whatever goes wrong costs a checkpoint and is said aloud; neither training nor later checkpoints end with it.
"""

import hashlib
import queue
import secrets
import threading
import time
from collections.abc import Callable

from varuna.checkpoint.collector import Collector, Gathered
from varuna.checkpoint.lease import BEAT_S, Lease, claim
from varuna.checkpoint.manifest import (
    Manifest,
    check_compatible,
    commit,
    find_step,
    intact,
    mark_damaged,
    newest_intact,
    survey,
)
from varuna.checkpoint.names import CONFIG, CONFIG_NOTE, DAMAGED, checkpoint_place
from varuna.checkpoint.retention import Kept, prepare, retain
from varuna.checkpoint.saved_sums import find_sums
from varuna.core.errors import CheckpointError, DamagedCheckpoint, ObjectMissing
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.saved import SavedShard
from varuna.core.sums import StoredSums
from varuna.process.threads import start
from varuna.store.base import Store
from varuna.store.opening import open_store
from varuna.store.retry import impatient, writer_id


def keep_configuration(store: Store, config: str) -> str:
    """Write the configuration, unless another program's file is there; return a warning, or "".

    Raises:
        StoreError: the store cannot be used.
    """
    content = config.encode()
    found = _get(store, CONFIG)
    if found is not None and found != content and _get(store, CONFIG_NOTE) != _checksum(found):
        return (
            f"{CONFIG} in {store.url} was not written by Varuna and is left unchanged. Move it away if the "
            "checkpoints there should contain this model's configuration."
        )
    store.put(CONFIG_NOTE, _checksum(content))
    if found != content:
        store.put(CONFIG, content)
    return ""


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _get(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except ObjectMissing:
        return None


SETTLE_BOUND_S = 120.0
"""Bound on the wait for pending commits before the newest checkpoint is looked up."""
SHOWN_AGAIN_S, DOUBTED_S = 5.0, 300.0
"""Between two looks at a store that does not show what this run has committed, and for how long damage is doubted."""
_LOOK_S = 30.0
"""Most seconds for a store to show what was just committed."""


class CheckpointCommitter:
    """Holds the lease of a checkpoint directory, finds the newest checkpoint, commits new ones and removes old ones.

    ``begin`` and ``collect`` return at once. ``say``, ``warn`` and ``committed`` (with the steps of a new checkpoint)
    are called on the committer's threads too. A checkpoint counts once its manifest and all its parts are seen in the
    store; those that rescue a run, which do not outlive it, are not looked at.
    """

    def __init__(
        self,
        job: JobFacts,
        *,
        new: bool,
        overwrite: bool,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        committed: Callable[[int], None] = lambda step: None,
        committed_step: int = -1,
    ) -> None:
        """Take the directory for this run, and make room if a fresh start is asked for.

        ``committed_step`` is that of the newest checkpoint that the run is known to have; -1: none is known.

        Raises:
            CheckpointError: another run uses it, it cannot be written, or it has checkpoints and is to be new.
            UsageError: ``overwrite`` without ``new``.
        """
        assert job.checkpoint_dir is not None
        self._job, self._warn, self._committed = job, warn, committed
        self._kept = Kept(job.keep_last, job.keep_every)
        self._writer = writer_id()
        self._run_id = secrets.token_hex(4)
        self.store: Store = open_store(job.checkpoint_dir)
        self._lease: Lease | None = claim(self.store, self._writer, say=say)
        try:
            prepare(self.store, new=new, overwrite=overwrite)
        except BaseException:
            self._lease.release()
            raise
        self._collector = self._new_collector()
        self._gathered: Gathered | None = None
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._closed = threading.Event()
        self._is_unneeded = threading.Event()  # what ``newest`` waits for
        self._changed = threading.Condition()  # guards the fields below
        self._committed_step = self._reached_step = committed_step  # differ where the newest turned out to be damaged
        self._proven: int | None = None  # step of the newest one that was seen whole or resumed from
        self._is_blind = False  # the store has not shown the newest one, which was said
        self._open = 0  # pieces of work that are not done
        for name, target in (("commit", self._commit_all), ("lease", self._keep_lease)):
            start(name, target)

    def newest(self, *, waits: bool = True) -> tuple[Manifest, list[str]] | None:
        """Return the newest checkpoint that can be used, and warnings about newer ones; None before the first.

        A store that shows nothing of what this run has committed (a mount that went away, a listing that lags) is
        waited for like one that does not answer: the run would go back for nothing, to step 0 perhaps. One in which
        nothing is intact any more gets ``DOUBTED_S``: it may err. With ``waits`` false, the state is not needed, and
        the next call looks for the same one.

        Raises:
            CheckpointError: none is intact, or the newest is of another job.
        """
        self.wait_until_settled()
        self._is_unneeded.clear()
        deadline_s, is_told = time.monotonic() + DOUBTED_S, False
        found, doubt = self._scan_store(deadline_s)
        while doubt and waits and not self._is_unneeded.is_set():
            if not is_told:
                self._warn(doubt)
                is_told = True
            self._is_unneeded.wait(SHOWN_AGAIN_S)
            found, doubt = self._scan_store(deadline_s)
        if found is not None:
            check_compatible(found[0], self._job)
            if found[0].run_id != self._run_id:
                # The run of the checkpoint continues: manifests of one run have one id.
                self._run_id = found[0].run_id
                self._collector = self._new_collector()
            # The run begins there again, so shards of this step and of earlier ones that still come are late.
            self._collector.passed(found[0].step)
        with self._changed:
            newest = -1 if found is None else found[0].step
            if not doubt:
                self._committed_step = self._reached_step = newest
            if found is not None and (self._proven is None or newest < self._proven) and not self._job.rescues:
                self._proven = newest
        if self._job.config is not None and (warning := keep_configuration(self.store, self._job.config)):
            self._warn(warning)
        return found

    def stop_waiting(self) -> None:
        """Let ``newest`` return what the store shows, since no more is needed; any thread may call it."""
        self._is_unneeded.set()

    def _scan_store(self, deadline_s: float) -> tuple[tuple[Manifest, list[str]] | None, str]:
        """Return what the store shows now, and why to look again; empty: there is no reason."""
        try:
            found = newest_intact(self.store)
        except DamagedCheckpoint as error:
            step = self.committed_step
            is_over = self._closed.is_set() or time.monotonic() > deadline_s
            if step < 0 or is_over or self._job.rescues or find_step(self.store, step).is_damaged:
                raise
            return None, f"{error} This run has committed it, so the store is looked at for five minutes: it may err."
        return found, self._hidden() if self._hides(found) else ""

    def _hides(self, found: tuple[Manifest, list[str]] | None) -> bool:
        """Return whether the store has lost sight of the newest checkpoint of this run: damage it would show."""
        step = self.committed_step
        if (-1 if found is None else found[0].step) >= step or self._job.rescues or self._closed.is_set():
            return False
        try:
            intact(self.store, find_step(self.store, step))
        except DamagedCheckpoint:
            return False
        except ObjectMissing:
            pass
        return True  # it is not there, or it is by now

    def _hidden(self) -> str:
        place = checkpoint_place(self.store.url, self.committed_step)
        return (
            f"{place} is not there, though this run has committed it: waiting until the store shows it again. Has a "
            f"mount gone away? If it was removed on purpose, make a file {place}/{DAMAGED}, of any content: then the "
            "run goes on from an older checkpoint, or from the beginning."
        )

    def sums_after(self, manifest: Manifest) -> StoredSums | None:
        """Find sums of the step after a checkpoint; None: there are none, or they cannot be read, which costs time."""
        try:
            return find_sums(self.store, find_step(self.store, manifest.step), self._job)
        except CheckpointError as error:
            self._warn(f"what was saved during step {manifest.step} cannot be read, and all of it runs again: {error}")
            return None

    @property
    def committed_step(self) -> int:
        """Steps that the newest complete checkpoint contains; -1 if there is none."""
        with self._changed:
            return self._committed_step

    @property
    def committed_place(self) -> str | None:
        """Place of the newest complete checkpoint; None before the first."""
        step = self.committed_step
        return None if step < 0 else checkpoint_place(self._job.checkpoint_dir or "", step)

    @property
    def gathered(self) -> Gathered | None:
        """Progress of the newest unfinished checkpoint; any thread may ask."""
        return self._gathered

    def begin(self, generation: int, plan: Plan, *, first_step: int, rollback: bool) -> None:
        """Begin a generation: see ``Collector.begin``."""

        def begin() -> None:
            self._collector.begin(generation, plan, first_step=first_step, rollback=rollback)
            self._gathered = self._collector.gathered

        self._post(begin)

    def collect(self, shard: SavedShard) -> None:
        """Note that a shard is durable; commit its checkpoint if it was the last one missing."""
        self._post(lambda: self._collect(shard))

    def make_room(self) -> None:
        """Remove what should have gone before now: where a removal failed, it is tried again with the next commit only,
        for which there may be no room.
        """
        self._post(self._make_room)

    def wait_for(self, step: int, timeout_s: float) -> bool:
        """Wait until a checkpoint of ``step`` or later is committed; False if ``timeout_s`` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reached_step >= step, timeout_s)

    def wait_until_settled(self, timeout_s: float = SETTLE_BOUND_S) -> bool:
        """Wait until everything that was collected is committed or dropped; False if ``timeout_s`` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def close(self, timeout_s: float = SETTLE_BOUND_S) -> None:
        """Finish what is under way, and release the directory."""
        if self._closed.is_set():
            return
        if not self.wait_until_settled(timeout_s):
            self._warn(f"a checkpoint was still being committed after {timeout_s:.0f} s; the previous one stays valid")
        self._closed.set()
        self._post(lambda: None)
        lease, self._lease = self._lease, None
        try:
            if lease is not None and lease.is_held():
                lease.release()
        except CheckpointError as error:
            self._warn(f"cannot release the lease of {self.store.url}: {error}")

    # -- the committer's threads-------------------------------------------------------------------------------

    def _new_collector(self) -> Collector:
        return Collector(self._job, run_id=self._run_id, writer=self._writer)

    def _post(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._open += 1
        self._work.put(work)

    def _commit_all(self) -> None:
        while not self._closed.is_set():
            work = self._work.get()
            try:
                work()
            except CheckpointError as error:
                self._warn(f"a checkpoint was not committed: {error}")
            except Exception as error:  # noqa: BLE001  a dead thread would lose every later checkpoint in silence
                self._warn(f"a checkpoint was not committed because of an internal error (please report it): {error!r}")
            finally:
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()

    def _collect(self, shard: SavedShard) -> None:
        manifest = self._collector.add(shard)
        self._gathered = self._collector.gathered
        if manifest is None:
            return
        if not self._holds():
            raise CheckpointError(
                f"step {shard.step} is not committed, because another run has taken over {self.store.url}. Stop "
                "one of them: this run writes no more checkpoints."
            )
        # What stands for the step may be another manifest: one of the same step that was there already.
        standing = commit(self.store, manifest)
        dropped = self._collector.passed(standing.step)
        self._gathered = self._collector.gathered
        is_whole = self._job.rescues or self._look_at(standing)
        with self._changed:
            # Reached even if it is damaged: ``wait_for`` must not wait for a step that cannot come any more.
            self._reached_step = standing.step
            if is_whole:
                self._committed_step = standing.step
            self._changed.notify_all()
        if not is_whole:
            return
        self._committed(standing.step)
        if dropped and not self._job.rescues:
            self._warn(
                f"{dropped} shards of checkpoints before that of step {standing.step} were dropped: other shards of "
                "them never came"
            )
        self._retain(standing.step)

    def _make_room(self) -> None:
        if self.committed_step >= 0 and self._holds():
            self._retain(self.committed_step)

    def _retain(self, committed: int) -> None:
        with self._changed:
            proven = self._proven
        try:
            retain(self.store, committed, self._kept, proven)
        except CheckpointError as error:
            self._warn(f"older checkpoints are not removed now: {error}")

    def _look_at(self, manifest: Manifest) -> bool:
        """Look for what was committed: its manifest, and its parts with their sizes. False if it is damaged.

        Where the store cannot be read, the one before stays: it is not known whether this one can be used.
        """
        store, step = impatient(self.store, _LOOK_S), manifest.step
        try:
            intact(store, find_step(store, step))
        except DamagedCheckpoint as error:
            self._give_up(step, str(error))
            return False
        except ObjectMissing:  # the manifest: a person has removed it
            return True
        except CheckpointError as error:
            if not self._is_blind:
                self._warn(
                    f"the checkpoint of step {step} cannot be read: {error}. It was committed, and training goes on; "
                    "whether it can be used is not known."
                )
            self._is_blind = True
            return True
        self._is_blind = False
        with self._changed:
            self._proven = max(step, self._proven or 0)
        return True

    def _give_up(self, step: int, damage: str) -> None:
        """Mark a checkpoint that is not what was written; an older one counts."""
        try:
            mark_damaged(self.store, step, damage)
        except CheckpointError as error:
            self._warn(
                f"the checkpoint of step {step} is damaged: {damage}. It cannot be marked ({error}); `varuna "
                "checkpoints verify` does that later"
            )
            return
        older = self.committed_step
        self._warn(
            f"the checkpoint of step {step} is damaged. Looked at after its commit, it is not what was written: "
            f"{damage}. It is marked, so no run uses it, and training goes on. {_then(None if older < 0 else older)}"
        )

    def _holds(self) -> bool:
        """Return whether this run may commit. A lease that was removed is made again, unless another run was here."""
        lease = self._lease
        if lease is None or not lease.is_missing():
            return lease is not None and lease.is_held()
        found = (folder.step for folder in survey(self.store) if folder.is_committed and not folder.is_damaged)
        newest = max(found, default=-1)
        # A newer checkpoint than this run's own: another run was here, whatever became of the leases.
        if newest > self.committed_step or not lease.renew():
            return False
        self._warn(f"files were removed from {self.store.url} while this run is using it; claiming it again")
        return True

    def _keep_lease(self) -> None:
        complained = False
        while not self._closed.wait(BEAT_S):
            lease = self._lease
            try:
                if lease is not None:
                    lease.beat()
                complained = False
            except Exception as error:  # noqa: BLE001  the next beat may succeed
                if not complained:
                    self._warn(f"cannot renew this run's lease in {self.store.url}: {error}")
                complained = True


def _then(instead: int | None) -> str:
    if instead is None:
        return "No other checkpoint is whole: until the next one is complete, a run that loses its state ends."
    return f"A run that loses its state goes back to the checkpoint of step {instead}."
