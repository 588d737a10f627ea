"""The user's optimizer and scheduler on one stage, and their state by parameter name.

A morph changes which parameters a rank holds, so the optimizer is built anew by the user's factory and its
state put back by name. A scheduler is replayed: every scheduler then ends in exactly the state that an
undisturbed run has, and nothing of it needs to be stored.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from varuna.checkpoint.io.section_state import JSON
from varuna.core.errors import UsageError
from varuna.data.randomness import Keyed
from varuna.engine.stage.parameter_groups import NO_STEERING, ParameterGroup, Steering, Writes, complete, options_alone
from varuna.partition.optimizer_state import OptimizerState, parts_in
from varuna.partition.optimizers import NamedParameters as NamedParameters
from varuna.partition.optimizers import OptimizerFactory as OptimizerFactory
from varuna.partition.optimizers import build_optimizer, is_torchs

BeforeStep = Callable[..., None]
"""``fn(named)``, a list of (name, parameter) with gradients, or ``fn(named, step)``"""
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]
Written = Callable[[Mapping[str, Tensor]], None]
"""Called with parameters, by name, that have just been updated."""


class TensorSlot(NamedTuple):
    """A tensor of an optimizer's state."""

    name: str
    """of the parameter"""
    path: str
    """of the optimizer inside of the user's; empty: it is that itself"""
    key: str


