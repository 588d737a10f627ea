"""Membership without a manager: one process, or torchrun's fixed world.

Every rank plans by itself from equal facts, so nothing needs to be agreed on but the checkpoint to resume.
A lost peer ends the run (torchrun restarts it, and it resumes).
"""

import hashlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from varuna.checkpoint.files import step_folder
from varuna.checkpoint.folder import prepare, retain
from varuna.checkpoint.manifest import Collector, Manifest, check_compatible, commit, newest_valid
from varuna.core.errors import CheckpointError, FleetError
from varuna.core.membership import Directive
from varuna.core.messages import Assign, Assignment, Beat, Finish, Held, SavedShard, Vote
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.engine.transport import connect_store, local_store, prefixed

COMMIT_BOUND_S = 120.0

PlanRun = Callable[[JobFacts, int, int | None], Plan]


class World(NamedTuple):
    """What torchrun says in the environment; one process without it."""

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
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = connect_store(host, port, hosts=hosts_store)
    except RuntimeError as error:
        raise FleetError(f"the store of torchrun at {host}:{port} does not answer: {error}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return World(rank, size, prefixed(f"varuna/{attempt}", store), host, port)


class Solo:
    """One generation, planned by each rank; implements ``Membership``."""

    survives = False

    def __init__(self, world: World, plan_run: PlanRun, *, new: bool = False, overwrite: bool = False) -> None:
        self.world = world
        self.worker = f"rank{world.rank}"
        self.recorded_step = -1
        self._plan_run = plan_run
        self._new, self._overwrite = new, overwrite
        self._job: JobFacts | None = None
        self._assigned = False
        self._collector: Collector | None = None
        self._committed = threading.Condition()
        self._committed_step = -1
        self._collecting: threading.Thread | None = None

    def join(
        self,
        job: JobFacts,
        *,
        beat: Callable[[], Beat],
        on_hold: Callable[[int], None],
        on_pause: Callable[[int], None],
    ) -> None:
        """Check that all ranks run the same job."""
        self._job = job
        mine = hashlib.sha256(job.model_dump_json().encode()).hexdigest()
        if self.world.rank == 0:
            self.world.store.set("job", mine)
        elif self.world.store.get("job").decode() != mine:
            raise FleetError(
                f"rank {self.world.rank} runs another job than rank 0: model, weights, init, global_batch, seed, "
                "steps, metrics and checkpoint_dir must be equal on all ranks. Start the same script everywhere."
            )

    def next_directive(self) -> Directive:
        """The one assignment, then the end."""
        if self._assigned or self._job is None:
            return Finish()
        self._assigned = True
        manifest, folder = self._resume_from(self._job)
        self._committed_step = manifest.step if manifest else -1
        micro_batch = self._job.micro_batch or (manifest.micro_batch if manifest else None)
        plan = self._plan_run(self._job, self.world.size, micro_batch)
        self._committed_step = manifest.step if manifest else 0
        if self.world.rank == 0:
            self._collect(self._job, plan)
            if self.world.size > 1:
                _say(f"plan {plan.shape} (stages x replicas), micro-batch {plan.micro_batch} x {plan.micro_batches}")
        return Assign(
            assignment=Assignment(
                generation=manifest.generation + 1 if manifest else 0,
                plan=plan,
                rank=self.world.rank,
                members=tuple(f"rank{rank}" for rank in range(self.world.size)),
                next_step=manifest.step if manifest else 0,
                checkpoint=folder,
                fresh=manifest is None,
                store_host=self.world.host,
                store_port=self.world.port,
            )
        )

    def _resume_from(self, job: JobFacts) -> tuple[Manifest | None, str | None]:
        """Rank 0 chooses the checkpoint, the others read its choice."""
        if job.checkpoint_dir is None:
            return None, None
        directory = Path(job.checkpoint_dir)
        if self.world.rank == 0:
            try:
                prepare(directory, new=self._new, overwrite=self._overwrite)
                found = newest_valid(directory)
                if found is not None:
                    check_compatible(found[0], job)
            except CheckpointError as error:
                self.world.store.set("checkpoint", f"!{error}")
                raise
            for warning in found[1] if found else ():
                _say(f"warning: {warning}")
            self.world.store.set("checkpoint", found[0].model_dump_json() if found else "")
            if found is not None:
                complete = ", the last one: nothing is left to do" * (found[0].step >= job.steps)
                _say(f"resuming from the checkpoint of step {found[0].step} in {directory}{complete}")
        choice = self.world.store.get("checkpoint").decode()
        if choice.startswith("!"):
            raise CheckpointError(choice[1:])
        if not choice:
            return None, None
        manifest = Manifest.model_validate_json(choice)
        return manifest, str(step_folder(directory, manifest.step))

    # -- checkpoints -----------------------------------------------------------------------------------

    def _collect(self, job: JobFacts, plan: Plan) -> None:
        if job.checkpoint_dir is None:
            return
        self._collector = Collector(job, run_id=uuid.uuid4().hex, micro_batch=plan.micro_batch)
        if self.world.size > 1:
            self._collecting = threading.Thread(target=self._collect_shards, name="varuna-commit", daemon=True)
            self._collecting.start()

    def _collect_shards(self) -> None:
        """Rank 0: pick up what other ranks report through the store, in the order of their tickets."""
        ticket = 1
        while True:
            key = f"saved/{ticket}"
            if not self.world.store.check([key]):
                time.sleep(0.05)
                continue
            self._commit(SavedShard.model_validate_json(self.world.store.get(key)))
            ticket += 1

    def saved(self, shard: SavedShard) -> None:
        """Report a durable shard to rank 0."""
        if self.world.size == 1:
            self._commit(shard)
        else:
            ticket = self.world.store.add("saved", 1)
            self.world.store.set(f"saved/{ticket}", shard.model_dump_json())

    def _commit(self, shard: SavedShard) -> None:
        assert self._collector is not None
        assert self._job is not None
        assert self._job.checkpoint_dir is not None
        directory = Path(self._job.checkpoint_dir)
        try:
            manifest = self._collector.add(shard)
            if manifest is None:
                return
            commit(directory, manifest)
            retain(directory, committed=manifest.step)
        except CheckpointError as error:
            _say(f"warning: {error}")
            return
        with self._committed:
            self._committed_step = manifest.step
            self._committed.notify_all()

    def leaving(self, step: int) -> None:
        """Rank 0 stays until the last checkpoint is committed."""
        if self._collector is None:
            return
        with self._committed:
            if not self._committed.wait_for(lambda: self._committed_step >= step, COMMIT_BOUND_S):
                _say(f"warning: the checkpoint of step {step} is incomplete after {COMMIT_BOUND_S:.0f} s")

    # -- nobody to tell ----------------------------------------------------------------------------------

    def held(self, held: Held) -> None:
        """Never asked: nothing ends a generation but the run."""

    def voted(self, vote: Vote) -> None:
        """No manager keeps a log."""
        self.recorded_step = vote.step

    def suspect(self, generation: int, reason: str) -> None:
        """The link's error itself ends this process."""

    def failed(self, summary: str, traceback: str, exit_code: int) -> None:
        """Python prints the traceback."""

    def close(self) -> None:
        """Nothing to drop."""


def _say(text: str) -> None:
    print(f"varuna: {text}", file=sys.stderr, flush=True)
