"""A worker's life: generations, one after another, and the steps in between (DESIGN §5.2, §5.4).

The training thread runs everything here but ``_on_hold`` and ``_on_pause``, which the membership calls on its
own thread. Whoever finds the state at rest (between steps, or no part of a generation) may report it.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from varuna.checkpoint.shards import SectionState
from varuna.core.errors import FleetError, LinkError, WorkerError
from varuna.core.membership import Membership
from varuna.core.messages import Apply, Assign, Assignment, Beat, Finish, Held, Vote
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.vote import StepTotals, VoteLayout
from varuna.data.samples import SampleSource
from varuna.engine.forming import Formed, form_generation
from varuna.engine.groups import Groups
from varuna.engine.inbox import GenerationEnded, Inbox
from varuna.engine.links import Courier
from varuna.engine.reduce import Reducer, cast_vote
from varuna.engine.runtime import Runtime, WeightFunction
from varuna.engine.saving import Saver
from varuna.engine.stage import Job, Stage
from varuna.engine.threads import join_all
from varuna.observe.bus import span

_VOTES_KEPT = 256
"""Unrecorded vote results that a rank remembers: the manager may be away that many steps."""
_EXIT_BOUND_S = 5.0


@dataclass(frozen=True)
class Committed:
    """A committed step."""

    step: int
    totals: StepTotals
    generation: int
    plan: Plan
    is_main: bool


@dataclass
class Generation:
    """What this rank runs in one generation."""

    assignment: Assignment
    inbox: Inbox
    groups: Groups
    stage: Stage
    reducer: Reducer
    runtime: Runtime

    def close(self, *, exiting: bool = False) -> None:
        """Abandon it without waiting for anyone."""
        self.inbox.abort(GenerationEnded(self.assignment.generation))
        self.runtime.close()
        self.reducer.close()
        self.groups.abandon(exiting=exiting)


class Session:
    """Runs the steps of one job on one worker."""

    def __init__(
        self,
        job: Job,
        facts: JobFacts,
        membership: Membership,
        source: SampleSource,
        *,
        weight: WeightFunction | None,
        saver: Saver | None,
        initial: Callable[[Sequence[str], bool], Mapping[str, Tensor]],
        connect: Callable[[Assignment], Any],
        interface_host: str,
    ) -> None:
        """Prepare; nothing runs before ``steps``.

        Args:
            job: the captured job.
            facts: the same for planner and manager.
            membership: who decides on generations.
            source: reads samples.
            weight: the user's weight of a micro-batch, if any.
            saver: writes checkpoints, if there is a directory.
            initial: first values of named parameters, for a fresh start; checks the loss's weighing if told so.
            connect: opens the store of an assignment.
            interface_host: address that the data plane binds to.
        """
        self._job, self._facts, self._membership, self._source = job, facts, membership, source
        self._weight, self._saver, self._initial, self._connect = weight, saver, initial, connect
        self._interface_host = interface_host
        self._lock = threading.RLock()  # guards the state below against the membership's thread
        self._inbox: Inbox | None = None
        self._generation = -1
        self._ended = -1  # newest generation that the manager has ended
        self._reported = -1  # newest generation whose end was answered
        self._pause = -1  # generation whose next vote carries the regroup flag
        self._at_rest = True
        self._stage: Stage | None = None
        self._votes: deque[Vote] = deque(maxlen=_VOTES_KEPT)
        self._stopping = False
        self._shares: bool | None = None  # the steps call all_reduce_shared; None: nobody knows yet
        self._what = "starting"
        self.current: Generation | None = None

    # -- called by the trainer -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask all ranks to leave the loop: the flag goes into the next vote."""
        self._stopping = True

    def close(self) -> None:
        """Leave the last generation's groups, so that no thread of theirs outlives the process's main thread."""
        if self.current is not None:
            self.current.close(exiting=True)
        self._membership.close()
        join_all(_EXIT_BOUND_S)

    def steps(self) -> Iterator[Committed]:
        """Join, run every generation, leave; yields each committed step once per generation that ran it.

        Raises:
            FleetError: the manager refused this worker or ended the run.
            LinkError: a link broke and nobody can replace the generation.
        """
        self._membership.join(self._facts, beat=self._beat, on_hold=self._on_hold, on_pause=self._on_pause)
        finished = False
        while not finished:
            self._what = "waits for an assignment"
            directive = self._membership.next_directive()
            if isinstance(directive, Finish):
                if directive.reason:
                    raise FleetError(directive.reason)
                return
            if isinstance(directive, Apply):
                self._apply_verdict(directive)
            elif isinstance(directive, Assign):
                finished = yield from self._run(directive.assignment)
        self._farewell()
        self._what = "saves the last checkpoint"
        if self._saver is not None:
            self._saver.flush()
        self._report_unrecorded()
        self._membership.leaving(self._next_step or 0)

    # -- one generation ------------------------------------------------------------------------------------

    def _run(self, assignment: Assignment) -> Generator[Committed, None, bool]:
        """Form and run a generation; True (as the generator's value) if the loop is over."""
        try:
            generation = self._form(assignment)
            if generation is None:
                return False
            return (yield from self._step_through(generation))
        except GenerationEnded:
            self._give_up(assignment.generation)
        except LinkError as error:
            self._membership.suspect(assignment.generation, str(error))
            if not self._membership.survives:
                raise
            self._await_hold(assignment.generation)
        return False

    def _form(self, assignment: Assignment) -> Generation | None:
        """Groups, state, stage; None for a spare."""
        inbox = Inbox()
        if self._stage is not None:
            self._stage.roll_back()  # a new generation: the verdict on a tentative step was not COMMIT
        with self._lock:
            self._generation, self._inbox, self._at_rest = assignment.generation, inbox, False
            if self._ended >= assignment.generation:
                raise GenerationEnded(assignment.generation)
        self._what = f"forms generation {assignment.generation}"
        held, shares = self._held_states(), self._shares
        courier = Courier(inbox, f"forming generation {assignment.generation}")
        made: list[Groups] = []

        def work() -> Formed:
            store = self._connect(assignment)
            return form_generation(
                assignment,
                store=store,
                ended=lambda: inbox.ended,
                held=held,
                model=self._job.model,
                initial=lambda names: self._initial(names, assignment.rank == 0),
                shares=shares,
                interface_host=self._interface_host,
                made=made,
            )

        place = assignment.plan.place_of(assignment.rank)
        with span(
            "form", rank=assignment.rank, stage=place.stage, step=assignment.next_step, index=assignment.generation
        ):
            courier.submit("formed", work)
            courier.close()
            try:
                formed: Formed = inbox.take("formed", lambda: f"the members of generation {assignment.generation}")
            except BaseException:
                for groups in made:  # a courier that is stuck behind a frozen peer comes free
                    groups.abandon()
                raise
        self._shares = formed.shares
        if assignment.fresh or assignment.checkpoint is not None:
            self._votes.clear()
        with self._lock:
            if assignment.is_spare:
                self._stage, self._at_rest = None, True
                formed.groups.abandon()
                return None
            self._stage = Stage(self._job, assignment.plan, place.stage, formed.states, assignment.next_step)
        reducer = Reducer(self._stage, assignment.plan, assignment.rank, formed.groups, inbox)
        runtime = Runtime(
            self._stage,
            assignment.plan,
            assignment.rank,
            groups=formed.groups,
            inbox=inbox,
            reducer=reducer,
            source=self._source,
            weight=self._weight,
            steps=self._facts.steps,
        )
        self._close_current()
        self.current = Generation(assignment, inbox, formed.groups, self._stage, reducer, runtime)
        return self.current

    def _step_through(self, generation: Generation) -> Generator[Committed, None, bool]:
        """Run steps until the run, the generation or the user's patience ends; True if the run is over."""
        stage, assignment = generation.stage, generation.assignment
        alone = assignment.plan.workers == 1
        while stage.next_step < self._facts.steps and not (alone and self._stopping):
            step = stage.next_step
            totals = self._one_step(generation, step)
            is_over = totals.stop or stage.next_step == self._facts.steps
            if totals.checkpoint or is_over:
                self._save(generation, is_last=is_over)
            with self._resting(regroup=totals.regroup and not is_over):
                yield Committed(step, totals, assignment.generation, assignment.plan, assignment.rank == 0)
            if is_over:
                return True
            generation.inbox.check()
        self._save(generation, is_last=True)
        return True

    def _save(self, generation: Generation, *, is_last: bool) -> None:
        """Save the state as it is, unless that is done; the last save waits for the one before."""
        stage, assignment = generation.stage, generation.assignment
        trained = stage.next_step > assignment.next_step or not (assignment.fresh or assignment.checkpoint is not None)
        if self._saver is None or not trained or self._saver.newest == (assignment.generation, stage.next_step):
            return
        if is_last:
            self._saver.flush()
        with self._span("save", generation, stage.next_step - 1):
            self._saver.save(stage, assignment.plan.place_of(assignment.rank).replica, assignment.generation)

    def _one_step(self, generation: Generation, step: int) -> StepTotals:
        """F, R, B, reduce, vote, apply. Nothing may interrupt between the vote's result and the apply."""
        stage, assignment = generation.stage, generation.assignment
        plan, rank = assignment.plan, assignment.rank
        begin_s = time.monotonic()
        self._what = f"runs step {step}"
        generation.runtime.run(step)
        with self._span("reduce", generation, step):
            generation.reducer.finish(step)
        layout = self._layout(plan)
        vector = cast_vote(
            layout, stage, plan.place_of(rank).replica, generation.runtime.losses, self._flags(generation, step)
        )
        if plan.stages > 1 and self._shares is not False:
            with self._span("share", generation, step):
                self._apply_tentatively(generation, step, vector)
        with self._span("vote", generation, step):
            summed = generation.reducer.vote(step, vector)
        vote = Vote(generation=assignment.generation, step=step, vector=summed, wall_s=time.monotonic() - begin_s)
        with self._lock:
            self._votes.append(vote)
        totals = layout.read(summed)
        with self._span("apply", generation, step):
            stage.apply(step, self._scale(totals))
        self._shares = self._shares or stage.witness.used
        if rank == 0:
            self._membership.voted(vote)
        return totals

    def _apply_tentatively(self, generation: Generation, step: int, vector: Tensor) -> None:
        """Apply before the vote, for a job whose steps talk across stages (or may: the first one finds out)."""
        totals = self._layout(generation.assignment.plan).read(generation.reducer.tally(step, vector))
        exchange = generation.reducer.exchange(step)
        generation.stage.apply_tentatively(self._scale(totals), exchange)
        generation.stage.witness.used |= exchange.used

    def _flags(self, generation: Generation, step: int) -> dict[str, float]:
        """What this rank says in the vote besides norms and losses."""
        assignment, stage = generation.assignment, generation.stage
        flags = {"stop": float(self._stopping)}
        if assignment.rank == 0:
            flags["regroup"] = float(self._pause == assignment.generation)
            flags["checkpoint"] = float(self._saver is not None and self._saver.is_due(step))
        trained = (s.index for s in self._job.model.sections if not self._job.model.trainable.isdisjoint(s.parameters))
        speaker = assignment.plan.rank_of(0, assignment.plan.stage_of(next(trained, 0)))
        if assignment.rank == speaker:
            flags["lr"] = stage.optimizer.lr or 0.0
        return flags

    def _layout(self, plan: Plan) -> VoteLayout:
        return VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches, metrics=self._facts.metrics)

    def _scale(self, totals: StepTotals) -> float:
        """Factor from the weighted sum of gradients to the clipped mean; 0 where no target was counted."""
        if not totals.weight:
            return 0.0
        limit = self._job.clip_grad_norm
        clip = 1.0 if limit is None else min(1.0, limit / (totals.grad_norm + 1e-6))
        return clip / totals.weight

    def _farewell(self) -> None:
        """Nobody closes a link that a slower rank still needs for the last vote.

        The run is complete by then: whoever is gone already is not missed.
        """
        generation = self.current
        if generation is None or generation.groups.vote is None or generation.assignment.plan.workers == 1:
            return
        self._what = "waits for the other ranks to finish the last step"
        with contextlib.suppress(GenerationEnded, LinkError):
            generation.reducer.farewell()

    # -- ends of generations -------------------------------------------------------------------------------

    @contextmanager
    def _resting(self, *, regroup: bool) -> Iterator[None]:
        """The user's code runs: the state is at rest, and a hold is answered at once."""
        with self._lock:
            self._what = "runs the code of the training loop"
            self._at_rest = True
            if regroup or self._ended >= self._generation:
                self._end_generation()
        yield
        with self._lock:
            self._at_rest = False

    def _on_hold(self, generation: int) -> None:
        with self._lock:
            self._ended = max(self._ended, generation)
            if generation < self._generation and self._generation >= 0:
                return
            if self._at_rest:
                self._end_generation(generation)
            elif self._inbox is not None:
                self._inbox.abort(GenerationEnded(generation))

    def _on_pause(self, generation: int) -> None:
        self._pause = generation

    def _end_generation(self, generation: int | None = None) -> None:
        """End the generation here and report, once; the lock is held."""
        ended = self._generation if generation is None else generation
        if self._inbox is not None:
            self._inbox.abort(GenerationEnded(ended))
        if self._reported < ended:
            self._reported = ended
            self._report(ended)

    def _give_up(self, generation: int) -> None:
        """The training thread has stopped: leave the groups and report, unless that is done."""
        with self._lock:
            self._at_rest = True
            self._end_generation(max(generation, self._ended))
        self._close_current()

    def _await_hold(self, generation: int) -> None:
        """A link broke: the manager finds out who is gone, and ends the generation."""
        self._what = "waits for the manager's word on a broken link"
        with self._lock:
            self._at_rest = True
            if self._ended >= generation:
                self._end_generation(generation)
        self._close_current()

    def _close_current(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None

    def _report(self, generation: int) -> None:
        sections = tuple(self._stage.sections) if self._stage is not None else ()
        recorded = self._membership.recorded_step
        unrecorded = [vote for vote in self._votes if vote.step > recorded]
        votes = tuple(unrecorded or list(self._votes)[-1:])  # the newest always: it may decide the verdict
        self._membership.held(Held(generation=generation, next_step=self._next_step, sections=sections, votes=votes))

    def _report_unrecorded(self) -> None:
        """Rank 0 may have died before it reported the last steps: say again what nobody has written down."""
        for vote in self._votes:
            if vote.step > self._membership.recorded_step:
                self._membership.voted(vote)

    def _apply_verdict(self, directive: Apply) -> None:
        """The verdict is COMMIT: some survivor held the vote's result, and here the reduced gradients wait."""
        with self._lock:
            stage = self._stage
            if stage is None:
                raise WorkerError("was told to apply a step, but holds no state")
            self._votes.append(directive.vote)
            stage.apply(directive.vote.step, self._scale(self._layout(stage.plan).read(directive.vote.vector)))
            self._report(directive.generation)

    # -- small facts ---------------------------------------------------------------------------------------

    @property
    def _next_step(self) -> int | None:
        return self._stage.next_step if self._stage is not None else None

    def _held_states(self) -> dict[int, SectionState]:
        stage = self._stage
        return {} if stage is None else {section: stage.state_of(section) for section in stage.sections}

    def _beat(self) -> Beat:
        current = self.current
        activity = self._what
        if current is not None and activity.startswith("runs step"):
            activity = current.runtime.activity
        return Beat(generation=self._generation, step=self._next_step or 0, activity=activity)

    @staticmethod
    @contextmanager
    def _span(name: str, generation: Generation, step: int) -> Iterator[None]:
        rank = generation.assignment.rank
        with span(name, rank=rank, stage=generation.stage.index, step=step):
            yield
