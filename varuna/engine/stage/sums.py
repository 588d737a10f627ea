"""Contents of a stage's sums of gradients: micro-batches, and whether a new generation may resume from them.

    begin                    reduced, overwriting           update, or a vote that shows them wrong
      |                               |                                 |
      v                               v                                 v
    open: micro-batches of    ---> full: all of the ------------->    void: nothing
    this replica, each whole       step's micro-batches
      |  ^                            |                                 |
      v  | adding: one is in it       +------- seal: reported to the manager as HeldSums; from then on
    void until it is whole                     every write of the old generation raises

Of each section the sums are *open* (of this replica's micro-batches), *full* (reduced over the replicas: of all), or
*void*. They change from open to full at once: what is reduced is a copy. When the worker tells what it holds, they are
sealed: no thread of the generation that ended can change them any more. On a GPU they are in the device's memory, and
what is said of them holds for reads that the device runs after what it was given so far.

Micro-batches have their numbers j in the global batch, from 0; sections their numbers in the model.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.core.sums import (
    IndexSet,
    MicroBatchLoss,
    SectionSum,
    StepAssignment,
    count,
    numbers_of,
    spans_of,
    square_sum,
)
from varuna.engine.device.host_copies import CPU_COPIES, DONE, HostCopies, Ready
from varuna.engine.stage.gradient_bucket import Bucket
from varuna.engine.stage.losses import Losses

_LOOK_S = 0.2
"""Seconds between looks whether a step is over whose sums are waited for."""


class ResumedStep(NamedTuple):
    """A step that another generation has begun."""

    rest: StepAssignment
    """this rank's part of it"""
    flats: Mapping[int, Tensor]
    """by section: the sums of gradients that this rank resumes from, whose memory is taken over"""
    statistics: Mapping[int, Tensor] = {}
    """by section that updates buffers: statistics of the micro-batches in those sums, as bytes, in the same order"""


class SumWanted:
    """A section's sums that another thread wants a copy of, as they are between two actions."""

    def __init__(self, section: int, room: Tensor) -> None:
        """Begin without them; they go into ``room``."""
        self.section, self.room = section, room
        self.micro_batches: IndexSet = ()
        """micro-batches that are in them; none: they are void"""
        self.taken = threading.Event()
        self.copied: Ready = DONE
        """until then the room may not be read, once they are taken"""


