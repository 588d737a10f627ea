"""Objects that a script has built already, as functions that build the same model, optimizer and scheduler.

In training, the script's own model and optimizer are patterns that keep their first values. Using them then would
be a mistake that nothing shows, so it is an error with the remedy. After the loop the model has the trained values.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from varuna.checkpoint.io.export import is_exported
from varuna.checks.causes import HOOKS
from varuna.core.errors import UsageError
from varuna.data.columns import TARGETS
from varuna.engine.stage.optimizer import OptimizerFactory, SchedulerFactory
from varuna.engine.worker.agreement import checksum
from varuna.job.given_optimizer import OptimizerLike, an, options_of
from varuna.partition.capture.building import uninitialised
from varuna.partition.capture.capture import LossFunction
from varuna.partition.opaque.quantized import quantized_layers, with_plain_tensors
from varuna.partition.originals.copying import copied_whole
from varuna.partition.originals.referred import tensors_and_modules
from varuna.partition.originals.with_loss import ModelAndLoss
from varuna.partition.parameter_marks import mark_of, put_mark
from varuna.partition.watching.side_effects import gradient_hooks
from varuna.process.console import say


class GivenModel:
    """Builds copies of a module; their parameters are filled by operations, so that none need memory under fakes."""

    def __init__(self, module: nn.Module, loss: nn.Module | None = None) -> None:
        """Describe the copies.

        Args:
            module: moves to host memory.
            loss: its parameters train with the model's; it moves, too.

        Raises:
            UsageError: it is a wrapper for another way to train.
        """
        _check_bare(module)
        self.module = module.to("cpu")  # devices hold stages
        self.whole = self.module if loss is None else ModelAndLoss(self.module, loss.to("cpu"))
        """with the loss"""
        self.is_quantized = bool(quantized_layers(self.module))
        self.pattern = _plain(self.whole) if self.is_quantized else self.whole
        """the module that copies are made of, its parameters plain tensors"""
        self._guards: list[Any] = []
        self._is_spare = False

    def __call__(self) -> nn.Module:
        """Build a copy."""
        made: dict[int, Any] = {}
        with torch.no_grad():
            for parameter in self.pattern.parameters():
                values = torch.empty_like(parameter).copy_(parameter)
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                put_mark(made[id(parameter)], mark_of(parameter))
            for buffer in self.pattern.buffers():
                made[id(buffer)] = buffer.clone()
        copied: nn.Module = copied_whole(self.pattern, made)
        guarded = copied.model_itself if isinstance(copied, ModelAndLoss) else copied
        # copied with the rest: they refuse the use of the original, not of what trains
        for guard in self._guards:
            guarded._forward_pre_hooks.pop(guard.id, None)
            guarded._state_dict_pre_hooks.pop(guard.id, None)
            guarded._load_state_dict_post_hooks.pop(guard.id, None)
        return copied

    @property
    def own(self) -> nn.Module | None:
        """The script's own modules, if those of a copy correspond to them; in a quantized model they do not."""
        return None if self.is_quantized else self.whole

    def digest(self) -> str:
        """Return a digest of the model's values, which must be the same on all workers."""
        return f"{checksum([*self.pattern.parameters(), *self.pattern.buffers()]) % 2**64:016x}"

    def guard(self) -> None:
        """Refuse to compute with the module or to save it from now on, until it gets other values.

        Raises:
            UsageError: it has hooks that copies of it would not call.
        """
        module = self.module
        if hooks := gradient_hooks(self.whole):
            raise UsageError(HOOKS.told(hooks))
        self._guards += [
            module.register_forward_pre_hook(self._refuse_use),
            module.register_state_dict_pre_hook(self._refuse_use),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                lambda *_: self._release()
            ),
        ]

    def wants(self, trained: Container[str], path: str) -> bool:
        """Return whether an entry of a section's state is the model's, and may not be as the script has built it."""
        return _is_new(trained, path)

    def take_values(self, values: Mapping[str, Tensor] | None) -> None:
        """Take the trained values, after the loop; None on a worker that has been a spare in the end."""
        self._is_spare = values is None
        if values is not None:
            self._release()
            fill_module(self.whole, values)

    def _release(self) -> None:
        while self._guards:
            self._guards.pop().remove()

    def _refuse_use(self, *_: object) -> None:
        if self._is_spare:
            say(
                "this worker has no trained model, and ends; the others go on. It had no part in the end of the "
                "training, of which there is no checkpoint to read (checkpoints=)"
            )
            sys.exit(0)
        raise UsageError(
            "this model was passed to varuna.Trainer, which trains copies of it on the workers: until the loop has "
            "ended, its own values are those from before step 0. The loop over trainer.steps(n) has no forward or "
            "backward pass of its own. To measure, trainer.evaluate(dataset) or trainer.predict(dataset); to save, "
            "checkpoints=, or trainer.export(path) after the loop."
        )


