"""Optimizer state shared out among the replicas of a stage (``shard_optimizer``), and the parameters that follow.

Each section's state is with an owner and a mirror (``core.sharded_optimizer``). Both apply the update, bit for bit the
same; then the owner sends the section's new parameters to all others, as the sections compute with them. That is after
the vote: a committed section needs one of its two holders, and no other replica.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.core.sharded_optimizer import held_by, holders_of
from varuna.engine.base.transport import Group
from varuna.engine.stage.cross_stage import no_exchange
from varuna.engine.stage.job import Job

_TAG = 2000

_NO_EXCHANGE = (
    "an optimizer that calls varuna.all_reduce_shared cannot run with shard_optimizer=True: each replica steps "
    "different sections. Leave shard_optimizer out, or combine values in before_step."
)


class ShardedOptimizerState:
    """The part of a stage's optimizer state that one replica holds: everything, unless the job shards it."""

    def __init__(self, plan: Plan, job: Job, stage: int, replica: int, missing: frozenset[int]) -> None:
        self.replica, self.replicas = replica, plan.replicas
        sections = plan.pipeline_of(replica).sections_of(stage)
        self.holders = holders_of(plan, job.model.facts.sections, shared=job.memory.shard_optimizer)
        """replicas that hold each section of the model, of this stage or another; the first one speaks for it"""
        self._is_sharded = job.memory.shard_optimizer
        self.held = held_by(self.holders, sections, replica)
        """sections that are updated here"""
        self.missing = missing
        """those of them whose optimizer state is still on its way"""
        self.lent = tuple(section for section in sections if section not in self.held)
        """sections that other replicas update"""
        self.updated = frozenset(name for section in self.held for name in job.model.sections[section].parameters)
        """names of the parameters that are updated here, and of frozen ones beside them"""
        self.complete = True
        """the parameters of lent sections are as new as all others"""
        self.sends = tuple(section for section in sections if len(self.holders[section]) < self.replicas)
        """sections that some replica does not update, so that new parameters travel"""

    @property
    def whole(self) -> tuple[int, ...]:
        """Sections whose optimizer state is here."""
        return tuple(section for section in self.held if section not in self.missing)

    @property
    def up_to_date(self) -> tuple[int, ...]:
        """Other sections with usable parameters: between a vote and what follows from it, lent ones are too old."""
        return (*(self.lent if self.complete else ()), *sorted(self.missing))

    def applied(self, *, overflowed: bool) -> None:
        """Note that a step was applied to what is held; ``overflowed``: it changed nothing, here or elsewhere."""
        self.complete = self.complete and (overflowed or not self.lent)

    def without_exchange(self) -> AbstractContextManager[None]:
        """Let an optimizer step in this block that other replicas do not step at the same time."""
        return no_exchange(_NO_EXCHANGE) if self._is_sharded else nullcontext()

    def rounds(self) -> list[list[tuple[int, int]]]:
        """Return (owner, section) of all messages, by round: each replica sends one section in it, so little waits."""
        owned: list[list[tuple[int, int]]] = [[] for _ in range(self.replicas)]
        for section in self.sends:
            owner = self.holders[section][0]
            owned[owner].append((owner, section))
        return [[each for each in row if each is not None] for row in zip_longest(*owned)]

    def gather(self, values: Mapping[int, Sequence[Tensor]], group: Group) -> None:
        """Bring lent sections to the newest step; blocks until this replica has sent and received everything.

        Args:
            values: of each section, what it computes with and its owner updates, in an order that all replicas share;
                those of lent sections are written.
            group: the replicas of the stage.

        Raises:
            RuntimeError: a peer is gone.
        """
        for messages in self.rounds():
            arriving, leaving = [], []
            for owner, section in messages:
                if section in self.lent:
                    size_bytes = sum(value.nbytes for value in values[section])
                    buffer = torch.empty(size_bytes, dtype=torch.uint8)
                    # Receives of a round are posted before its sends: two owners that send to each other cannot block.
                    arriving.append((section, group.receive(buffer, owner, _TAG + section)))
            for owner, section in messages:
                if owner == self.replica:
                    parts = [value.detach().reshape(-1).view(torch.uint8) for value in values[section]]
                    packed = torch.cat(parts).cpu()  # what crosses is in host memory
                    others = (r for r in range(self.replicas) if r not in self.holders[section])
                    leaving += [group.send(packed, other, _TAG + section) for other in others]
            for section, work in arriving:
                _unpack(work.wait(), values[section])
            for work in leaving:
                work.wait()


def _unpack(buffer: Tensor, values: Sequence[Tensor]) -> None:
    first = 0
    with torch.no_grad():
        for value in values:
            stop = first + value.nbytes
            # A view of another dtype must begin at a multiple of its size.
            part = buffer[first:stop] if first % value.itemsize == 0 else buffer[first:stop].clone()
            value.copy_(part.view(value.dtype).view(value.shape))
            first = stop