class Sums:
    """The sums of one stage in one generation.

    The training thread adds, another one reduces; the thread that reports what the worker holds seals them.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        plan: Plan,
        begun: ResumedStep | None,
        *,
        outlast: bool,
        copies: HostCopies = CPU_COPIES,
    ) -> None:
        """Begin with nothing in them, or with what another generation has left in the buckets.

        Args:
            buckets: by section.
            plan: of the micro-batches.
            begun: the first step, if another generation has begun it: nothing is added that some replica has.
            outlast: the next generation may go on from them.
            copies: between them and host memory.
        """
        self._buckets, self.outlast, self._copies = buckets, outlast, copies
        self.goes_on = begun is not None and bool(begun.rest.taken)
        """whether sums of another generation are in those of this step"""
        self._all: IndexSet = ((0, plan.micro_batches),)
        self._lock = threading.Lock()
        self._sealed, self._is_void, self._inherited = False, False, begun is not None
        self.is_wrong = False
        """a vote has shown that the step's sums, and so the copies of them, are not to be trusted"""
        self._added: dict[int, set[int]] = {}
        self._open: dict[int, int] = {}  # by section: micro-batches of which a part is in the sums
        self._reduced: set[int] = set()
        self._overwritten: set[int] = set()
        self._leaving: dict[int, Ready] = {}  # by section: until then its sums are being copied
        self._kept: dict[int, frozenset[int]] = {}
        self._wishes = threading.Lock()  # its own: the reduction holds the other one while it copies
        self._wanted: tuple[SumWanted, ...] = ()
        self._discard()
        if begun is not None:
            for each in begun.rest.taken:
                if each.section in begun.flats:
                    self._added[each.section].update(numbers_of(each.micro_batches))
            # Of every replica, not of this one: a micro-batch in any sum must not be added again (core.sums).
            self._kept = {each.section: frozenset(numbers_of(each.micro_batches)) for each in begun.rest.kept}

    def begin(self) -> None:
        """Begin a step: with zeros, or in the first step with what was inherited."""
        # The first ``begin`` of a generation that resumes a step must keep what is in the buckets.
        if not self._inherited:
            self._kept, self.goes_on = {}, False
            self._discard()
            self.add_after_copies()
            for bucket in self._buckets.values():
                bucket.flat.zero_()
        self._inherited = False

    def _discard(self) -> None:
        """Note that nothing is in them."""
        self._added = {section: set() for section in self._buckets}
        self._open = dict.fromkeys(self._buckets, 0)
        self._reduced, self._overwritten, self._is_void, self.is_wrong = set(), set(), False, False

    def discard(self) -> None:
        """Let no generation resume from them, and let what is computed from now on write there after copies of them."""
        with self._lock:
            self._is_void = True
        self.add_after_copies()

    def distrust(self) -> None:
        """Note that the ranks' sums of this step are wrong: no generation resumes from these, nor from a copy."""
        with self._lock:
            self._is_void = self.is_wrong = True

    # -- by the training thread --------------------------------------------------------------------------

    def add_after_copies(self) -> None:
        """Let what is computed from now on change them all: it runs after the copies of them that were begun."""
        for section in list(self._leaving):
            self._settle(section)

    def _settle(self, section: int) -> None:
        self._copies.compute_after(self._leaving.pop(section, DONE))

    def has(self, section: int, micro_batch: int) -> bool:
        """Return whether some replica's sums have a micro-batch since before: its gradients are dropped."""
        return micro_batch in self._kept.get(section, ())

    @contextmanager
    def adding(self, section: int, micro_batch: int, *, rest: bool = False, whole: bool = True) -> Iterator[None]:
        """Add a micro-batch's gradients to the sums in this block, or drop them if some replica has them.

        Args:
            section: whose sums.
            micro_batch: its global number.
            rest: some of it has been added before.
            whole: nothing of it is missing afterwards.
        """
        if self.has(section, micro_batch):
            # It runs all the same: stages before this one, or other sections, lack it and need its gradients.
            with self._buckets[section].dropping():
                yield
        else:
            # Between I and W half of it is in the sums: then they are void, neither with it nor without.
            self._open[section] += not rest
            # A copy may still be reading them on another stream.
            self._settle(section)
            yield
            if whole:
                self._open[section] -= 1
                self._added[section].add(micro_batch)
        for wanted in self._wanted:
            # After a whole action only, and before the next: so a copy is of whole micro-batches.
            if wanted.section == section:
                self.forgo(wanted)
                self._copy(wanted)
                self._leaving[section] = wanted.copied
                wanted.taken.set()

    # -- by any thread -----------------------------------------------------------------------------------

    def request_copy(self, wanted: SumWanted) -> None:
        """Let the training thread copy a section's sums, once it has added to them."""
        with self._wishes:
            self._wanted = (*self._wanted, wanted)

    def room(self) -> Tensor:
        """Allocate host memory for the sums of any section, fp32."""
        return self._copies.arena(4 * max(self.sizes().values(), default=0)).view(torch.float32)

    def copy_section(self, section: int, room: Tensor, lasts: Callable[[], bool]) -> SumWanted | None:
        """Copy a section's sums into ``room`` after the next micro-batch; None: the step is over before that."""
        wanted = SumWanted(section, room)
        self.request_copy(wanted)
        while not wanted.taken.wait(_LOOK_S):
            if not lasts():
                self.forgo(wanted)
                return None
        wanted.copied.wait()
        return wanted

    def last(self, section: int, room: Tensor) -> SumWanted:
        """Copy a section's sums as they are into ``room``; nothing may be added to them meanwhile."""
        wanted = SumWanted(section, room)
        self._copy(wanted)
        wanted.copied.wait()
        return wanted

    def _copy(self, wanted: SumWanted) -> None:
        wanted.micro_batches = self._held(wanted.section)
        if wanted.micro_batches:
            wanted.copied = self._copies.copy_to_host([(self._buckets[wanted.section].flat, wanted.room)])

    def release_waiting(self) -> None:
        """Give none to threads that wait for sums: the step adds nothing more."""
        for wanted in self._wanted:
            self.forgo(wanted)
            wanted.taken.set()

    def forgo(self, wanted: SumWanted) -> None:
        """Drop a wish for a copy: its thread waits no longer, or has it."""
        with self._wishes:
            self._wanted = tuple(each for each in self._wanted if each is not wanted)

    @property
    def are_wanted(self) -> bool:
        """Whether a thread waits for a copy of some of them."""
        return bool(self._wanted)

    def sizes(self) -> dict[int, int]:
        """Return how many numbers are in the sums of each section that has gradients."""
        return {section: bucket.size for section, bucket in self._buckets.items() if bucket.size}

    def reduced(self, section: int, total: Tensor) -> None:
        """Take the sum over all replicas, in host memory, in place of this one's.

        Raises:
            RuntimeError: they are sealed.
        """
        with self.changing():
            # From open to full under one lock: a seal in between would report sums that are half overwritten.
            self._copies.overwrite([(self._buckets[section].flat, total)]).wait()
            self._reduced.add(section)

    @contextmanager
    def overwriting(self, section: int) -> Iterator[None]:
        """Make the sum over all replicas in place in this block: until its end there are none.

        Raises:
            RuntimeError: they are sealed.
        """
        with self.changing():
            # Not under the lock for all of it: an all-reduce waits for peers, and a seal must not.
            self._overwritten.add(section)
        self._leaving.get(section, DONE).wait()
        yield
        with self.changing():
            self._overwritten.discard(section)
            self._reduced.add(section)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let a thread of the generation write to sums, or note what comes of them, in this block.

        Raises:
            RuntimeError: they are sealed.
        """
        with self._lock:
            if self._sealed:
                raise RuntimeError("the generation has ended, and its sums may not be changed")
            yield

    def counted(self, section: int, replica: int) -> tuple[float, float]:
        """Count the micro-batches that this replica has added to a section's sums; also return their sum of (j + 1)^2.

        Sections without gradients are counted by the first replica.
        """
        untrained: IndexSet = self._all if replica == 0 else ()
        found = untrained if section in self.without else spans_of(self._added[section])
        return float(count(found)), float(square_sum(found))

    @property
    def without(self) -> tuple[int, ...]:
        """Sections that have no gradients."""
        return tuple(section for section, bucket in self._buckets.items() if not bucket.size)

    def seal(self) -> tuple[SectionSum, ...]:
        """Let nothing change them any more; return what a generation may resume from, by section, if anything."""
        with self._lock:
            self._sealed = True
            held = {section: self._held(section) for section in self._buckets} if self.outlast else {}
            return tuple(SectionSum(section=section, micro_batches=spans) for section, spans in held.items() if spans)

    def _held(self, section: int) -> IndexSet:
        is_none = self._is_void or self._open[section] or section in self._overwritten
        if is_none or not self._buckets[section].size:
            return ()
        return self._all if section in self._reduced else spans_of(self._added[section])


class TiedTotals:
    """The totals of one stage, which its optimizer gets in place of the sums of its first section that uses each.

    If sums may outlast a loss, a total is kept beside them until the update: until then another worker can resume from
    the sum of its own section.
    """

    def __init__(self, sums: Sums) -> None:
        """Begin without any; ``sums`` are the stage's."""
        self.views: dict[str, Tensor] = {}
        """by parameter, where the optimizer finds its gradient: in a section's bucket"""
        self._sums, self._apart = sums, dict[str, Tensor]()

    def add_total(self, name: str, total: Tensor) -> None:
        """Take a total, and its memory.

        Raises:
            RuntimeError: the generation has ended.
        """
        with self._sums.changing():
            if self._sums.outlast:
                self._apart[name] = total
            else:
                self.views[name].copy_(total)

    @property
    def apart(self) -> Mapping[str, Tensor]:
        """Totals by parameter that are not among the sums."""
        return self._apart

    @property
    def known(self) -> Mapping[str, Tensor]:
        """Totals by parameter, once all are known."""
        return {**self.views, **self._apart}

    def place_totals(self) -> None:
        """Put them where the optimizer finds them; no generation resumes from the sums any more."""
        for name, total in self._apart.items():
            self.views[name].copy_(total)
        self._apart = {}