class WithLoss:
    """Builds a model with a copy of the script's loss, whose parameters train with it."""

    def __init__(self, build: Callable[[], nn.Module], loss: nn.Module) -> None:
        self.__wrapped__ = build  # where ``inspect.unwrap`` looks
        self.loss = loss
        self._copy = GivenModel(loss)
        self._prefix = ""

    def __call__(self) -> nn.Module:
        """Build both."""
        made = ModelAndLoss(self.__wrapped__(), self._copy())
        self._prefix = f"{made.of_loss}."
        return made

    def digest(self) -> str:
        """Return a digest of the loss's values, which must be the same on all workers."""
        return self._copy.digest()

    def wants(self, trained: Container[str], path: str) -> bool:
        """Return whether an entry of a section's state is the loss's, and may not be as the script has built it."""
        return _is_new(trained, path) and path.partition("/")[2].startswith(self._prefix)

    def take_values(self, values: Mapping[str, Tensor] | None) -> None:
        """Take the trained values, after the loop; None on a worker that has been a spare in the end."""
        fill_module(self.loss, {name.removeprefix(self._prefix): value for name, value in (values or {}).items()})


def _is_new(trained: Container[str], path: str) -> bool:
    kind, _, name = path.partition("/")
    return is_exported(path) and (kind != "parameters" or name in trained)


def _plain(module: nn.Module) -> nn.Module:
    """A module with the same memory, in whose quantized layers there are plain tensors."""
    own = {id(value): value for value in (*module.parameters(), *module.buffers())}
    found = copy.deepcopy(module, own)
    with_plain_tensors(found)
    return found


