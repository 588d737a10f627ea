"""Membership without a manager: one process, or torchrun's fixed world.

Rank 0 chooses the checkpoint to resume and makes the plan, and tells the others.
A lost peer ends the run (torchrun restarts it, and it resumes).
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from varuna.calibration.format import Calibrations
from varuna.checkpoint.committer import CheckpointCommitter
from varuna.checkpoint.manifest import Manifest
from varuna.checkpoint.names import checkpoint_place
from varuna.core.devices import DeviceFacts, DeviceFault, WorkerGroups, equal_workers, worker_bytes
from varuna.core.errors import CheckpointError, FleetError, NoPlanError, VarunaError
from varuna.core.job_difference import job_difference
from varuna.core.membership import Directive
from varuna.core.messages import Assign, Assignment, Beat, Finish, Flag, Shown, ShowRequest, StopReport, Vote
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.saved import SavedShard
from varuna.core.sums import MicroBatchLoss, StoredSums, remainder_of_stored
from varuna.core.units import counted
from varuna.core.value import Value
from varuna.engine.base.transport import connect_store, local_store, prefixed
from varuna.planner.micro_batch import describe_sizes
from varuna.process.console import say, warn
from varuna.process.threads import start

COMMIT_BOUND_S = 120.0
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2
_CHOICE_BOUND_S = 1200.0
"""Rank 0 may wait for the directory's owner to be gone, and a quarter of an hour for a bucket that does not answer."""

_jobs = itertools.count()
"""Jobs of this process: a script may train one after another, and each needs keys of its own in torchrun's store."""
_hosted: dict[tuple[str, int], Any] = {}

PlanRun = Callable[[JobFacts, WorkerGroups, int | None], Plan]


class World(NamedTuple):
    """The world that torchrun describes in the environment; one process without torchrun."""

    rank: int
    size: int
    store: Any
    host: str
    port: int


