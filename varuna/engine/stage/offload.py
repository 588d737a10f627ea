"""Optimizer state in host memory, and with it the fp32 parameters of which sections use half-precision copies.

At the end of a step each section's state passes through the device: while one section is updated, the next one's
state is on its way in. Each section has an optimizer of its own, which the user's factory builds as it would on a
stage of that section alone; so the numbers are those of any other plan, to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from varuna.checkpoint.io.section_state import JSON
from varuna.engine.device.host_copies import DONE, HOST, HostCopies, Ready
from varuna.engine.stage.cross_stage import no_exchange
from varuna.engine.stage.job import Job
from varuna.engine.stage.optimizer import NamedParameters, StageOptimizer, Written
from varuna.engine.stage.parameter_groups import NO_STEERING, ParameterGroup, Steering, Writes, whole_groups
from varuna.partition.cut.split import SectionGraph

_NO_EXCHANGE = (
    "an optimizer that calls varuna.all_reduce_shared cannot run with offload_optimizer=True: it is stepped once "
    "per section, and stages have different numbers of sections. Leave offload_optimizer out, or combine values "
    "in before_step."
)


class OffloadedOptimizer:
    """Replaces ``StageOptimizer``: one optimizer for each section, whose state lives in host memory between steps."""

    def __init__(
        self,
        build: Callable[[NamedParameters], StageOptimizer],
        named: Sequence[NamedParameters],
        *,
        device: torch.device,
        copies: HostCopies,
        gradients: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Build the sections' optimizers, and bring their state into host memory.

        Args:
            build: makes the optimizer of some parameters, with state at home on the host.
            named: trainable parameters by section, each in one section only.
            device: updates run there.
            copies: of the state, to the device and back.
            gradients: of the parameters, on the device, if the parameters themselves live in host memory.

        Raises:
            UsageError: as ``StageOptimizer``.
        """
        self._copies = copies
        self._sections = [_Section(build, part, device, gradients, copies) for part in reversed(named) if part]
        self._idle = None if self._sections else build(())
        self._arriving: tuple[list[Tensor], Ready] | None = None  # the first section's state, if its copy has begun
        self._left: Ready = DONE  # the newest copies into host memory

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the user's optimizers hold, by name."""
        return {name: value for section in self._sections for name, value in section.held.items()}

    @property
    def lr(self) -> float | None:
        """Learning rate of the first section's first parameter group; None without an optimizer."""
        return self._sections[-1].optimizer.lr if self._sections else None

    @property
    def _optimizers(self) -> Sequence[StageOptimizer]:
        return [section.optimizer for section in self._sections] if self._idle is None else [self._idle]

    @property
    def is_torchs(self) -> bool:
        """Return whether a step runs no code but torch's."""
        return all(section.optimizer.is_torchs for section in self._sections)

    def prepare(self) -> None:
        """Begin to copy the first section's state, which need not wait for gradients."""
        if self._arriving is None and self._sections:
            self._arriving = self._sections[0].fetch(self._left)

    def update(self, written: Written) -> None:
        """Apply the gradients, section by section; at most two sections' states are on the device.

        Args:
            written: is given a section's new parameters while they are on the device.

        Raises:
            UsageError: the optimizer calls ``all_reduce_shared``.
        """
        self.prepare()
        arriving, self._arriving = self._arriving, None
        with no_exchange(_NO_EXCHANGE):
            for section, following in zip_longest(self._sections, self._sections[1:]):
                assert arriving is not None
                fetched, arrived = arriving
                self._copies.compute_after(arrived)
                leaving = section.update(fetched, written)
                self._left.wait()  # a GPU is still at work: the section before this one must have left first
                arriving = following.fetch(self._left) if following is not None else None
                self._left = self._copies.copy_to_host(leaving)
                del leaving  # memory that is freed after the next update would be free only then
        self._left.wait()

    def advance(self) -> None:
        """Advance the schedulers; the step is over, skipped or not."""
        self._arriving = None
        for optimizer in self._optimizers:
            optimizer.advance()

    def put_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Like ``StageOptimizer.put_state``; nothing may have been fetched."""
        for section in self._sections:
            section.put_state(state)

    def measure(self, value: float) -> None:
        """Like ``StageOptimizer.measure``, for each section's scheduler."""
        for optimizer in self._optimizers:
            optimizer.measure(value)

    def options(self) -> Sequence[Mapping[str, Any]] | None:
        """Like ``StageOptimizer.options``; all sections have the same."""
        return self._optimizers[-1].options()

    def write(self, values: Writes) -> None:
        """Like ``StageOptimizer.write``, for each section."""
        for optimizer in self._optimizers:
            optimizer.write(values)

    def copies(self) -> Callable[[], None]:
        """Like ``StageOptimizer.copies``; the copy is in host memory."""
        restores = [section.copies() for section in self._sections]

        def restore() -> None:
            self._arriving = None
            self._left.wait()  # an interrupted update may still be copying into what is restored
            for each in restores:
                each()

        return restore

    def state_of(self, name: str) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """Return the optimizer state of a parameter: tensors, and values that are not tensors."""
        for section in self._sections:
            if name in section.held:
                return section.optimizer.state_of(name)
        return {}, {}


