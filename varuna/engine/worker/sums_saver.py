"""Saves sums of gradients during a step that lasts longer than the time between two checkpoints.

They go into the folder of the checkpoint that the step began from, section by section, so that a run which begins there
again has only the rest of the step left to do. If the state before the step has not been saved, as that is not done
after each step, it is now. Each rank decides for itself when: what is in which sums is written down with them, so ranks
need not agree.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from varuna.checkpoint.io.sums import fingerprint, write_sums
from varuna.checkpoint.manifest import look
from varuna.checkpoint.names import step_folder, sums_file
from varuna.checkpoint.saved_sums import SumsLabel, job_of
from varuna.core.errors import CheckpointError
from varuna.core.messages import Assignment
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.sums import SectionSum
from varuna.engine.base.spans import span
from varuna.engine.stage.load_state import STATISTICS, SUMS
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.sums import SumWanted
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.process.threads import start
from varuna.store.retry import writer_id

LOOK_S = 1.0
"""How soon it is noticed that a save is due, or a step over."""
_FEWER_LOOKS = 5
"""A store that is asked again and again is asked that much more rarely in the end."""


def save_sums(
    saver: Snapshotter,
    stage: Stage,
    assignment: Assignment,
    job: JobFacts,
    outliving: Plan | None,
    save_state: Callable[[], None],
) -> None:
    """Begin to save the sums of a stage, as long as the generation lasts, if anybody can go on from them.

    ``save_state`` saves the state as it is, unless that is done.
    """
    if stage.sums.outlast:
        _SumsSaver(
            stage,
            saver,
            lambda: saver.sums_due_s(outliving),
            save_state,
            job=job_of(job),
            steps=job.steps,
            generation=assignment.generation,
            rank=assignment.rank,
        )


class _SumsSaver:
    """Saves the sums of one stage."""

    def __init__(
        self,
        stage: Stage,
        saver: Snapshotter,
        due_s: Callable[[], float],
        save_state: Callable[[], None],
        *,
        job: str,
        steps: int,
        generation: int,
        rank: int,
    ) -> None:
        """Start.

        Args:
            stage: whose sums.
            saver: saves its state, and says where.
            due_s: seconds until the next save.
            save_state: saves the stage's state.
            job: ``checkpoint.io.sums.job_of`` this one.
            steps: length of the run: nothing follows its last one.
            generation: for the files' names.
            rank: this one.
        """
        self._stage, self._saver, self._due_s, self._job, self._steps = stage, saver, due_s, job, steps
        self._save_state = save_state
        self._generation, self._rank, self._writer, self._number = generation, rank, writer_id(), 0
        start("sums-saver", self._run)

    def _run(self) -> None:
        step = -1
        while (next_step := self._stage.still.wait_beyond(step)) is not None and next_step < self._steps:
            step = next_step
            try:
                self._watch(step)
            except CheckpointError as error:
                self._saver.unsaved(f"the sums of gradients of step {step} are not saved: {error}")
            except RuntimeError as error:  # the generation has ended, or memory has
                if self._stage.still.lasts(step, 0.0):
                    self._saver.unsaved(f"the sums of gradients of step {step} are not saved: {error}")

    def _watch(self, step: int) -> None:
        """Save whenever it is due, until the step is over.

        Raises:
            StoreError: the store cannot be used; the next step is tried again.
        """
        written, looks = dict[int, str](), 0  # by section; and in vain
        while self._stage.still.lasts(step, max(0.0, min(LOOK_S, self._due_s()))):
            if self._due_s() > 0:
                continue
            if not look(self._saver.store, step).is_committed:  # without the state they are of no use
                self._save_below(step)
                self._stage.still.lasts(step, min(2**looks, _FEWER_LOOKS) * LOOK_S)
                looks += 1
                continue
            begin_s = time.monotonic()
            with span("save-sums", rank=self._rank, stage=self._stage.index, step=step):
                for section, size in reversed(self._stage.sums.sizes().items()):  # as backwards come to them
                    if not self._save(step, section, size, written):
                        break
            self._saver.saved_sums(time.monotonic() - begin_s)
        if self._stage.sums.is_wrong:
            for file in written.values():
                self._saver.store.remove(f"{step_folder(step)}/{file}")

    def _save_below(self, step: int) -> None:
        """Save the state that the sums belong to, unless that is done, or under way."""
        is_done = self._saver.newest == (self._generation, step) or self._saver.is_saving
        if not is_done and self._stage.still.has_begun(step):
            self._stage.still.read(step, self._save_state)

    def _taken(self, step: int, section: int, size: int) -> SumWanted | None:
        """Sums as they are after the next micro-batch; None: the step is over."""
        stage = self._stage
        wanted = SumWanted(section, torch.empty(size, dtype=torch.float32))
        stage.sums.want(wanted)
        while not wanted.taken.wait(LOOK_S):
            if not stage.still.lasts(step, 0.0):
                stage.sums.forgo(wanted)
                return None
        return wanted

    def _save(self, step: int, section: int, size: int, written: dict[int, str]) -> bool:
        """Save one section's sums in place of those before; False: the step is over."""
        stage, wanted = self._stage, self._taken(step, section, size)
        if wanted is None:
            return False
        if not wanted.micro_batches:
            return True
        tensors = {SUMS: wanted.room}
        label = stage.still.read(step, lambda: self._label(wanted))
        if stage.statistics.has(section):
            statistics = stage.still.read(step, lambda: stage.statistics.carried(section, wanted.micro_batches))
            if statistics is None:
                return False
            tensors[STATISTICS] = statistics
        if label is None:
            return False
        file = sums_file(section, self._generation, self._writer, self._number)
        self._number += 1
        write_sums(self._saver.store, step, file, label, tensors)
        before = written.get(section)
        written[section] = file
        if before is not None:
            self._saver.store.remove(f"{step_folder(step)}/{before}")
        return True

    def _label(self, wanted: SumWanted) -> SumsLabel:
        stage = self._stage
        return SumsLabel(
            job=self._job,
            parameters=fingerprint(_trained(stage, wanted.section), stage.job.dtype),
            micro_batch=stage.plan.micro_batch,
            micro_batches=stage.plan.micro_batches,
            sums=SectionSum(section=wanted.section, micro_batches=wanted.micro_batches),
            # With the section that is saved first: no other one has more micro-batches that all sections have.
            losses=stage.work.known if stage.is_last and wanted.section == max(stage.sums.sizes()) else (),
        )


def _trained(stage: Stage, section: int) -> dict[str, Tensor]:
    names = stage.job.model.sections[section].parameters
    return {name: stage.parameters[name] for name in names if name in stage.job.model.trainable}