def world_from_environment() -> World:
    """Connect to torchrun's store, or make one of our own for a single process.

    Raises:
        FleetError: torchrun's variables are incomplete, or its store does not answer.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return World(0, 1, local_store(), "127.0.0.1", 0)
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise FleetError(
            f"torchrun's environment is incomplete: {error}. Start with torchrun, or unset RANK and WORLD_SIZE."
        ) from error
    hosts_own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    hosts_store = rank == 0 and hosts_own
    try:
        store = _hosted.get((host, port)) or connect_store(host, port, hosts=hosts_store)
    except RuntimeError as error:
        raise FleetError(f"torchrun's store at {host}:{port} does not answer: {error}") from error
    if hosts_store:
        _hosted[host, port] = store
    # In the agents' store keys of the attempt before are still there. A store of the workers' own is new; the number of
    # attempts is of one node then, and a node that came later has another.
    attempt = "0" if hosts_own else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return World(rank, size, prefixed(f"varuna/{attempt}/{next(_jobs)}", store), host, port)


class _Choice(Value):
    """The beginning of a run: a checkpoint, with what was saved of the step after it; or none."""

    manifest: Manifest | None = None
    sums: StoredSums | None = None

    @property
    def losses(self) -> tuple[MicroBatchLoss, ...]:
        """That were saved of that step."""
        return () if self.sums is None else self.sums.losses


class StaticMembership:
    """One generation, planned by rank 0; implements ``Membership``.

    Another one follows only if a checkpoint turns out to be damaged while it is read: from an older one.
    """

    survives = False

    def __init__(
        self,
        world: World,
        plan_run: PlanRun,
        *,
        plans_from: Callable[[Calibrations], PlanRun] | None = None,
        new: bool = False,
        overwrite: bool = False,
        join_bound_s: float = 1800.0,
        said_after_s: float = 30.0,
        found: Manifest | None = None,
    ) -> None:
        """Prepare; nothing is said to the other ranks before ``join``.

        Args:
            world: this rank, and where it meets the others.
            plan_run: makes the plan.
            plans_from: makes another ``plan_run``, from what rank 0 knows of the hardware. Default: nobody measures.
            new: start afresh.
            overwrite: with ``new``: move old checkpoints aside.
            join_bound_s: between ranks that join, each of which captures the model for itself.
            said_after_s: a wait for other ranks is reported after this long.
            found: checkpoint to begin with, in a directory that others write. Default: the newest, in one that this
                run takes for itself.
        """
        self._join_bound_s, self._said_after_s = join_bound_s, said_after_s
        self.world = world
        self.worker = f"rank{world.rank}"
        self.recorded_step = -1
        self._plan_run, self._plans_from = plan_run, plans_from
        self._known: Calibrations | None = None  # on rank 0
        self._new, self._overwrite = new, overwrite
        self._found = found
        self._job: JobFacts | None = None
        self._assigned = False
        self._generation = -1
        self._restored_step = 0
        self._keeper: CheckpointCommitter | None = None  # on rank 0
        self._closing = threading.Event()

    @property
    def measures(self) -> bool:
        """Rank 0 plans for all."""
        return self.world.rank == 0 and self._plans_from is not None

    def offer_calibrations(self, calibrations: str) -> None:
        """Plan from it."""
        if self._plans_from is not None:
            self._known = Calibrations.model_validate_json(calibrations)
            self._plan_run = self._plans_from(self._known)

    def join(
        self,
        job: JobFacts,
        *,
        device: DeviceFacts | None = None,
        device_class: str = "",
        beat: Callable[[], Beat],
        on_hold: Callable[[int], None],
        on_flag: Callable[[int, Flag], None],
        on_show: Callable[[ShowRequest], None] = lambda request: None,
    ) -> None:
        """Check that all ranks run the same job."""
        self._job = job
        if self.world.rank == 0:
            self.world.store.set("job", job.model_dump_json())
        else:
            ours = JobFacts.model_validate_json(self._told("job", "has captured the model", self._join_bound_s))
            if difference := job_difference(job, ours):
                raise FleetError(
                    f"rank {self.world.rank} runs a different job than rank 0: {difference}. Start the same script "
                    "everywhere."
                )
        self.world.store.set(f"device/{self.world.rank}", "" if device is None else device.model_dump_json())

    def next_directive(self) -> Directive:
        """The one assignment, then the end."""
        if self._assigned or self._job is None:
            return Finish()
        self._assigned = True
        choice = self._resume_from(self._job)
        manifest = choice.manifest
        self._restored_step = manifest.step if manifest else 0
        self._generation = max(self._generation, manifest.generation if manifest else -1) + 1
        micro_batch = self._job.micro_batch or (manifest.micro_batch if manifest else None)
        self._gather()
        plan = self._planned(self._job, micro_batch)
        if self._keeper is not None:
            self._keeper.begin(self._generation, plan, first_step=self._restored_step, rollback=True)
        directory = self._job.checkpoint_dir
        left = remainder_of_stored(choice.sums, plan, self._job.model)
        if left is not None and self.world.rank == 0:
            say(left.sentence(self._restored_step, stored=True))
        return Assign(
            assignment=Assignment(
                generation=self._generation,
                plan=plan,
                rank=self.world.rank,
                members=self.world.size,
                next_step=self._restored_step,
                rest=left.rest_of(plan, self.world.rank, choice.losses) if left is not None else None,
                checkpoint=checkpoint_place(directory, manifest.step) if directory and manifest else None,
                fresh=manifest is None,
            )
        )

    def _gather(self) -> None:
        """Wait until all ranks have joined: from then on each expects the others within moments.

        Raises:
            FleetError: a rank has not joined within the bound.
        """
        waited_for = {f"device/{rank}": f"rank {rank}" for rank in range(self.world.size)}
        try:
            self._wait(waited_for, "to capture the model", self._join_bound_s)
        except RuntimeError as error:
            raise FleetError(
                f"not all of {self.world.size} ranks have captured the model within {self._join_bound_s:.0f} s "
                f"({error}). Look at the output of the other ranks, and check that torchrun started all of them."
            ) from error

    def _workers(self, job: JobFacts) -> WorkerGroups:
        """The workers, with the memory that every rank's device has for the job."""
        if not job.memory_apart:
            return equal_workers(self.world.size)
        told = [self.world.store.get(f"device/{rank}").decode() for rank in range(self.world.size)]
        devices = [DeviceFacts.model_validate_json(text) if text else None for text in told]
        return equal_workers(self.world.size, worker_bytes(devices))

    def _resume_from(self, job: JobFacts) -> _Choice:
        """Rank 0 chooses the checkpoint, the others read its choice."""
        if self._found is not None:
            return _Choice(manifest=self._found)
        if job.checkpoint_dir is None:
            return _Choice()
        key = f"checkpoint/{self._generation}"
        if self.world.rank == 0:
            try:
                choice = self._newest(job)
            except VarunaError as error:
                self.world.store.set(key, f"!{error}")
                raise
            self.world.store.set(key, choice.model_dump_json())
        told = self._told(key, "has chosen the checkpoint to resume", _CHOICE_BOUND_S)
        if told.startswith("!"):
            raise CheckpointError(told[1:])
        return _Choice.model_validate_json(told)

    def _planned(self, job: JobFacts, micro_batch: int | None) -> Plan:
        """Rank 0 makes the plan, the others read it.

        Raises:
            NoPlanError: nothing fits.
        """
        key = f"plan/{self._generation}"
        if self.world.rank:
            told = self._told(key, "has made the plan", _CHOICE_BOUND_S)
            if told.startswith("!"):
                raise NoPlanError(told[1:])
            return Plan.model_validate_json(told)
        try:
            plan = self._plan_run(job, self._workers(job), micro_batch)
        except VarunaError as error:
            self.world.store.set(key, f"!{error}")
            raise
        self.world.store.set(key, plan.model_dump_json())
        if self._found is not None:
            return plan
        parts = f"{counted(plan.micro_batches, 'micro-batch')} of {plan.micro_batch}"
        say(f"plan {plan.shape} (stages x replicas) on {counted(self.world.size, 'worker')}: {parts}")
        if micro_batch is None and self._known is not None and len(self._known.first.sizes) > 1:
            say(describe_sizes(self._known.first, plan.micro_batch))
        return plan

    def _told(self, key: str, what: str, bound_s: float) -> str:
        """A value that rank 0 sets; the store's own wait would last a minute, and its error would name the key."""
        try:
            self._wait({key: "rank 0"}, f"to say that it {what}", bound_s)
            said: str = self.world.store.get(key).decode()
        except RuntimeError as error:
            raise FleetError(
                f"rank {self.world.rank} waited for rank 0, which has not said within {bound_s:.0f} s that it "
                f"{what} ({error}). Look at the output of rank 0, then start the same command again."
            ) from error
        return said

    def _wait(self, keys: Mapping[str, str], what: str, bound_s: float) -> None:
        """Wait for the store's ``keys``, each of which somebody sets; says so if that lasts.

        Raises:
            RuntimeError: the bound has passed, or the store is gone.
        """
        begin_s, pause_s, told = time.monotonic(), _POLL_S, False
        while not self.world.store.check(list(keys)):
            waited_s = time.monotonic() - begin_s
            if waited_s >= bound_s or (waited_s >= self._said_after_s and not told):
                missing = [who for key, who in keys.items() if not self.world.store.check([key])]
                waits = f"waited {waited_s:.0f} s for {', '.join(missing)} {what}"
                if waited_s >= bound_s:
                    raise RuntimeError(waits)
                say(f"rank {self.world.rank} has {waits}")
                told = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _newest(self, job: JobFacts) -> _Choice:
        if self._keeper is None:
            self._keeper = CheckpointCommitter(job, new=self._new, overwrite=self._overwrite, say=say, warn=warn)
            if self.world.size > 1:
                start("collect", self._collect_shards)
        found = self._keeper.newest()
        if found is None:
            return _Choice()
        manifest, warnings = found
        for warning in warnings:
            warn(warning)
        complete = ", the last one; nothing left to do" * (manifest.step >= job.steps)
        say(f"resuming from the checkpoint of step {manifest.step} in {job.checkpoint_dir}{complete}")
        return _Choice(manifest=manifest, sums=self._keeper.sums_after(manifest))

    # -- checkpoints -----------------------------------------------------------------------------------

    def _collect_shards(self) -> None:
        """Rank 0: pick up what other ranks report through the store, in the order of their tickets."""
        ticket = 1
        while not self._closing.is_set():
            key = f"saved/{ticket}"
            try:
                if not self.world.store.check([key]):
                    self._closing.wait(_POLL_S)
                    continue
                self.saved(SavedShard.model_validate_json(self.world.store.get(key)))
            except RuntimeError:
                return  # the store is gone, and the run with it
            except ValueError as error:
                warn(f"a report of a shard cannot be read, so its checkpoint is not committed: {error}")
            ticket += 1

    def saved(self, shard: SavedShard) -> None:
        """Report a durable shard to rank 0."""
        if self._keeper is not None:
            self._keeper.collect(shard)
        else:
            ticket = self.world.store.add("saved", 1)
            self.world.store.set(f"saved/{ticket}", shard.model_dump_json())

    def store(self, generation: int) -> Any:
        """The store, which all generations share."""
        return self.world.store

    def shown(self, answer: Shown) -> None:
        """Nobody has asked: without a manager there is no one to."""

    def unsaved(self, reason: str) -> None:
        """Print the reason."""
        warn(reason)

    def leaving(self, step: int) -> None:
        """Rank 0 stays until the last checkpoint is committed."""
        keeper = self._keeper
        if keeper is None:
            return
        if self.world.size == 1:
            keeper.wait_until_settled()  # our own shards are all reported, or lost
        elif step > self._restored_step and not keeper.wait_for(step, COMMIT_BOUND_S):
            warn(f"the checkpoint of step {step} is incomplete after {COMMIT_BOUND_S:.0f} s")
        self._closing.set()
        keeper.close()

    # -- nobody to tell ----------------------------------------------------------------------------------

    def held(self, held: StopReport) -> None:
        """Never asked: nothing ends a generation but the run."""

    def voted(self, vote: Vote) -> None:
        """No manager keeps a log."""
        self.recorded_step = vote.step

    def suspect(self, generation: int, reason: str, fault: DeviceFault | None = None, peer: int | None = None) -> None:
        """A link's error itself ends this process; after a damaged checkpoint there is another assignment."""
        self._assigned = False

    def failed(self, summary: str, traceback: str, exit_code: int, fault: DeviceFault | None = None) -> None:
        """Python prints the traceback."""

    def close(self) -> None:
        """Release the checkpoint directory."""
        self._closing.set()
        if self._keeper is not None:
            self._keeper.close()