class _Section:
    """The optimizer of one section.

    A parameter that lives in host memory, a master, is known to the optimizer as one on the device, which has a
    value and a gradient during its step only.
    """

    def __init__(
        self,
        build: Callable[[NamedParameters], StageOptimizer],
        named: NamedParameters,
        device: torch.device,
        gradients: Mapping[str, Tensor] | None,
        copies: HostCopies,
    ) -> None:
        self._copies = copies
        self._nothing = torch.empty(0, device=device)
        self._gradients = gradients or {}
        self._masters = dict(named) if gradients is not None else {}
        resting = copies.at_rest([master.detach() for master in self._masters.values()])
        for master, home in zip(self._masters.values(), resting, strict=True):
            master.data = home
        self.held = {
            name: nn.Parameter(value.detach().to(device, copy=True)) if gradients is not None else value
            for name, value in named
        }
        self.optimizer = build(list(self.held.items()))
        self._rest()
        self._empty()

    def put_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over state by parameter name, into host memory."""
        self.optimizer.put_state(state)
        self._rest()

    def fetch(self, after: Ready) -> tuple[list[Tensor], Ready]:
        """Begin to copy masters and state to the device."""
        state = [entries[slot.key] for slot, entries in self.optimizer.slots().items()]
        return self._copies.fetch([*(master.detach() for master in self._masters.values()), *state], after)

    def update(self, fetched: list[Tensor], written: Written) -> list[tuple[Tensor, Tensor]]:
        """Step on what was fetched, and empty ``fetched``; returns what is to be copied back, and where to."""
        for name in self._masters:
            self.held[name].data = fetched.pop(0)
            self.held[name].grad = self._gradients.get(name)  # none: frozen in this step
        homes = {}
        for slot, entries in self.optimizer.slots().items():
            homes[slot], entries[slot.key] = entries[slot.key], fetched.pop(0)
        self.optimizer.update(written)
        pairs = [(self.held[name].detach(), master.detach()) for name, master in self._masters.items()]
        slots = self.optimizer.slots()
        # The first update makes state, and some optimizers replace a tensor by one of another shape.
        new = {
            slot: entries[slot.key]
            for slot, entries in slots.items()
            if slot not in homes or not _alike(homes[slot], entries[slot.key])
        }
        homes |= dict(zip(new, self._copies.homes_for(list(new.values())), strict=True))
        for slot, entries in slots.items():
            pairs.append((entries[slot.key], homes[slot]))
            entries[slot.key] = homes[slot]
        self._empty()
        return pairs

    def copies(self) -> Callable[[], None]:
        """Like ``StageOptimizer.copies``, masters included."""
        values = [(master.detach(), master.detach().clone()) for master in self._masters.values()]
        restore_optimizer = self.optimizer.copies()

        def restore() -> None:
            for master, value in values:
                master.copy_(value)
            self._empty()
            restore_optimizer()
            self._rest()

        return restore

    def _rest(self) -> None:
        slots = self.optimizer.slots()
        resting = self._copies.at_rest([entries[slot.key] for slot, entries in slots.items()])
        for (slot, entries), home in zip(slots.items(), resting, strict=True):
            entries[slot.key] = home

    def _empty(self) -> None:
        for name in self._masters:
            self.held[name].data, self.held[name].grad = self._nothing, None


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def optimizer_of(
    job: Job,
    graphs: Sequence[SectionGraph],
    named: NamedParameters,
    state: Mapping[str, Mapping[str, Any]],
    steps_done: int,
    gradients: Mapping[str, Tensor],
    steering: Steering = NO_STEERING,
) -> StageOptimizer | OffloadedOptimizer:
    """Make the optimizer of a stage, in host memory if the job says so.

    Args:
        job: what the user asked for.
        graphs: of the stage's sections.
        named: trainable parameters that are updated here.
        state: optimizer state by parameter name.
        steps_done: optimizer steps that the parameters contain.
        gradients: by parameter, on the device.
        steering: what the training loop has told the optimizer and its scheduler.

    Raises:
        UsageError: as ``StageOptimizer``.
    """
    trainable, whole = job.model.trainable, tuple[ParameterGroup, ...]()
    has_parts = job.memory.offload_optimizer or len(named) < len(trainable)
    if has_parts and (job.scheduler is not None or job.is_steered):
        shapes = {name: shape for name, shape in job.model.shapes.items() if name in trainable}
        whole = whole_groups(job.optimizer, shapes)
    home = HOST if job.memory.offload_optimizer else None
    build = partial(
        StageOptimizer,
        job.optimizer,
        job.scheduler,
        state=state,
        steps_done=steps_done,
        home=home,
        whole=whole,
        steering=steering,
    )
    if not job.memory.offload_optimizer:
        return build(named)
    # A tied parameter is updated once, with its first section here.
    first = {name: graph.index for graph in reversed(graphs) for name in graph.parameters}
    return OffloadedOptimizer(
        build,
        [[pair for pair in named if first[pair[0]] == graph.index] for graph in graphs],
        device=job.device,
        copies=job.traffic.optimizer,
        gradients=gradients if job.masters_away else None,
    )