def fill_module(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a module trained values; a tied parameter is in ``values`` once, and those that were not trained are not."""
    own = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _check_bare(module: nn.Module) -> None:
    if lazy := uninitialised(module):
        raise UsageError(lazy)
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"model= is wrapped in {type(module).__name__}. Pass the module inside, without torch.distributed: Varuna "
            "distributes it."
        )
    if hasattr(module, "_orig_mod"):
        raise UsageError(
            "model= has gone through torch.compile. Pass the module from before, and compile=True to varuna.Trainer: "
            "it compiles the sections."
        )


def _check_own(name: str, found: Any, kind: type) -> None:
    """Refuse what is around an optimizer or a scheduler, as ``accelerator.prepare`` makes, and lists of optimizers."""
    if isinstance(found, list | tuple) and any(isinstance(each, kind) for each in found):
        raise UsageError(
            f"{name}= is a {type(found).__name__} of what is built already. Pass a function that returns them, each "
            f"over some of the parameters that it is given, which are those of a stage: "
            "lambda named: [torch.optim.SGD(mine, lr=0.1) for mine in split(named) if mine]."
        )
    held = vars(found) if hasattr(found, "__dict__") else {}
    is_whole = isinstance(found, kind) and (kind is LRScheduler or "_optimizer_step_pre_hooks" in held)
    inner = next((each for each in held.values() if isinstance(each, kind)), None)
    if inner is not None and not is_whole and not callable(found):
        given, over = ("named", "[p for _, p in named], lr=0.1") if name == "optimizer" else ("optimizer", "optimizer")
        raise UsageError(
            f"{name}= is {an(found)} around {an(inner)}, as accelerator.prepare() makes it. Varuna distributes the "
            f"training itself: pass the {type(inner).__name__}, and the model and the dataset, as they were before. If "
            f"the {type(found).__name__} does something of its own in step(), as Lookahead does, pass a function that "
            f"builds both for a stage: {name}=lambda {given}: {type(found).__name__}({type(inner).__name__}({over}))."
        )


class SchedulerLike:
    """Builds a scheduler like one that has made no steps, over another optimizer with the same groups."""

    def __init__(self, whole: LRScheduler) -> None:
        """Take it as it is now."""
        self.whole = whole
        self._first = copy.deepcopy(
            whole, {id(whole.optimizer): whole.optimizer}
        )  # the script's will refuse to be used
        self.begin()

    def begin(self) -> None:
        """Take the options of groups as they are now: what its constructor has set, and the script since."""
        self._options = [copy.deepcopy(options_of(group)) for group in self.whole.optimizer.param_groups]

    def __call__(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Build a scheduler of ``optimizer``."""
        LambdaLR(optimizer, lambda _: 1.0)  # counts the optimizer's steps, which every scheduler looks for
        for group, options in zip(optimizer.param_groups, copy.deepcopy(self._options), strict=True):
            group.update(options)
        made: LRScheduler = copy.deepcopy(self._first, {id(self._first.optimizer): optimizer})
        return made


def _refuse_step(*_: object) -> Never:
    raise UsageError(
        "this optimizer was passed to varuna.Trainer, which makes the steps on the workers. Leave optimizer.step(), "
        "zero_grad() and loss.backward() out of the loop over trainer.steps(n)."
    )


def _refuse_state(*_: object) -> Never:
    raise UsageError(
        "this optimizer, or its scheduler, was passed to varuna.Trainer, which trains with copies on the workers: its "
        "own state is that from before step 0. To resume, checkpoints=, which saves both; step.lr is the learning rate."
    )


def _refuse_schedule(*_: object) -> Never:
    raise UsageError(
        "this scheduler was passed to varuna.Trainer, which advances it once per step. Leave scheduler.step() out of "
        "the loop over trainer.steps(n); ReduceLROnPlateau is told with trainer.step_scheduler(value)."
    )


def loss_of(criterion: Callable[..., Tensor] | None) -> LossFunction | None:
    """Turn a loss module into a function of output and batch, with labels for its target; return others as they are."""
    if not isinstance(criterion, nn.Module) or not TARGETS & {*inspect.signature(criterion.forward).parameters}:
        return criterion

    def compare(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if "labels" not in batch:
            raise UsageError(
                f"loss={type(criterion).__name__}() compares the output with batch['labels'], but samples have "
                f"{', '.join(batch)}. Say which: "
                f"loss=lambda output, batch: criterion(output, batch[{list(batch)[-1]!r}])"
            )
        found: Tensor = criterion(getattr(output, "logits", output), batch["labels"])
        return found

    return compare


class AsFunctions(NamedTuple):
    """Functions in place of what is built already."""

    model: Callable[[], nn.Module]
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None
    built: GivenModel | WithLoss | None
    """takes the trained values: the model, if the script has built it, or a loss with parameters"""
    steps: torch.optim.Optimizer | None
    """the optimizer, if the script has built it"""
    schedule: LRScheduler | None = None
    """the scheduler, if the script has built it"""

    def guard(self) -> None:
        """Refuse the use of the script's own objects from now on, as training begins."""
        if isinstance(self.lr_scheduler, SchedulerLike):
            self.lr_scheduler.begin()
        if isinstance(self.built, GivenModel):
            if isinstance(self.optimizer, OptimizerLike):
                self.optimizer.begin(list(self.built.whole.named_parameters()))
            self.built.guard()
        if self.steps is not None:
            self.steps.register_step_pre_hook(_refuse_step)
            self.steps.register_state_dict_pre_hook(_refuse_state)
            self.steps.register_load_state_dict_pre_hook(_refuse_state)
            vars(self.steps)["_opt_called"] = True  # the run makes its steps, before a scheduler of the loop's
        if self.schedule is not None:  # which has no hooks
            vars(self.schedule).update(step=_refuse_schedule, state_dict=_refuse_state)


def as_functions(model: Any, optimizer: Any, lr_scheduler: Any, loss: Any = None) -> AsFunctions:
    """Turn what is built already into functions that build the same.

    Args:
        model: a module, or what builds one.
        optimizer: an optimizer over the module's parameters, or what builds one.
        lr_scheduler: a scheduler of that optimizer, what builds one, or None.
        loss: as the script passes it; a module with parameters, or those that the optimizer has, train with the model.

    Raises:
        UsageError: one is built and belongs to something else than the others, or is around what was built.
    """
    _check_own("optimizer", optimizer, torch.optim.Optimizer)
    _check_own("lr_scheduler", lr_scheduler, LRScheduler)
    steps = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    schedule = lr_scheduler if isinstance(lr_scheduler, LRScheduler) else None
    if steps is not None and _refuse_step in steps._optimizer_step_pre_hooks.values():
        raise UsageError(
            f"optimizer= is {an(steps)} that another varuna.Trainer has trained with, on the workers: its own state is "
            "that from before. Build a new one, and its scheduler, over the same model; its state begins empty. For a "
            "training that goes on with its state, ask for all steps in one loop over trainer.steps(n)."
        )
    if isinstance(lr_scheduler, LRScheduler):
        if lr_scheduler.optimizer is not optimizer:
            raise UsageError(
                f"lr_scheduler= is a {type(lr_scheduler).__name__} of another optimizer than optimizer=. Pass the one "
                "that it was built with, or a function, such as "
                "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)."
            )
        lr_scheduler = SchedulerLike(lr_scheduler)
    if isinstance(model, nn.Module):
        trained = _trained_loss(loss, model, steps)
        built = GivenModel(model, trained)
        if steps is not None:
            whole, is_scheduled = list(built.whole.named_parameters()), lr_scheduler is not None
            optimizer = OptimizerLike(steps, whole, is_scheduled=is_scheduled)
        return AsFunctions(built, optimizer, lr_scheduler, built, steps, schedule)
    if steps is not None:
        raise UsageError(
            f"optimizer= is {an(optimizer)} that is built already, but model= builds a model with new parameters. "
            "Pass both built or both as functions: optimizer=lambda named: "
            f"torch.optim.{type(optimizer).__name__}([p for _, p in named], ...)."
        )
    if (trained := _trained_loss(loss, None, None)) is not None and callable(model):
        both = WithLoss(model, trained)
        return AsFunctions(both, optimizer, lr_scheduler, both, None)
    return AsFunctions(model, optimizer, lr_scheduler, None, None)


def _trained_loss(loss: Any, model: nn.Module | None, steps: torch.optim.Optimizer | None) -> nn.Module | None:
    """Return the part of a loss that trains: a module with parameters, or what a function uses and the optimizer has.

    Args:
        loss: as the script passes it.
        model: the script's own, if it has built it.
        steps: the optimizer, if the script has built it.
    """
    if isinstance(loss, nn.Module):
        return loss if any(parameter.requires_grad for parameter in loss.parameters()) else None
    if steps is None or model is None:
        return None
    own = {id(parameter) for parameter in model.parameters()}
    others = {id(p) for group in steps.param_groups for p in group["params"]} - own
    if not others:
        return None
    found = nn.Module()
    for name, value in tensors_and_modules(loss).items():
        held = value.parameters() if isinstance(value, nn.Module) else (value,)
        if value is not model and others.intersection(map(id, held)):
            setattr(found, name, value)
    return found
