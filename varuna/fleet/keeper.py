"""The manager's part in checkpoints: it alone makes shards into a checkpoint, and says which one is the newest."""

import secrets
from collections.abc import Callable
from pathlib import Path

from varuna.checkpoint.files import step_folder
from varuna.checkpoint.folder import prepare, retain
from varuna.checkpoint.manifest import Collector, check_compatible, commit, newest_valid
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard
from varuna.core.model import JobFacts
from varuna.fleet.state import Checkpoint


class CheckpointKeeper:
    """Commits, retains and finds checkpoints in the job's ``checkpoint_dir``; without one it does nothing."""

    def __init__(self, *, new: bool, overwrite: bool, warn: Callable[[str], None]) -> None:
        self._new, self._overwrite, self._warn = new, overwrite, warn
        self._run_id = secrets.token_hex(4)
        self._directory: Path | None = None
        self._collector: Collector | None = None

    def newest(self, job: JobFacts) -> Checkpoint | None:
        """The newest intact checkpoint; the first call makes the directory ready.

        Raises:
            CheckpointError: the directory cannot be used, or its checkpoints are damaged or of another job.
            UsageError: ``overwrite`` without ``new``.
        """
        if job.checkpoint_dir is None:
            return None
        if self._directory is None:
            directory = Path(job.checkpoint_dir)
            prepare(directory, new=self._new, overwrite=self._overwrite)
            self._directory = directory
        found = newest_valid(self._directory)
        if found is None:
            return None
        manifest, warnings = found
        for warning in warnings:
            self._warn(warning)
        check_compatible(manifest, job)
        self._run_id = manifest.run_id
        return Checkpoint(str(step_folder(self._directory, manifest.step)), manifest.step, manifest.micro_batch)

    def begin(self, job: JobFacts, micro_batch: int) -> None:
        """A generation starts with this m, which its manifests will name."""
        self._collector = Collector(job, run_id=self._run_id, micro_batch=micro_batch)

    def collect(self, shard: SavedShard) -> None:
        """Note a durable shard, and commit if its checkpoint is complete; a failure costs a checkpoint, not the run."""
        if self._directory is None or self._collector is None:
            return
        try:
            manifest = self._collector.add(shard)
            if manifest is not None:
                retain(self._directory, committed=commit(self._directory, manifest).step)
        except CheckpointError as error:
            self._warn(f"the checkpoint of step {shard.step} is not kept: {error}")