class StageOptimizer:
    """Optimizer and scheduler of one stage; None of either where the stage has nothing to train."""

    def __init__(
        self,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        named: NamedParameters,
        state: Mapping[str, Mapping[str, Any]],
        steps_done: int,
        *,
        home: torch.device | None = None,
        whole: Sequence[ParameterGroup] = (),
        steering: Steering = NO_STEERING,
    ) -> None:
        """Build both and bring them to where the run is.

        Args:
            optimizer: the user's factory.
            scheduler: the user's factory, if any.
            named: trainable parameters of the stage, by the model's own names.
            state: optimizer state by parameter name, from a peer or a checkpoint; empty at the start.
            steps_done: optimizer steps that the parameters contain.
            home: where state lives between steps; with its parameter if None.
            whole: parameter groups of the whole model, if they are known: the scheduler finds them all.
            steering: what the training loop has told both so far.

        Raises:
            UsageError: a factory returns something else than an optimizer or a scheduler, or the scheduler needs
                groups that the optimizer lacks.
        """
        self._named = dict(named)
        self._home = home
        self._optimizer = build_optimizer(optimizer, named) if named else None
        self._scheduler: LRScheduler | None = None
        if self._optimizer is not None:
            complete(self._optimizer, named, whole)
            self._state = OptimizerState(self._optimizer, named)
            if not self.is_torchs:
                names = {parameter: name for name, parameter in named}
                for group in (group for _, part in parts_in(self._optimizer) for group in part.param_groups):
                    # The user's loop over parameters may draw numbers: keyed by name, they are the same on every stage.
                    group["params"] = Keyed(group["params"], [names[each] for each in group["params"]], "optimizer")
        self._options = options_alone(whole) if self._optimizer is None and whole else self._optimizer
        if self._options is None:
            return
        if scheduler is not None:
            self._scheduler = _scheduled(scheduler, self._options)
        self._replay(steps_done, steering)
        self.put_state(state)  # last: what a step has changed, it has changed after the schedule

    def put_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over state by parameter name, of those parameters that are here, and what was kept beside it.

        Raises:
            UsageError: parameters that come together do not agree on what their optimizer kept beside them.
        """
        if self._optimizer is None:
            return
        self._state.put_state(state)
        self._state.put_beside(state)
        for slot, entries in self.slots().items():
            entries[slot.key] = entries[slot.key].to(self._home or self._named[slot.name].device)

    @property
    def lr(self) -> float | None:
        """Learning rate of the first parameter group; None without an optimizer, or if it finds its own."""
        lr = None if self._optimizer is None else self._optimizer.param_groups[0].get("lr")
        return None if lr is None else float(lr)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the user's optimizer holds, by name."""
        return self._named

    @property
    def is_torchs(self) -> bool:
        """Return whether a step runs no code but torch's."""
        return self._optimizer is None or is_torchs(self._optimizer)

    def prepare(self) -> None:
        """Get ready to apply a step: nothing to do, since all state is on the device."""

    def update(self, written: Written) -> None:
        """Apply the gradients, and show the new parameters to ``written``."""
        if self._optimizer is not None:
            self._state.step()
            written(self._named)

    def slots(self) -> dict[TensorSlot, dict[str, Any]]:
        """Return state that torch keeps with the parameter; the value is ``entries[slot.key]``.

        All tensors but the counter of steps, which stays on the host unless a fused or capturable optimizer reads it.
        """
        if self._optimizer is None:
            return {}
        found = {}
        names = {parameter: name for name, parameter in self._named.items()}
        for path, part in parts_in(self._optimizer):
            for group in part.param_groups:
                is_counted_there = group.get("capturable") or group.get("fused")
                for parameter in group["params"]:
                    entries = part.state.get(parameter, {})
                    for key, value in entries.items():
                        if isinstance(value, Tensor) and (key != "step" or is_counted_there):
                            found[TensorSlot(names[parameter], path, key)] = entries
        return found

    def advance(self) -> None:
        """Advance the scheduler by one step, unless it waits for measurements."""
        if self._scheduler is not None and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

    def measure(self, value: float) -> None:
        """Tell the scheduler what was measured.

        Raises:
            UsageError: it follows the steps.
        """
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(value)
        elif self._options is not None:
            raise UsageError(
                "trainer.step_scheduler(value) is for lr_scheduler=lambda optimizer: ReduceLROnPlateau(optimizer). "
                "Every other scheduler advances by itself, once per step."
            )

    def options(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the parameter groups with their options, as they are now; None where they are not known."""
        return None if self._options is None else self._options.param_groups

    def write(self, values: Writes) -> None:
        """Give options of groups other values."""
        if self._options is not None:
            for (group, key), value in values.items():
                self._options.param_groups[group][key] = copy.deepcopy(value)

    def _replay(self, steps: int, steering: Steering) -> None:
        """Tell optimizer and scheduler once more what they have been told, in the same order."""
        written, told = steering.written, steering.measured
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "step() before optimizer.step()": this is a replay
            if written is not None:
                # In the order in which it happened: steps and measurements before the write, the write, then the rest.
                self._follow(written.steps, told[: written.measured])
                self.write(written.values)
                steps, told = steps - written.steps, told[written.measured :]
            self._follow(steps, told)

    def _follow(self, steps: int, told: Sequence[float]) -> None:
        for _ in range(0 if self._scheduler is None else steps):
            self.advance()
        for value in told:
            self.measure(value)

    def copies(self) -> Callable[[], None]:
        """Copy parameters and optimizer state; the returned function puts them back, bit for bit.

        Not of it: the scheduler, which advances only with a committed step.
        """
        if self._optimizer is None:
            return lambda: None
        values = [(p, p.detach().to(self._home or p.device, copy=True)) for p in self._named.values()]
        undo = self._state.copies()

        def restore() -> None:
            with torch.no_grad():
                for parameter, value in values:
                    parameter.copy_(value)
            undo.restore()

        return restore

    def state_of(self, name: str) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """Return the optimizer state of a parameter: tensors, and values that are not tensors.

        Raises:
            UsageError: some of it is of a kind that cannot be saved.
        """
        return ({}, {}) if self._optimizer is None else self._state.of(name)


def call_before_step(function: BeforeStep | None, named: NamedParameters, step: int) -> None:
    """Call ``before_step=``, if there is one; what it draws for a parameter does not depend on the others."""
    if function is not None:
        told = {"step": step} if "step" in signature(function).parameters else {}
        function(Keyed(named, [name for name, _ in named], "before_step"), **told)


def _scheduled(factory: SchedulerFactory, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Make the user's scheduler, before step 0."""
    try:
        scheduler = factory(optimizer)
    except (ValueError, IndexError) as error:
        raise UsageError(
            f"lr_scheduler= failed for an optimizer with {len(optimizer.param_groups)} parameter groups: {error}. "
            "optimizer= and lr_scheduler= are called on every worker, with the parameters of its stage only: keep "
            "groups in optimizer= that are empty on a stage, so that all workers have the same groups."
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"lr_scheduler= must return a torch scheduler, but returned {type(scheduler).__name__}. "
            "LambdaLR can express any function of the step."
        )
    return scheduler
