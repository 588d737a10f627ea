"""Completeness of a checkpoint: all parts of all sections, of one step and one generation. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import ValidationError

from varuna.checkpoint.manifest import Manifest
from varuna.checkpoint.names import ShardName, parse_shard_file
from varuna.core.errors import CheckpointError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.saved import SavedShard

_Parts = dict[tuple[int, int], SavedShard]  # (section, part) -> shard


class Gathered(NamedTuple):
    """Progress of the newest unfinished checkpoint."""

    step: int
    parts: int
    """parts that are in the store"""
    of: int | None
    """parts of the whole checkpoint; None before each section has told how many it has"""


class Collector:
    """Gathers reports of durable shards until a step has all its parts; commits nothing itself."""

    def __init__(self, job: JobFacts, *, run_id: str, writer: str) -> None:
        """Start empty; the arguments go into the manifests."""
        self._job, self._run_id, self._writer = job, run_id, writer
        self._plans: dict[int, Plan] = {}  # by generation
        self._oldest = 0  # generation; what came before a rollback, or a new manager, is not collected
        self._complete = -1  # newest step that has passed
        self._pending: dict[tuple[int, int], _Parts] = {}  # (generation, step)

    def begin(self, generation: int, plan: Plan, *, first_step: int, rollback: bool) -> None:
        """Begin a generation. Parts of the one before may still come: survivors write for the dead.

        Args:
            generation: its number.
            plan: goes into its manifests.
            first_step: its first step.
            rollback: it continues from a checkpoint, or begins anew, so unfinished checkpoints are not needed any more.
        """
        if not self._plans:
            self._oldest = generation
        self._plans[generation] = plan
        if rollback:
            self._oldest, self._complete, self._pending = generation, first_step - 1, {}

    def passed(self, step: int) -> int:
        """Note that a checkpoint of ``step`` exists: reports on it, or on earlier ones, are dropped from now on.

        Workers save in step order, so what is missing of earlier ones was skipped and will not come.

        Returns:
            How many shards of earlier checkpoints, which were never complete, are dropped.
        """
        self._complete = max(self._complete, step)
        over = [key for key in self._pending if key[1] <= self._complete]
        return sum(len(self._pending.pop(key)) for key in over)

    def add(self, shard: SavedShard) -> Manifest | None:
        """Note a shard; return the manifest if its step is complete now, which counts once it is told ``passed``.

        Dropped are shards of older generations, and of steps that have passed.

        Raises:
            CheckpointError: the shard is not one of this run, or its step is complete and no checkpoint.
        """
        self._check(shard)
        if shard.generation < self._oldest or shard.step <= self._complete:
            return None
        # Of one generation only: parts of a section are cut for its holders, whose number a morph changes.
        key = (shard.generation, shard.step)
        shards = self._pending.setdefault(key, {})
        # The first report counts: after a morph, a survivor may write a part that the lost worker had finished.
        shards.setdefault((shard.section, shard.part), shard)
        sections = len(self._job.model.sections)
        parts = {found.section: found.parts for found in shards.values()}
        if len(parts) < sections or len(shards) < sum(parts.values()):
            return None
        del self._pending[key]
        try:
            return self._manifest(shard, [shards[place] for place in sorted(shards)])
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise CheckpointError(f"what workers reported of step {shard.step} is no checkpoint: {why}") from error

    @property
    def gathered(self) -> Gathered | None:
        """Return the progress of the newest unfinished checkpoint; None if none is under way."""
        if not self._pending:
            return None
        # The newest step first, and of one step the newest generation.
        generation, step = max(self._pending, key=lambda key: (key[1], key[0]))
        shards = self._pending[generation, step].values()
        parts = {shard.section: shard.parts for shard in shards}
        is_known = len(parts) == len(self._job.model.sections)
        return Gathered(step, len(shards), sum(parts.values()) if is_known else None)

    def _manifest(self, newest: SavedShard, shards: Sequence[SavedShard]) -> Manifest:
        """Make the manifest of shards that are complete."""
        return Manifest(
            run_id=self._run_id,
            writer=self._writer,
            step=newest.step,
            generation=newest.generation,
            state_digest=self._job.model.state_digest,
            code_digest=self._job.model.code_digest,
            sections=len(self._job.model.sections),
            seed=self._job.seed,
            global_batch=self._job.global_batch,
            samples=self._job.samples,
            first_samples=self._job.first_samples,
            plan=self._plans[newest.generation],
            shards=tuple(shards),
        )

    def _check(self, shard: SavedShard) -> None:
        try:
            name = parse_shard_file(shard.file)
        except ValueError as error:
            raise CheckpointError(f"a worker reported an impossible shard: {error}") from error
        said = ShardName(shard.section, shard.part, shard.parts, shard.generation)
        sections = len(self._job.model.sections)
        if name != said or shard.section >= sections or shard.part >= shard.parts:
            raise CheckpointError(f"a worker reported {shard.file} as {said}, of {sections} sections")
        if shard.generation >= self._oldest and shard.generation not in self._plans:
            raise CheckpointError(f"a worker reported {shard.file}, but generation {shard.generation} never began")
