"""A worker's life: generations, one after another, and the loop over steps in between.

join --> next_directive
           |-- Assign --> _form: groups, state, stage --> _step_through: run_step, save, the user's code
           |     ^          |                               |          ^          |
           |     |          | (a spare: serves its state)   |          +----------+
           |     |          v                               v
           |     |        GenerationEnded, LinkError     all steps have run, or a vote says stop
           |     |          |                               |
           |     +-- report what is held: StopReport        +--> farewell, last saves, leaving
           |-- Apply: the manager knows that the step in flight was voted for; apply it, report again
           +-- Finish, TrainingOver: write this rank's part of the last checkpoint, return
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

from varuna.checkpoint.io.section_state import JSON
from varuna.core.errors import DamagedCheckpoint, DivergedError, FleetError, LinkError
from varuna.core.membership import Membership
from varuna.core.messages import Apply, Assign, Assignment, Finish, TrainingOver, WorkerPhase
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.vote import StepTotals
from varuna.engine.base.connection import unreachable_of
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.wait_bounds import Patience
from varuna.engine.copies.keeping import KeptSums
from varuna.engine.device.faults import DeviceFull
from varuna.engine.device.pulse import Pulse
from varuna.engine.pipeline.apply import layout_of, overflowed
from varuna.engine.pipeline.divergence import (
    check_finite,
    check_measured,
    check_replicas,
    check_written,
    is_finite,
)
from varuna.engine.shown.shown_steps import ShownSteps
from varuna.engine.stage.parameter_groups import Writes
from varuna.engine.worker.forming import WorkerContext
from varuna.engine.worker.generation import (
    Generation,
    build_stage,
    make_generation,
    open_generation,
    send_rest,
    who,
)
from varuna.engine.worker.heartbeat import Heartbeat
from varuna.engine.worker.loop_state import Committed, LoopStateOffer, LoopStep
from varuna.engine.worker.publisher import Publisher
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.engine.worker.step import run_step
from varuna.engine.worker.sums_saver import SumsSaver
from varuna.engine.worker.worker_state import WorkerState
from varuna.process.console import say_once
from varuna.process.threads import join_all

Found = TypeVar("Found")
_EXIT_BOUND_S = 5.0
_RECENT_STEPS = 32
"""The median of this many steps tells how long a step takes: a single one may compile, or wait for user code."""


class Session:
    """Runs the steps of one job on one worker."""

    def __init__(
        self,
        context: WorkerContext,
        facts: JobFacts,
        membership: Membership,
        *,
        saver: Snapshotter | None = None,
        patience: Patience | None = None,
        device_class: str = "",
        cut_check: Callable[[], None] = lambda: None,
        publisher: Publisher | None = None,
        last: LoopStep | None = None,
        is_main: bool = True,
    ) -> None:
        """Prepare; nothing runs before ``steps``.

        Args:
            context: of the worker.
            facts: of the job, for planner and manager.
            membership: decides on generations.
            saver: writes checkpoints, if there is a directory.
            patience: of waits for other ranks.
            device_class: of the device that this worker computes on; empty: unknown.
            cut_check: refuses several stages, if the user's update cannot be divided.
            publisher: publishes the model during the run, if it is to be published.
            last: step that the loop is to get though nothing is left to train: others have trained.
            is_main: whether rank 0 of this session may be the main rank.
        """
        self._context, self._loop = context, context.loop
        self.facts, self._membership, self._saver, self._publisher = facts, membership, saver, publisher
        self._last, self._may_be_main = last, is_main
        self.over: TrainingOver | None = None
        """Others have ended the training, and this worker cannot be asked for its state."""
        self._device_class = device_class
        self.standing = WorkerState(membership)
        self._stopping = self._saves_next = False
        self._combines = None if facts.combines else False  # the steps call all_reduce_shared; None: not known yet
        self._shown, self._cut_check = ShownSteps(membership.shown, context.job.device), cut_check
        self.heartbeat = Heartbeat(self.standing, context.job.compiler, self._shown.recent, membership)
        self._is_sound, self._patience = True, patience  # the newest step was finite
        self._odd_step = -1  # the newest that was not, and runs again
        self.current: Generation | None = None
        self._assignment: Assignment | None = None  # of the newest stage

    # -- called by the trainer -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask all ranks to leave the loop: the flag goes into the next vote."""
        self._stopping = True

    def checkpoint(self) -> None:
        """Save after the next step that is committed; any rank may ask."""
        self._saves_next = True

    def close(self) -> None:
        """Leave, and wait for all threads: none may outlive the process's main thread."""
        self.leave()
        join_all(_EXIT_BOUND_S)

    def leave(self) -> None:
        """Leave the last generation's groups, and end what runs for this session."""
        if self.current is not None:
            self.current.close(exiting=True)
        self.standing.send_through(None, exiting=True)
        self.heartbeat.inbox.abort(GenerationEnded(self.standing.generation))
        if self._saver is not None:
            self._saver.close()
        if self._publisher is not None:
            self._publisher.close()
        self._context.source.close()
        self._membership.close()

    def measure(self, value: float) -> None:
        """Tell the scheduler what was measured; all ranks call this at the same step."""
        if self.current is not None:
            self.current.stage.optimizer.measure(value)
        self._loop.measure(value)

    @property
    def newest_step(self) -> int:
        """Number of the newest step that the state contains; 0 before any."""
        return max(0, (self.standing.next_step or 0) - 1)

    def options(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the options of the optimizer's groups, as the next step will use them; None: they are not known."""
        return None if self.current is None else self.current.stage.optimizer.options()

    def write(self, values: Writes) -> None:
        """Give options of the optimizer's groups other values, from the next step on; all ranks call this alike."""
        if values and self.current is not None:
            stage, before = self.current.stage, self._loop.written
            stage.optimizer.write(values)
            now = {**({} if before is None else before.values), **values}
            if (options := stage.optimizer.options()) is not None:
                now = {(group, key): options[group][key] for group, key in now}
            self._loop.write(stage.next_step, now)

    def run_between_steps(self, run: Callable[[Generation], Found], doing: str) -> Found | None:
        """Use the present generation between two steps; all ranks call this at the same step.

        None if the generation ends meanwhile: training continues with the workers that are left. The state is at rest,
        so the manager gets its answer at once.

        Raises:
            FleetError: nothing has been trained yet.
        """
        generation = self.current
        if generation is None:
            raise FleetError("evaluation and prediction work inside the training loop and after it: run a step first")
        before = self.heartbeat.activity
        self.heartbeat.at(doing)
        try:
            return run(generation)
        except GenerationEnded:
            return None
        except LinkError as error:
            self._membership.suspect(generation.assignment.generation, str(error), peer=unreachable_of(error))
            if not self._membership.survives:
                raise
            return None
        finally:
            self.heartbeat.activity = before

    def steps(self) -> Iterator[Committed]:
        """Join, run every generation, leave; yields each committed step once per generation that ran it.

        Raises:
            FleetError: the manager refused this worker or ended the run.
            LinkError: a link broke and no manager can replace the generation.
        """
        standing, heart = self.standing, self.heartbeat
        heart.train_here()
        streams = self._context.job.traffic.streams
        self._membership.join(
            self.facts,
            device=None if streams is None else streams.memory(),
            device_class=self._device_class,
            beat=heart.beat,
            on_hold=standing.on_hold,
            on_flag=standing.on_flag,
            on_show=self._shown.request_steps,
        )
        finished = False
        while not finished:
            heart.at("waits for an assignment")
            directive = self._membership.next_directive()
            if isinstance(directive, Finish):
                if directive.failure is not None:
                    raise FleetError(directive.failure)
                self._end_here()
                return
            if isinstance(directive, TrainingOver):
                self.over = directive
                self._end_here()
                return
            if isinstance(directive, Apply):
                standing.apply_verdict(directive)
            elif isinstance(directive, Assign):
                try:
                    finished = yield from self._run(directive.assignment)
                except DivergedError:  # on all ranks at once: what is being written is of a good step
                    if self._saver is not None:
                        self._saver.flush()
                    raise
        self._farewell()
        self._shown.finish()
        heart.at("saves the last checkpoint")
        if self._saver is not None:
            self._saver.flush()
        if self._publisher is not None:
            heart.at("publishes the last step")
            self._publisher.flush()
        standing.report_unrecorded()
        self._membership.leaving(standing.next_step or 0)

    def _end_here(self) -> None:
        """Write what this rank has of the last checkpoint: the others are through."""
        self._save_the_end()
        if self._saver is not None:
            self._saver.flush()  # a leaving node may be the only one that has these shards

    def drop(self) -> None:
        """Leave the groups of the last generation, and give up its state: another session has it now."""
        self._close_current()
        self.standing.hold_stage(None)

    def _save_the_end(self) -> None:
        """Write this rank's part of the last checkpoint, also if it got the last step by a verdict."""
        stage, assignment, saver = self.standing.stage, self._assignment, self._saver
        if stage is None or assignment is None or saver is None or not self.standing.is_over(self.facts.steps):
            return
        if self._is_sound and saver.newest != (assignment.generation, stage.next_step):
            self.heartbeat.at("saves the last checkpoint")
            saver.flush()
            saver.save(stage, assignment, self._loop_state)

    # -- one generation ------------------------------------------------------------------------------------

    def _run(self, assignment: Assignment) -> Generator[Committed, None, bool]:
        """Form and run a generation; True (as the generator's value) if the loop is over."""
        try:
            generation = self._form(assignment)
            if generation is None:
                return False
            return (yield from self._step_through(generation))
        except GenerationEnded:
            self._shown.interrupt()
            self.standing.give_up(assignment.generation)
            self._close_current()
        except (LinkError, DamagedCheckpoint, DeviceFull) as error:
            self._shown.interrupt()
            fault = error.fault if isinstance(error, DeviceFull) else None
            self._membership.suspect(assignment.generation, str(error), fault, unreachable_of(error))
            if not (self._membership.survives or isinstance(error, DamagedCheckpoint)):
                raise
            self.heartbeat.at("waits for the manager's decision about a generation that broke")
            # A broken link is evidence, not a verdict: the manager hears all ranks, and then ends the generation.
            self.standing.suspend(assignment.generation)
            self._close_current()
        return False

    def _form(self, assignment: Assignment) -> Generation | None:
        """Form a generation: groups, state, stage; None for a spare."""
        standing, heart, plan = self.standing, self.heartbeat, assignment.plan
        inbox = Inbox(self._patience, who=who(assignment), rank=assignment.rank, ranks=range(plan.workers))
        standing.enter(assignment.generation, inbox, assignment.rank)
        heart.at(f"forms generation {assignment.generation}", WorkerPhase.FORMS)
        heart.inbox = inbox
        try:
            if plan.is_cut:
                self._cut_check()
            held, told = standing.available_states(assignment), LoopStateOffer.of(self._loop, standing.newest())
            if assignment.from_memory:
                told = LoopStateOffer.kept(assignment.next_step, standing.memory.loop(assignment.next_step))
            formed = make_generation(
                self._context, assignment, inbox, held, told, self._combines, heart.doing, heart.give_up
            )
        except BaseException:
            inbox.abort(GenerationEnded(assignment.generation))
            raise
        self._combines = formed.combines
        if not assignment.goes_on:
            standing.forget_votes()
        if self._saver is not None:
            self._saver.inherit(assignment)
        if self._publisher is not None:
            self._publisher.enter(assignment)
        heart.reporter.begin()  # before a beat can name the new generation, with times of the old one
        arrived = partial(standing.arrived, assignment.generation)
        if assignment.is_spare:
            standing.hold_stage(None, assignment)
            standing.send_through(formed.groups)
            send_rest(assignment, formed.groups, standing.kept, self._context.job.dtype, arrived)
            inbox.abort(GenerationEnded(assignment.generation))
            return None
        # The old stage stays until here, so a generation that breaks while it forms costs no state.
        stage = build_stage(self._context, assignment, formed.states)
        sums = KeptSums()
        standing.hold_stage(stage, assignment, sums)
        self._assignment = assignment
        if self._saver is not None:
            self._saver.begin(stage, assignment)
        send_rest(assignment, formed.groups, standing.kept, stage.job.dtype, arrived)
        generation = open_generation(self._context, assignment, inbox, formed.groups, stage, sums, standing.memory)
        if self._saver is not None and stage.sums.outlast:
            save_state = partial(self._save, generation, in_step=True)
            SumsSaver(self._saver, stage, assignment, self.facts, self._outliving(plan), save_state)
        if (streams := stage.job.traffic.streams) is not None:
            Pulse(streams, inbox, heart.hangs)
        self._close_current()
        # Waits had the longer bounds of forming until now.
        inbox.expect_step(plan.step_s)
        self.current, heart.runtime = generation, generation.runtime
        return generation

    def _step_through(self, generation: Generation) -> Generator[Committed, None, bool]:
        """Run steps until the run, the generation or the user's patience ends; True if the run is over."""
        stage, plan = generation.stage, generation.plan
        recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        owed_first = self._loop.owed if stage.next_step < self.facts.steps else ()
        if self._last is not None:
            owed_first = (self._last,)
        if owed_first:
            generation.wait_until_whole()  # the user's code may look at averages
        for owed in owed_first:
            yield from self._turn(generation, owed)
            generation.inbox.check()
        # A single worker has no vote to wait for, and stops before the next step.
        while stage.next_step < self.facts.steps and not (plan.workers == 1 and self._stopping):
            step = stage.next_step
            begin_s = time.monotonic()
            totals = self._one_step(generation, step)
            step_s = time.monotonic() - begin_s
            recent_s.append(step_s)
            generation.inbox.expect_step(plan.step_s, median(recent_s))
            # By the vote, so all ranks leave after the same step.
            is_over = totals.stop or stage.next_step == self.facts.steps
            if totals.checkpoint or is_over:
                self._saves_next = False
                self._save(generation, is_last=is_over)
            if self._publisher is not None:
                self._publish(generation, self._publisher, totals, is_last=is_over)
            yield from self._turn(generation, LoopStep(step, totals, step_s), regroup=totals.regroup and not is_over)
            if is_over:
                return True
            generation.inbox.check()
        self._save(generation, is_last=True)
        if self._publisher is not None and self._is_sound and plan.workers == 1 and not generation.is_as_it_began:
            self._publisher.flush()
            self._publisher.publish(generation)
        return True

    def _turn(self, generation: Generation, turn: LoopStep, *, regroup: bool = False) -> Iterator[Committed]:
        """Give a committed step to the loop, which runs the user's code until it asks for the next one."""
        assignment = generation.assignment
        self.heartbeat.at(f"runs the code of the training loop after step {turn.step}", WorkerPhase.LOOP)
        with self.standing.resting(regroup=regroup):
            is_main = self._may_be_main and assignment.rank == 0
            yield Committed(*turn[:2], assignment.generation, generation.plan, is_main, turn.step_s)
            self._loop.note_finished_turn(turn.step)
        self.heartbeat.is_settled = True

    def _one_step(self, generation: Generation, step: int) -> StepTotals:
        """Run a step; rank 0 reports it."""
        self.heartbeat.at(f"runs step {step}", WorkerPhase.STEPS)
        if self._shown.before(step):
            self.heartbeat.reporter.pass_over()
        # Of the state that the generation begins with: a loss in its first step then costs this step only.
        if generation.checkpoints is not None and step == generation.assignment.next_step:
            generation.checkpoints.begin_first_step(self._loop_state)
        vote, totals = run_step(
            generation,
            step,
            flags=partial(self._flags, generation, step),
            combines=self._combines is not False,
            check=partial(self._check, generation, step),
            remember=self.standing.remember,
            reporter=self.heartbeat.reporter,
            recent=self._shown.recent,
        )
        self._shown.after(step)
        if not overflowed(generation.stage.job.dtype, totals):  # nothing was applied, so no update was run
            self._combines = self._combines or generation.stage.local_exchange.used
            self._is_sound = is_finite(totals)
        if generation.assignment.rank == 0:
            self._membership.voted(vote)
        self._keep(generation, totals)
        return totals

    def _keep(self, generation: Generation, totals: StepTotals) -> None:
        """Make a memory checkpoint, if that was voted; where they are not made, older ones are worth nothing now."""
        if generation.checkpoints is None:
            self.standing.memory.keep_only(())
            return
        generation.checkpoints.follow_vote(totals, generation.stage.next_step, self._loop_state)

    def _loop_state(self) -> JSON:
        return self._loop.saved(self.standing.newest())

    def _check(self, generation: Generation, step: int, totals: StepTotals, vector: Sequence[float]) -> None:
        stage, layout, rank = generation.stage, layout_of(generation.stage), generation.assignment.rank
        check_measured(vector, self._loop.mark, layout=layout, plan=stage.plan)
        check_written(vector, self._loop.written, layout=layout, plan=stage.plan, rank=rank)
        if is_finite(totals) or not stage.job.stops_at_nan or overflowed(stage.job.dtype, totals):
            return  # the loss scale has an answer to what overflows
        survives = self._membership.survives
        if survives:
            stage.sums.distrust()
            # Once more, since a machine may have erred; if it happens again, it is the samples or one replica.
            if self._odd_step != step:
                self._odd_step = step
                raise LinkError(
                    f"step {step} has loss {totals.loss:.6g} and gradient norm {totals.grad_norm:.6g}. A machine may "
                    "have erred, so nothing of it is applied, and it runs again from the beginning"
                )
        if generation.plan.replicas > 1:
            generation.comparison.run(step)  # the memory of one may have changed
            if survives:
                check_replicas(totals, vector, layout=layout, plan=stage.plan, step=step, rank=rank)
        check_finite(totals, vector, layout=layout, source=self._context.source, plan=stage.plan, step=step)

    def _flags(self, generation: Generation, step: int) -> dict[str, float]:
        """Return what this rank says in the vote besides norms and losses."""
        flags = {"stop": float(self._stopping), "checkpoint": float(self._saves_next)}
        flags["measured"] = self._loop.mark
        flags["written"] = 0.0 if self._loop.written is None else self._loop.written.mark
        # Times rank + 1: from both sums the one rank that differs can be told (divergence.check_written).
        flags["written_by"] = flags["written"] * (generation.assignment.rank + 1)
        if self._publisher is not None:
            flags["publishing"] = float(self._publisher.is_writing)
        # After the last step no loss can undo anything, so no copy is asked for.
        if generation.checkpoints is not None and step + 1 < self.facts.steps:
            flags |= generation.checkpoints.flags()
        if generation.assignment.rank == 0:
            flags["compare"] = float(generation.comparison.is_due)
            flags["regroup"] = float(self.standing.is_flag_asked("regroup"))
            flags["stop"] = float(self._stopping or self.standing.is_flag_asked("stop"))
            due = self._saver is not None and self._saver.is_due(step, self._outliving(generation.plan))
            flags["checkpoint"] = float(self.standing.is_flag_asked("checkpoint") or due or self._saves_next)
        if generation.reports_lr:
            flags["lr"] = generation.stage.optimizer.lr or 0.0
        return flags

    def _outliving(self, plan: Plan) -> Plan | None:
        return plan if self._membership.survives else None

    def _save(self, generation: Generation, *, is_last: bool = False, in_step: bool = False) -> None:
        """Save the state as it is, unless that is done; the last save waits for the one before.

        ``in_step``: beside the training thread, which runs the next step.
        """
        stage, assignment, saver = generation.stage, generation.assignment, self._saver
        # A state from a checkpoint is saved already; a fresh one is saved only for sums that are saved during a step.
        is_known = generation.is_as_it_began and not (in_step and assignment.fresh)
        if saver is None or is_known or saver.newest == (assignment.generation, stage.next_step):
            return
        if not self._is_sound:
            say_once("no checkpoints are written while the loss or the gradients are not finite: the newest stays good")
        if not self._is_sound:
            return
        if not in_step:
            generation.wait_until_whole()
        if is_last:
            self.heartbeat.at("waits until the checkpoint before the last one is written", WorkerPhase.LOOP)
            saver.flush()
        with generation.phase("save", stage.next_step - 1) if not in_step else contextlib.nullcontext():
            saver.save(stage, assignment, self._loop_state)

    def _publish(self, generation: Generation, publisher: Publisher, totals: StepTotals, *, is_last: bool) -> None:
        """Publish the state as it is, if that is due; all ranks decide alike, by the vote."""
        if not self._is_sound or not (is_last or publisher.is_due(generation.stage.next_step - 1)):
            return
        if totals.publishing and not is_last:
            publisher.skip(generation)
            return
        generation.wait_until_whole()
        if is_last:
            self.heartbeat.at("waits until the publication before the last one is written", WorkerPhase.LOOP)
            publisher.flush()
        with generation.phase("publish", generation.stage.next_step - 1):
            publisher.publish(generation)

    def _farewell(self) -> None:
        """Wait for slower ranks, which still need the links for the last vote.

        The run is complete by then: a rank that is gone already is not missed.
        """
        generation = self.current
        if generation is None or generation.groups.grid is None or generation.plan.workers == 1:
            return
        self.heartbeat.at("waits for the other ranks to finish the last step")
        with contextlib.suppress(GenerationEnded, LinkError):
            generation.reducer.farewell()

    def _close_current(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = self.heartbeat.runtime = None