class StepShare:
    """The work of one rank in one generation: its share of every step, but of the first what ``begun`` has left."""

    def __init__(
        self,
        plan: Plan,
        replica: int,
        first_step: int,
        begun: ResumedStep | None,
        copies: HostCopies = CPU_COPIES,
    ) -> None:
        self._share, self._replica, self._first_step = plan.micro_batches_of(replica), replica, first_step
        self._rest = None if begun is None else numbers_of(begun.rest.work)
        self._told: Sequence[MicroBatchLoss] = () if begun is None else begun.rest.losses
        self._shared: Sequence[Sequence[float]] = ()
        self._copies = copies
        self.losses = Losses(0)
        """those that this rank votes on, by global micro-batch; last stage only"""

    def of(self, step: int) -> Sequence[int]:
        """Return the micro-batches of a step that this rank's replica runs."""
        return self._rest if self._rest is not None and step == self._first_step else self._share

    def end(self) -> None:
        """Forget the losses of a step, which is applied."""
        self._told, self._shared, self.losses = (), (), Losses(0)

    def begin(self, step: int) -> None:
        """Begin a step. Losses of micro-batches that do not run again are told by the first replica."""
        self._shared = ()
        if step != self._first_step:
            self._told = ()
        # One replica votes on what others ran: each slot of the vote has one writer.
        self.losses = Losses(len(self.of(step)), self._copies, self._told if self._replica == 0 else ())

    def learn_losses(self, losses: Sequence[Sequence[float]]) -> None:
        """Take all losses of the step, by micro-batch, as in ``losses``; called by a thread beside the training one."""
        self._shared = losses

    @property
    def known(self) -> tuple[MicroBatchLoss, ...]:
        """All losses of the step that are known here, without waiting for a GPU."""
        found = {each.micro_batch: each for each in self._told}
        for number, values in (*enumerate(self._shared), *self.losses.numbers(now=True).items()):
            found[number] = MicroBatchLoss(micro_batch=number, values=tuple(values))
        return tuple(found[number] for number in sorted(found))
