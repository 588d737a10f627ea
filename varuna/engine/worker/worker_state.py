"""A worker's state: its generation, the sections that it holds, and what it reports when a generation ends.

The training thread runs everything here but ``on_hold`` and ``on_flag``, which the membership calls on its own
thread. Either reports the state, if it finds it at rest: between steps, or no part of a generation.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import WorkerError
from varuna.core.membership import Membership
from varuna.core.messages import Apply, Assignment, Flag, StopReport, Vote
from varuna.core.sums import joined
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.spans import span
from varuna.engine.copies.following import sent_later
from varuna.engine.copies.keeping import KeptSums
from varuna.engine.copies.memory_checkpoints import MemoryCheckpoints, has_room
from varuna.engine.links.groups import Groups
from varuna.engine.pipeline.apply import apply_vote, layout_of
from varuna.engine.stage.load_state import COPIED_SUMS, STATISTICS, SUMS
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.loop_state import LoopStep

_VOTES_KEPT = 256
"""Unrecorded vote results that a rank remembers: the manager may be away that many steps."""


class WorkerState:
    """The state that this worker holds, guarded against the membership's thread."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._lock = threading.RLock()
        self._inbox: Inbox | None = None
        self._ended = -1  # newest generation that the manager has ended
        self._reported = -1  # newest generation whose end was answered
        self._asked: dict[Flag, int] = {}  # by flag: the generation whose next vote carries it
        self._at_rest = True
        self._rank = -1
        self._votes: deque[Vote] = deque(maxlen=_VOTES_KEPT)
        self.generation = -1
        self.stage: Stage | None = None
        self.memory = MemoryCheckpoints()
        self._copies_of_sums = KeptSums()  # of another rank
        self._serving: Groups | None = None
        self._kept: dict[int, SectionState] = {}
        self._kept_step: int | None = None

    @property
    def next_step(self) -> int | None:
        """Steps that the state contains; None without state."""
        return self.stage.next_step if self.stage is not None else self._kept_step

    @property
    def is_whole(self) -> bool:
        """Whether no optimizer state is on its way to it."""
        return self.stage is None or not self.stage.sharding.missing

    @property
    def kept(self) -> Mapping[int, SectionState]:
        """By section, state from before this generation that it may still be asked for."""
        return self._kept

    def states(self) -> dict[int, SectionState]:
        """Return the state of every section held, as references; of lent ones without optimizer state, unless outdated.

        With sums of gradients, if a step was broken off, to which nothing is added any more. And the copies of another
        rank's state and sums, if they are complete and of the same step.
        """
        stage = self.stage
        if stage is None:
            return self._copies()
        states = {section: stage.state_of(section) for section in (*stage.sharding.whole, *stage.sharding.up_to_date)}
        for each in stage.sums.seal():
            if each.section in states:
                states[each.section].tensors[SUMS] = stage.buckets[each.section].flat
                states[each.section].scalars[SUMS] = [list(span) for span in each.micro_batches]
                statistics = stage.statistics.as_bytes(each.section, each.micro_batches)
                if statistics is not None:
                    states[each.section].tensors[STATISTICS] = statistics
        # Its own state wins over a copy of the same section.
        states = {**self._copies(), **states}
        for section, copied in self._copies_of_sums.sealed(stage.next_step).items():
            state = states.setdefault(section, SectionState(section, {}))
            state.tensors[COPIED_SUMS] = copied.values
            state.scalars[COPIED_SUMS] = [list(span) for span in copied.held.copies[0].micro_batches]
        return states

    def available_states(self, assignment: Assignment) -> dict[int, SectionState]:
        """Return what ``states`` does, or a memory checkpoint: that stays, so what this rank will train is a copy."""
        states = self.memory.states(assignment.next_step) if assignment.from_memory else self.states()
        own = () if self.stage is None or assignment.from_memory else self.stage.sections
        trained = range(0) if assignment.is_spare else assignment.plan.sections_at(assignment.rank)
        come = {each.section for each in assignment.transfers if each.target_rank == assignment.rank}
        kept = self.memory.states(assignment.next_step).keys() - own
        # Training would change them in place, and another rank's loss may still need them.
        for section in kept.intersection(trained) - come:
            state = states[section]
            copied = {name: value.clone() for name, value in state.tensors.items()}
            states[section] = SectionState(section, copied, dict(state.scalars))
        return states

    # -- into a generation -----------------------------------------------------------------------------------

    def enter(self, generation: int, inbox: Inbox, rank: int) -> None:
        """Note that the training thread begins to form a generation, with this rank.

        Raises:
            GenerationEnded: the manager has ended it already.
        """
        if self.stage is not None:
            self.stage.roll_back()  # a new generation: the verdict on a tentative step was not COMMIT
        with self._lock:
            self.send_through(None)
            self.generation, self._inbox, self._rank, self._at_rest = generation, inbox, rank, False
            # A hold may come before this thread gets here: the lock orders the two.
            if self._ended >= generation:
                raise GenerationEnded(generation)

    def forget_votes(self) -> None:
        """Forget votes, since their steps will be run again: the run begins anew, or from a checkpoint."""
        self._votes.clear()

    def hold_stage(
        self, stage: Stage | None, assignment: Assignment | None = None, sums: KeptSums | None = None
    ) -> None:
        """Hold this state from now on; until the first update, which waits for all ranks, also what others still need.

        Args:
            stage: None: a spare, which is at rest.
            assignment: that it is for; None: nothing of what was here is worth anything.
            sums: of another rank, copies of which it will get.
        """
        with self._lock:
            step, moves = self.next_step, [] if assignment is None else sent_later(assignment)
            whole = self._whole() if moves else {}
            self._kept = {each.section: whole[each.section].at_host() for each in moves}  # a GPU has no room for both
            self._kept_step = step if self._kept else None
            self.memory.keep_only(() if assignment is None else assignment.memory_steps)
            self.stage, self._copies_of_sums = stage, sums or KeptSums()
            self._at_rest = stage is None
            if self._at_rest and self._ended >= self.generation:  # it was ended in this moment, by who saw no rest
                self._end(self.generation)

    def is_flag_asked(self, flag: Flag) -> bool:
        """Return whether the manager wants ``flag`` in the next vote; a checkpoint is asked for once."""
        with self._lock:
            is_asked = self._asked.get(flag) == self.generation
            if is_asked and flag == "checkpoint":
                del self._asked[flag]
            return is_asked

    def send_through(self, groups: Groups | None, *, exiting: bool = False) -> None:
        """Send through these groups what others still need of a spare's, and through no others any more."""
        with self._lock:
            if self._serving is not None:
                self._serving.abandon(exiting=exiting)
            self._serving = groups

    def drop_before(self, generation: int) -> None:
        """Keep nothing from before a generation any more, if it is the newest: others have it."""
        with self._lock:
            if generation == self.generation:
                self._kept, self._kept_step = {}, None
                self.send_through(None)

    def arrived(self, generation: int) -> None:
        """Note that others have what they needed of this rank. It stays until the first update, if there is room."""
        kept_bytes = sum(value.nbytes for state in self._kept.values() for value in state.tensors.values())
        if self.stage is None or not has_room(kept_bytes):
            self.drop_before(generation)

    def _whole(self) -> dict[int, SectionState]:
        """Return all state that is complete, by section, as references."""
        stage = self.stage
        own = {} if stage is None else {section: stage.state_of(section) for section in stage.sharding.whole}
        return self._copies() | own

    def _copies(self) -> dict[int, SectionState]:
        """Return state of the same step that is not this rank's to train, by section, as references."""
        kept = self._kept if self._kept_step == self.next_step else {}
        own = () if self.stage is None else self.stage.sections
        in_memory = {each: state for each, state in self.memory.states(self.next_step).items() if each not in own}
        return in_memory | kept

    # -- votes -----------------------------------------------------------------------------------------------

    def remember(self, vote: Vote) -> None:
        """Keep the result of a vote for survivors that lack it, and earlier ones that the manager has not on disk."""
        with self._lock:
            self.drop_before(self.generation)  # all ranks have voted, so all are whole
            if self._votes:
                # A vote that followed proves that all have applied the one before: its vector is not needed any more.
                self._votes[-1] = self._votes[-1].shortened()
            recorded = self._membership.recorded_step
            while self._votes and self._votes[0].step <= recorded:
                self._votes.popleft()
            self._votes.append(vote)

    def report_unrecorded(self) -> None:
        """Report votes again that the manager has not on disk: rank 0 may have died before it did."""
        for vote in self._votes:
            if vote.step > self._membership.recorded_step:
                self._membership.voted(vote)

    def newest(self) -> LoopStep | None:
        """Return the newest step that the state contains, by its vote; None if the vote is not known here."""
        stage, newest = self.stage, self._votes[-1] if self._votes else None
        if stage is None or newest is None or newest.step != stage.next_step - 1:
            return None
        return LoopStep(newest.step, layout_of(stage).read(newest.vector), newest.wall_s)

    def is_over(self, steps: int) -> bool:
        """Return whether the newest step of the state ended the training: the last of ``steps``, or by its flag."""
        newest = self.newest()
        return newest is not None and (newest.step + 1 == steps or newest.totals.stop)

    def apply_verdict(self, directive: Apply) -> None:
        """Apply a COMMIT: some survivor held the vote's result, and the reduced gradients are still here."""
        with self._lock:
            if self.stage is None:
                raise WorkerError("was told to apply a step, but holds no state")
            self.remember(directive.vote)
            apply_vote(self.stage, directive.vote.step, directive.vote.vector)
            self._report(directive.generation)

    # -- out of a generation ---------------------------------------------------------------------------------

    @contextmanager
    def resting(self, *, regroup: bool) -> Iterator[None]:
        """Let the user's code run in this block: the state is at rest, and a hold is answered at once.

        A planned regroup waits for that code, which may evaluate, unless the manager loses patience.
        """
        with self._lock:
            self._at_rest = True
            if self._ended >= self.generation:
                self._end(self.generation)
        yield
        with self._lock:
            if regroup:
                self._end(self.generation)
            self._at_rest = False

    def on_hold(self, generation: int) -> None:
        """End a generation, since the manager has."""
        with self._span("hold", generation), self._lock:
            self._ended = max(self._ended, generation)
            # Of an older generation, which this worker has left: there is nothing to stop.
            if generation < self.generation and self.generation >= 0:
                return
            if self._at_rest:
                self._end(generation)
            # The training thread works: it finds the end at its next wait, and reports then (``give_up``).
            elif self._inbox is not None:
                self._inbox.abort(GenerationEnded(generation))

    def on_flag(self, generation: int, flag: Flag) -> None:
        """Put the manager's flag into the next vote, so that all ranks act after the same step."""
        with self._lock:
            self._asked[flag] = generation

    def give_up(self, generation: int) -> None:
        """Report that the training thread has stopped, unless that is done."""
        with self._lock:
            self._at_rest = True
            self._end(max(generation, self._ended))

    def suspend(self, generation: int) -> None:
        """Stop after a broken link; the manager finds out who is gone, and ends the generation."""
        with self._lock:
            self._at_rest = True
            if self._ended >= generation:
                self._end(generation)

    def _end(self, generation: int) -> None:
        """End a generation here and report, once; the lock is held."""
        if self._inbox is not None:
            self._inbox.abort(GenerationEnded(generation))
        # Both threads may find the end; the manager gets one report of each generation, but for verdicts.
        if self._reported < generation:
            self._reported = generation
            self._report(generation)

    def _report(self, generation: int) -> None:
        sharding = self.stage.sharding if self.stage is not None else None
        kept = self._copies_of_sums.sealed(self.next_step)
        own = self.stage.held_sums() if self.stage is not None else None
        recorded = self._membership.recorded_step
        unrecorded = [vote for vote in self._votes if vote.step > recorded]
        votes = tuple(unrecorded or list(self._votes)[-1:])  # the newest always: it may decide the verdict
        held = StopReport(
            generation=generation,
            next_step=self.next_step,
            sections=sharding.whole if sharding is not None else (),
            lent=sharding.up_to_date if sharding is not None else (),
            votes=votes,
            sums=joined([*([own] if own is not None else []), *(each.held for each in kept.values())]),
            wrong_sums=self.stage is not None and self.stage.sums.is_wrong,
            copies=tuple(sorted(self._copies())),
            checkpoints=self.memory.held(),
        )
        with self._span("held", generation):
            self._membership.held(held)

    def _span(self, name: str, generation: int) -> AbstractContextManager[None]:
        stage = self.stage
        where = {"stage": -1, "step": -1} if stage is None else {"stage": stage.index, "step": stage.next_step}
        return span(name, rank=self._rank, **where, index=generation)
