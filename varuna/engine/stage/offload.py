"""Optimizer state in host memory, and with it the fp32 parameters behind half-precision copies.

At the end of a step each section's state passes through the device: while one section is updated, the next one's
state is on its way in. Each section has an optimizer of its own, which the user's factory builds as it would on a
stage of that section alone; so the numbers are those of any other plan, to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from varuna.checkpoint.io.section_state import JSON
from varuna.engine.device.staging import Ferry
from varuna.engine.stage.cross_stage import forbidden
from varuna.engine.stage.optimizer import NamedParameters, StageOptimizer, Written

_NOT_SHARED = (
    "an optimizer that calls varuna.all_reduce_shared cannot run with offload_optimizer=True: it is stepped once "
    "per section, and stages have different numbers of sections. Leave offload_optimizer out, or combine values "
    "in before_step."
)


class OffloadedOptimizer:
    """In place of a ``StageOptimizer``: one for each section, whose state lives in host memory between steps."""

    def __init__(
        self,
        build: Callable[[NamedParameters], StageOptimizer],
        named: Sequence[NamedParameters],
        *,
        device: torch.device,
        ferry: Ferry,
        gradients: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Build the sections' optimizers, and bring their state into host memory.

        Args:
            build: makes the optimizer of some parameters, with state at home on the host.
            named: trainable parameters by section, each in one section only.
            device: updates run there.
            ferry: takes state there and back.
            gradients: of the parameters, on the device, if the parameters themselves live in host memory.

        Raises:
            UsageError: as ``StageOptimizer``.
        """
        self._ferry = ferry
        self._sections = [_Section(build, part, device, gradients, self._ferry) for part in reversed(named) if part]
        self._arriving: list[Tensor] | None = None  # the first section's state, if it has set out

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the user's optimizers hold, by name."""
        return {name: value for section in self._sections for name, value in section.held.items()}

    @property
    def lr(self) -> float | None:
        """Learning rate of the first section's first parameter group; None without an optimizer."""
        return self._sections[-1].optimizer.lr if self._sections else None

    def prepare(self) -> None:
        """Let the first section's state set out, which need not wait for gradients."""
        if self._arriving is None:
            self._arriving = self._sections[0].fetch() if self._sections else []

    def update(self, written: Written) -> None:
        """Apply the gradients, section by section; at most two sections' states are on the device.

        Args:
            written: is given a section's new parameters while they are on the device.

        Raises:
            UsageError: the optimizer calls ``all_reduce_shared``.
        """
        self.prepare()
        arrived, self._arriving = self._arriving or [], None
        with forbidden(_NOT_SHARED):
            for section, following in zip_longest(self._sections, self._sections[1:]):
                self._ferry.meet()
                leaving = section.update(arrived, written)
                self._ferry.settle()  # a GPU is still at work: the section before this one must have left first
                arrived = following.fetch() if following is not None else []
                self._ferry.bring_back(leaving)
                del leaving  # memory that is freed after the next update would be free only then
        self._ferry.settle()

    def advance(self) -> None:
        """Advance the schedulers; the step is over, skipped or not."""
        self._arriving = None
        for section in self._sections:
            section.optimizer.advance()

    def copies(self) -> Callable[[], None]:
        """As ``StageOptimizer.copies``; the copy is in host memory."""
        restores = [section.copies() for section in self._sections]

        def restore() -> None:
            self._arriving = None
            self._ferry.settle()  # what an update that was broken off has sent home would come on top
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
        ferry: Ferry,
    ) -> None:
        self._ferry = ferry
        self._nothing = torch.empty(0, device=device)
        self._gradients = gradients or {}
        self._masters = dict(named) if gradients is not None else {}
        for master in self._masters.values():
            master.data = ferry.at_rest(master.detach())
        self.held = {
            name: nn.Parameter(value.detach().to(device, copy=True)) if gradients is not None else value
            for name, value in named
        }
        self.optimizer = build(list(self.held.items()))
        self._rest()
        self._empty()

    def fetch(self) -> list[Tensor]:
        """Masters and state set out for the device."""
        state = [entries[key] for (_, key), entries in self.optimizer.slots().items()]
        return self._ferry.fetch([*(master.detach() for master in self._masters.values()), *state])

    def update(self, fetched: list[Tensor], written: Written) -> list[tuple[Tensor, Tensor]]:
        """Step on what was fetched; what is to be brought back, and where to. ``fetched`` is empty afterwards."""
        for name in self._masters:
            self.held[name].data = fetched.pop(0)
            self.held[name].grad = self._gradients[name]
        homes = {}
        for slot, entries in self.optimizer.slots().items():
            homes[slot], entries[slot[1]] = entries[slot[1]], fetched.pop(0)
        self.optimizer.update(written)
        pairs = [(self.held[name].detach(), master.detach()) for name, master in self._masters.items()]
        for slot, entries in self.optimizer.slots().items():
            value, home = entries[slot[1]], homes.get(slot)
            if home is None or (home.shape, home.dtype) != (value.shape, value.dtype):
                home = self._ferry.room_for(value)
            pairs.append((value, home))
            entries[slot[1]] = home
        self._empty()
        return pairs

    def copies(self) -> Callable[[], None]:
        """As ``StageOptimizer.copies``, masters included."""
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
        for (_, key), entries in self.optimizer.slots().items():
            entries[key] = self._ferry.at_rest(entries[key])

    def _empty(self) -> None:
        for name in self._masters:
            self.held[name].data, self.held[name].grad = self._nothing, None
