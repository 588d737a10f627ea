"""Saves sums of gradients during a step that lasts longer than the time between two checkpoints.

They go into the folder of the checkpoint that the step began from, section by section, so that a run which begins there
again has only the rest of the step left to do. If the state before the step has not been saved, as that is not done
after each step, it is now. Each rank decides for itself when: what is in which sums is written down with them, so ranks
need not agree.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from varuna.checkpoint.io.sums import fingerprint, write_sums
from varuna.checkpoint.manifest import find_step
from varuna.checkpoint.names import step_folder, sums_file
from varuna.checkpoint.saved_sums import SumsLabel, job_of, remove_sums
from varuna.core.errors import VarunaError
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

Found = TypeVar("Found")
LOOK_S = 1.0
"""Seconds between looks whether a save is due, or a step over."""
_FEWER_LOOKS = 5
"""A store that is asked again and again is asked that much more rarely in the end."""


class SumsSaver:
    """Saves the sums of one stage, as long as its generation lasts."""

    def __init__(
        self,
        saver: Snapshotter,
        stage: Stage,
        assignment: Assignment,
        job: JobFacts,
        outliving: Plan | None,
        save_state: Callable[[], None],
    ) -> None:
        """Start.

        Args:
            saver: saves the state, and says where and how often.
            stage: whose sums.
            assignment: of its rank.
            job: that runs.
            outliving: the plan of a run that outlives the loss of workers.
            save_state: saves the state as it is, unless that is done.
        """
        self._saver, self._stage, self._save_state, self._steps = saver, stage, save_state, job.steps
        self._due_s = partial(saver.sums_due_s, outliving)
        self._job, self._sections = job_of(job), sum(bool(each.summed_bytes) for each in job.model.sections)
        self._generation, self._rank = assignment.generation, assignment.rank
        self._room, self._writer, self._number = torch.empty(0), writer_id(), 0
        start("sums-saver", self._run)

    def _run(self) -> None:
        step = -1
        while (next_step := self._stage.still.wait_beyond(step)) is not None and next_step < self._steps:
            step = next_step
            self._watch(step)
            self._room = torch.empty(0)
            if self._stage.sums.is_wrong:
                self._try(step, partial(self._remove_all, step))

    def _remove_all(self, step: int) -> None:
        """Remove all saved sums of a step: if these are wrong, those of other ranks may be, too."""
        remove_sums(self._saver.store, find_step(self._saver.store, step))

    def _watch(self, step: int) -> None:
        """Save whenever it is due, until the step is over."""
        written, looks = dict[int, str](), 0  # by section; and in vain
        while self._stage.still.wait_while_in(step, max(0.0, min(LOOK_S, self._due_s()))):
            if self._due_s() > 0:
                continue
            begin_s = time.monotonic()
            if self._try(step, lambda: self._save(step, written)) is False:
                self._stage.still.wait_while_in(step, min(2**looks, _FEWER_LOOKS) * LOOK_S)
                looks += 1
            else:
                self._saver.saved_sums(time.monotonic() - begin_s)

    def _try(self, step: int, work: Callable[[], Found]) -> Found | None:
        """Return what ``work`` returns; None: it failed, which is said, and costs only what it should have saved."""
        try:
            return work()
        except VarunaError as error:
            self._saver.unsaved(f"the sums of gradients of step {step} are not saved: {error}")
        except Exception as error:  # noqa: BLE001  a dead thread would save nothing more in silence
            if self._stage.still.wait_while_in(step, 0.0):  # else its generation has ended, and it may be about that
                self._saver.unsaved(
                    f"the sums of gradients of step {step} are not saved because of an internal error (please report "
                    f"it): {error!r}"
                )
        return None

    def _save(self, step: int, written: dict[int, str]) -> bool:
        """Save all sections in place of those ``written`` before; False: the state below them is not there yet.

        Raises:
            StoreError: the store cannot be used.
        """
        if not find_step(self._saver.store, step).is_committed:
            self._save_below(step)
            return False
        sizes = self._stage.sums.sizes()
        if not self._room.numel():
            self._room = self._stage.sums.room()
        with span("save-sums", rank=self._rank, stage=self._stage.index, step=step):
            for section, size in reversed(sizes.items()):  # as backwards come to them
                wanted = self._stage.sums.copy_section(
                    section, self._room[:size], lambda: self._stage.still.wait_while_in(step, 0.0)
                )
                if wanted is None:
                    break
                if wanted.micro_batches:
                    self._write(step, wanted, written)
        return True

    def _save_below(self, step: int) -> None:
        """Save the state that the sums belong to, unless that is done, or under way."""
        is_done = self._saver.newest == (self._generation, step) or self._saver.is_saving
        if not is_done and self._stage.still.has_begun(step):
            self._stage.still.read(step, self._save_state)

    def _write(self, step: int, wanted: SumWanted, written: dict[int, str]) -> None:
        section, store = wanted.section, self._saver.store
        described = self._stage.still.read(step, lambda: self._described(wanted))
        if described is None:
            return
        file = sums_file(section, self._generation, self._writer, self._number)
        self._number += 1
        write_sums(store, step, file, *described)
        # The new file first, then the old one goes: at any moment one of them is whole.
        before, written[section] = written.get(section), file
        if before is not None:
            store.remove(f"{step_folder(step)}/{before}")

    def _described(self, wanted: SumWanted) -> tuple[SumsLabel, dict[str, Tensor]]:
        """Return the label and the tensors of sums, while their step lasts."""
        stage, section = self._stage, wanted.section
        statistics = stage.statistics.as_bytes(section, wanted.micro_batches)
        label = SumsLabel(
            job=self._job,
            parameters=fingerprint(_trained(stage, section), stage.job.dtype),
            sections=self._sections,
            micro_batch=stage.plan.micro_batch,
            micro_batches=stage.plan.micro_batches,
            sums=SectionSum(section=section, micro_batches=wanted.micro_batches),
            # With the section that is saved first: no other one has more micro-batches that all sections have.
            losses=stage.work.known if stage.is_last and section == max(stage.sums.sizes()) else (),
        )
        return label, {SUMS: wanted.room} | ({} if statistics is None else {STATISTICS: statistics})


def _trained(stage: Stage, section: int) -> dict[str, Tensor]:
    names = stage.job.model.sections[section].parameters
    return {name: stage.parameters[name] for name in names if name in stage.job.model.trainable}
