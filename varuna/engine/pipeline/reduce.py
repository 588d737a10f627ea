"""End of a step: reduction over replicas per section, tied gradients in section order, and the vote.

training thread              thread "reduction", one after another    thread "vote"
last B of section s -------> losses (last section), statistics,
(the last section first)     all-reduce of its sums over its homes
B's of sections before s     (meanwhile)
finish(step) --------------> tied parameters, if other ranks share any
  waits for all of it
cast_vote, vote(step) ------------------------------------------> all-reduce over all ranks of the grid
  waits: the step is committed

Threads put results into the inbox under (kind, step, section); waits there have bounds. Ranks of the grid are those of
``Plan.rank_of``; a section's homes are the ranks that run it, by replica.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import count

import torch
from torch import Tensor

from varuna.core.model import TiedParameter
from varuna.core.plan import Plan
from varuna.core.vote import VoteLayout
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.transport import Group
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.device.host_copies import Ready
from varuna.engine.links.groups import Groups
from varuna.engine.links.in_parts import Incoming, Outgoing, part_bytes_for, spans_of
from varuna.engine.links.links import Courier
from varuna.engine.links.transfer_time import TransferTime
from varuna.engine.stage.cross_stage import StageExchange
from varuna.engine.stage.stage import Stage

TIED_TAG = 1_000_000
"""Tag of messages with the sums of the first section that uses the first tied parameter; each section of each
parameter has a tag of its own."""
_REMEMBERED = 256


class Reducer:
    """Sums a stage's gradients in the background, section by section, while the pipeline drains."""

    def __init__(self, stage: Stage, plan: Plan, rank: int, groups: Groups, inbox: Inbox) -> None:
        self._stage = stage
        self._plan = plan
        self._rank = rank
        self._groups = groups
        self._inbox = inbox
        self._copies = stage.job.traffic.sums
        self._homes = {section: _others(plan.homes_of(section), rank) for section in stage.sections}
        self._others = tuple(r for r in range(plan.workers) if r != rank)
        # Two threads: sums over the grid (counts, the vote) wait for all ranks, reductions for this stage's replicas
        # only.
        self._courier = Courier(inbox, "reduction")
        self._votes = Courier(inbox, "vote")
        self._room = torch.empty(0)
        self.reductions: deque[TransferTime] = deque(maxlen=_REMEMBERED)
        """the newest all-reduces, from device to device, waits for the other replicas included"""

    @cached_property
    def _sharers(self) -> tuple[int, ...]:
        """Other ranks of this replica that hold a tied parameter of this stage."""
        plan, replica = self._plan, self._plan.place_of(self._rank).replica
        shared = {section for tied in self._stage.tied for section in tied.sections}
        homes = {plan.home_of(replica, section) for section in shared}
        return tuple(sorted(homes - {self._rank}))

    def section_done(self, step: int, section: int) -> None:
        """Note that the section's last backward is done, so that its sums may be reduced."""
        flat = self._stage.buckets[section].flat
        group = self._groups.sums.get(section)
        # The last section is done first, so its losses leave before any sum: a survivor needs them with the sums.
        if self._shares_losses and section == self._stage.sections[-1]:
            self._share_losses(step)
        if self._stage.statistics.has(section):  # first: a rank that has the total has all statistics, too
            self._courier.submit(("statistics", step, section), lambda: self._gather(section))
        # With D = 1 the stage's own sum is the total, and there is no group.
        if group is not None and flat.numel():
            point = self._copies.point()  # what the device is given from now on need not be waited for
            self._courier.submit(("reduced", step, section), lambda: self._reduce(group, step, section, point))
        else:
            self._inbox.put(("reduced", step, section), None)

    @property
    def _shares_losses(self) -> bool:
        """Whether sums outlast a rank of the last stage that has replicas: then its losses must, too."""
        stage = self._stage
        return stage.is_last and stage.sections[-1] in self._groups.sums and stage.sums.outlast

    def _share_losses(self, step: int) -> None:
        """Tell the replicas the losses of this one's micro-batches: one table, each row of which has one writer."""
        work, group = self._stage.work, self._groups.sums[self._stage.sections[-1]]
        losses = work.losses

        def share() -> None:
            table = torch.zeros(self._plan.micro_batches, 2 + len(self._stage.job.model.metrics), dtype=torch.float64)
            for micro_batch, values in losses.numbers().items():
                table[micro_batch] = torch.tensor(values, dtype=torch.float64)
            group.all_reduce(table)
            # Zeros but for one writer of each row: their sum is exact.
            work.learn_losses(table.tolist())

        self._courier.submit(("losses", step), share)

    def _reduce(self, group: Group, step: int, section: int, point: Ready) -> None:
        sums, flat = self._stage.sums, self._stage.buckets[section].flat
        in_bf16, direct = self._stage.job.bf16_reduction, self._groups.direct.sums
        point.wait()
        begin_s = time.monotonic()
        # On the GPUs in place; else through a copy, or on the host in place if no sum may outlast a loss.
        if direct is not None:
            group.all_reduce(torch.zeros(1))  # the other replicas' sums are ready too: no device waits for them
            with sums.overwriting(section), self._span("sum", step, section):
                direct.all_reduce(flat)
        elif sums.outlast:  # a copy: an all-reduce that breaks off leaves nonsense
            values = self._copy(flat, point)
            self._sum(group, values, step, section)
            sums.reduced(section, values)
        else:
            with self._copies.at_host(flat, point, self._room_for) as values:
                self._sum(group, values, step, section)
        self.reductions.append(TransferTime(flat.nbytes // 2 if in_bf16 else flat.nbytes, begin_s, time.monotonic()))

    def _sum(self, group: Group, values: Tensor, step: int, section: int) -> None:
        with self._span("sum", step, section):
            group.all_reduce(values, crossing=torch.bfloat16 if self._stage.job.bf16_reduction else None)

    def _copy(self, values: Tensor, after: Ready) -> Tensor:
        """Copy sums to host memory, which the next reduction uses again: there is one at a time."""
        copy = self._room_for(values)
        self._copies.copy_to_host([(values, copy)], after).wait()
        return copy

    def _room_for(self, values: Tensor) -> Tensor:
        if not self._room.numel():
            self._room = self._stage.sums.room()
        return self._room[: values.numel()]

    def finish(self, step: int) -> None:
        """Wait until every section is reduced and tied gradients are summed."""
        if self._sharers:
            self._courier.submit(("tied", step), lambda: self._sum_tied(step))
        if self._shares_losses:
            others = self._homes[self._stage.sections[-1]]
            self._take(("losses", step), f"the losses of the other replicas (step {step})", others)
        # In the order in which backwards finish them.
        for section in reversed(self._stage.sections):
            others = self._homes[section]
            self._take(("reduced", step, section), f"the sums of section {section} (step {step})", others)
            if self._stage.statistics.has(section):
                what = f"the batch statistics of section {section} (step {step})"
                self._take(("statistics", step, section), what, others)
        if self._sharers:
            self._take(("tied", step), f"the gradients of tied parameters (step {step})", self._sharers)
        else:
            self._sum_tied(step)  # all parts are here: another thread would only cost time

    def _take(self, key: Hashable, what: str, on: tuple[int, ...]) -> None:
        self._inbox.take(key, lambda: Awaited(what, on))

    def exchange(self, step: int) -> StageExchange:
        """Let the user's code combine values over the stages while ``step`` is applied tentatively."""
        number = count()

        def rows(row: Tensor) -> Tensor:
            place = self._plan.place_of(self._rank)
            table = torch.zeros(self._plan.stages, row.numel(), dtype=torch.float64)
            if place.replica == 0:  # one writer per row: the sum is exact, and equal on all replicas
                table[place.stage] = row
            what = f"the other stages' part of a shared value (step {step})"
            self.sum_over_grid(("shared", step, next(number)), table, what)
            return table

        return StageExchange(rows, self._stage.owned)

    def add_up(self, step: int, table: Tensor) -> None:
        """Start to sum what the ranks have counted of the step's samples, in place."""
        if self._others:
            self._start_sum(("counted", step), table)
        else:
            self._inbox.put(("counted", step), None)

    def added_up(self, step: int) -> None:
        """Wait until the counts of ``add_up`` are summed."""
        plan = self._plan
        on = _others(plan.homes_of(plan.sections - 1), self._rank)
        self._take(("counted", step), f"what the other replicas counted (step {step})", on)

    def tally(self, step: int, vector: Tensor) -> tuple[float, ...]:
        """Sum what will be voted on; this is not the vote, and no rank may commit on it."""
        known = vector.clone()
        self.sum_over_grid(("tally", step), known, f"the totals of step {step}")
        return tuple(known.tolist())

    def vote(self, step: int, vector: Tensor) -> tuple[float, ...]:
        """Sum the vote over the grid: a rank that gets the result may apply the step."""
        self.sum_over_grid(("vote", step), vector, f"the vote on step {step}")
        return tuple(vector.tolist())

    def sum_over_grid(self, key: Hashable, table: Tensor, what: str) -> None:
        """Sum a table over all ranks, in place, and wait until that is done; every ``key`` is used once."""
        if self._others:
            self._start_sum(key, table)
            self._take(key, what, self._others)
        else:
            # A single rank waits for no one, but must still notice the end of its generation.
            self._inbox.check()

    def _start_sum(self, key: Hashable, table: Tensor) -> None:
        group = self._groups.grid
        assert group is not None
        self._votes.submit(key, lambda: group.all_reduce(table))

    def gather(self, step: int) -> None:
        """Wait until the parameters that other replicas have updated are here too."""
        stage = self._stage
        first = stage.sections[0]
        group, others = self._groups.sums[first], self._homes[first]  # state is shared out where all are cut alike
        values = stage.exchanged_parameters()
        self._courier.submit(("gathered", step), lambda: stage.sharding.gather(values, group))
        self._take(("gathered", step), f"new parameters (step {step})", others)
        stage.sharding.complete = True

    def farewell(self) -> None:
        """Wait until every rank of the grid has the result of its last vote."""
        self.sum_over_grid("farewell", torch.zeros(1), "the end of the last step")

    def close(self) -> None:
        """Let the threads end."""
        self._courier.close()
        self._votes.close()

    def _gather(self, section: int) -> None:
        """Give every replica the statistics of all micro-batches."""
        statistics, group = self._stage.statistics, self._groups.sums.get(section)
        if group is None:
            statistics.complete(section)
            return
        table = statistics.table(section)
        group.all_reduce(table)
        statistics.complete(section, table)

    def _span(self, name: str, step: int, index: int) -> AbstractContextManager[None]:
        return span(name, rank=self._rank, stage=self._stage.index, step=step, index=index)

    def _sum_tied(self, step: int) -> None:
        """Exchange the sums of each tied parameter, numbered and ordered as in the job's facts, which all ranks share.

        Each stage holds a selection of its own: its own counting would give one exchange two numbers.
        """
        first_tag = TIED_TAG
        for number, tied in enumerate(self._stage.job.model.facts.tied):
            if tied.name in self._stage.totals.views:
                with self._span("tied", step, number):
                    self._stage.totals.add_total(tied.name, self._sum_one(tied, first_tag))
            first_tag += len(tied.sections)

    def _sum_one(self, tied: TiedParameter, first_tag: int) -> Tensor:
        """Exchange the sums of all sections that use a parameter in parts, and add them in section order.

        Never an all-reduce: with more than two holders its order of additions is its own.
        """
        plan, world, copies = self._plan, self._groups.world, self._copies
        replica = plan.place_of(self._rank).replica
        # Within the replica only: each section's sum is the total over the replicas already.
        homes = [plan.home_of(replica, section) for section in tied.sections]
        peers = sorted({*homes} - {self._rank})
        total = torch.empty_like(self._stage.totals.views[tied.name])
        lines = len(homes) + 1  # not only those of this rank: parts are of one size on all
        spans = list(spans_of(total.nbytes, part_bytes_for(lines) if peers else max(1, total.nbytes)))
        sizes = [end - first for first, end in spans]
        # First what comes: it is on its way while ours is written.
        coming = {
            tag: Incoming(world, home, tag, sizes, copies.room)
            for tag, home in enumerate(homes, first_tag)
            if home != self._rank
        }
        own = {
            tag: self._stage.buckets[section].views[tied.name].view(-1)
            for tag, section in enumerate(tied.sections, first_tag)
            if tag not in coming
        }
        going = Outgoing(world, peers, max(sizes, default=0), copies.room)
        after = copies.point()
        for first, end in spans:
            elements = slice(first // total.itemsize, end // total.itemsize)
            if peers:
                for tag, values in own.items():
                    going.send(tag, end - first, partial(self._leave, values[elements], after))
            for tag in range(first_tag, first_tag + len(homes)):
                part = total.view(-1)[elements]
                # Tags ascend with the sections, so additions go in section order on every rank, whatever P is.
                put = part.copy_ if tag == first_tag else part.add_
                if tag in own:
                    put(own[tag][elements])
                else:
                    coming[tag].take_part(partial(self._fetched, put, part.dtype))
        going.finish()
        return total

    def _leave(self, values: Tensor, after: Ready, room: Tensor) -> None:
        self._copies.copy_to_host([(values, room.view(values.dtype))], after).wait()

    def _fetched(self, put: Callable[[Tensor], object], dtype: torch.dtype, room: Tensor) -> None:
        [values], arrived = self._copies.fetch([room.view(dtype)])
        arrived.wait()  # the next part takes its place in host memory
        put(values)


def _others(ranks: Sequence[int], own: int) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank != own)


def cast_vote(
    layout: VoteLayout,
    stage: Stage,
    replica: int,
    losses: Mapping[int, Sequence[float]],
    flags: dict[str, float],
) -> Tensor:
    """Make this rank's part of the vote: each slot is written by one rank and zero elsewhere.

    Args:
        layout: of the vote.
        stage: with reduced gradients.
        replica: only replica 0 writes the norms: all replicas have the same sums.
        losses: by global micro-batch [weighted loss, weight, metric sums...], on the last stage.
        flags: flags to raise, and ``lr``.
    """
    vector = torch.zeros(layout.size, dtype=torch.float64)
    if replica == 0:
        for section, norm in stage.squared_norms().items():
            vector[layout.squared_norm(section)] = norm
    for section in stage.sections:
        # From every replica: the counts add up to all micro-batches, which ``_prove`` checks (core.vote).
        first = layout.added(section)
        vector[first : first + 2] = torch.tensor(stage.sums.counted(section, replica), dtype=torch.float64)
    for micro_batch, values in losses.items():
        first = layout.micro_batch(micro_batch)
        vector[first : first + len(values)] = torch.tensor(values, dtype=torch.float64)
    for name, value in flags.items():
        vector[layout.flag(name)] = value
    return vector
