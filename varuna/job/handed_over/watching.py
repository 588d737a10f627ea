"""One object for all that the script has handed over to its Trainer, watched while the script has control.

Training runs on copies: of the model and the optimizer, and of what the loss computed when it was captured. What the
script then does to its own objects would have no effect, or another one on each worker, so it is taken over or refused.

Where the line is. Options in the groups of a built optimizer are taken over. Refused are changes of what training
reads: tensors, modes and attributes of a built model; attributes of a built optimizer; and what the code of loss=,
metrics=, before_step=, collate=, the weight, the dataset and functions that build model, optimizer and scheduler loads
from closures, globals and attributes of its object, in functions that it calls by such a name too. Of arrays and of
long lists a few entries are compared. Everything else is the script's own business: a list to which it appends losses,
a key of a dict or an attribute that no such code names, what such code stores itself (a counter, a cache), random
generators, and whatever state= names for before_step=. Functions that run within a step use what they are given: they
may not touch the tensors of the script's model either. In the order of a run::

    with before_capture():    remember what is where captured code will keep values; note the files that it reads
        ... capture ...
    begin()                   put that back; mark all that training reads
    script(options):          the script's turn: groups show the next step's options, tensors of the model refuse
        ... loop body ...     to be touched, and asking for a kept value is refused
    check()                   marks and files that differ are refused
    written(step)             options that the body wrote, for all workers
    unwatched():              evaluate, predict, generate, export: what changes is Varuna's own doing
    end()                     the model has the trained values
"""

import copy
import functools
import inspect
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from varuna.core.errors import UsageError
from varuna.data.placed_datasets import SETTERS, with_setters
from varuna.engine.stage.parameter_groups import Writes
from varuna.job.handed_over.code_reads import MISSING, ReadPlace, Reads, is_library, written_at
from varuna.job.handed_over.file_reads import FileReads
from varuna.job.handed_over.kept_values import KeptValues
from varuna.job.handed_over.marks import PLAIN, attributes, mark_of, shown, ways_into
from varuna.job.handed_over.module_watch import Changed, ModuleWatch
from varuna.job.handed_over.script_options import ScriptOptions
from varuna.partition.watching.own_code import OWN

_GUIDE = "See docs/bring-your-script.md, section Values that follow the step."
_BY_STEP = (
    'What depends on the step goes through the batch: batch["step"] in loss=, or a parameter of forward() that is '
    f"named step, is the number of the step for each example, as a tensor. {_GUIDE}"
)
_COPIES = "of the model that it passed to varuna.Trainer. Copies of it train on the workers"
_INSTEAD = {
    "read": (
        "until the loop over trainer.steps(n) has ended, its own values are those from before step 0. To measure, "
        "trainer.evaluate or trainer.predict; for an average of the weights, ema=; for values and gradients of each "
        "step, those that before_step= is given; to save, trainer.export(path)."
    ),
    "gradient": (
        "and have the gradients: step.grad_norm is their norm, clip_grad_norm= clips them, and before_step= is given "
        "the parameters of each stage, which have theirs. Leave this out of the loop over trainer.steps(n)."
    ),
    "optimizer": (
        "with the optimizer that was passed before step 0, so another one would have no effect. Rates and other "
        "options can be written into the groups of that one. For another kind of update from some step on, train "
        "twice: varuna.Trainer with this optimizer behind the loop, over the model, which has the trained values then."
    ),
    "write": (
        "so that would have no effect. To change parameters after each update, such as clamping weights, pass "
        "after_step=: it runs once per step, after the optimizer, and changes the parameters and buffers that it is "
        "given, which are all. For an average of the weights, ema=."
    ),
    "write to frozen": (
        "so that would have no effect. Compute what follows from trained parameters, like a teacher, in after_step=, "
        "which runs once per step, after the optimizer, with all parameters and buffers. For an average to evaluate "
        "and export with, ema=."
    ),
    "requires_grad": (
        "and which parameters can be trained is decided before step 0. Leave requires_grad True for all that are "
        "trained in some step, and in the optimizer, and pass frozen=, a function that says which of them a step "
        "leaves as they are: frozen=lambda name, step: name.startswith('backbone.') and step < 1000."
    ),
}
_DONE = {
    "read": "read {name}",
    "gradient": "asked for the gradient of {name}",
    "optimizer": "built an optimizer over {name}",
    "write": "wrote to {name}",
    "write to frozen": "wrote to {name}, which no optimizer trains,",
    "requires_grad": "changed requires_grad of {name}",
}


class Role(NamedTuple):
    """The use of a user's function, and when its code runs."""

    name: str
    captured: bool
    """it ran once, before step 0, so nothing that it reads may change; else it runs in steps, and may read state="""
    way_out: str


_CAPTURED = f"It was captured before step 0, with the value of then. {_BY_STEP}"
_AHEAD = (
    "Samples are read ahead, by other threads or processes, and again by other workers. Let a sample depend on its "
    "place in the run: a method set_step(step) or set_epoch(epoch) of the dataset is called by those who read, before "
    "a sample of another step or pass; and a dataset without __len__ is asked for dataset[position], and decides "
    f"itself which sample that is. {_GUIDE}"
)
_BUILDS = "It is called again whenever workers come or go. Let it depend on values that do not change."
LOSS, METRICS = Role("loss=", True, _CAPTURED), Role("metrics=", True, _CAPTURED)
COMPUTE_LOSS = Role("compute_loss()", True, _CAPTURED)
FORWARD = Role("forward()", True, _CAPTURED)
_KEPT = (
    "A worker that joins and a resumed run would begin with another value. Keep it in a dict that state= names: "
    'state={"schedule": schedule}, and schedule["value"] = ... in the loop.'
)
_OF_STEP = "It must be the same on all workers, and when a step is repeated: let it follow from step."
FROZEN, RAMP = Role("frozen=", False, _OF_STEP), Role("batch_ramp=", False, _OF_STEP)
BEFORE_STEP, AFTER_STEP = Role("before_step=", False, _KEPT), Role("after_step=", False, _KEPT)
COLLATE, WEIGHT, DATASET = (
    Role("collate=", False, _AHEAD),
    Role("weight=", False, _AHEAD),
    Role("dataset", False, _AHEAD),
)
MODEL, OPTIMIZER = Role("model=", True, _CAPTURED), Role("optimizer=", False, _BUILDS)
SCHEDULER = Role("lr_scheduler=", False, _BUILDS)
_KEEPING = (LOSS, METRICS, COMPUTE_LOSS, FORWARD)
"""Those that may keep values, and run once."""
OF_OPTIMIZER = Role(
    "a hook or a function in optimizer=",
    True,
    "Workers run copies of it, with values of their own. Let what changes follow from the number of the step: "
    'batch["step"] in loss=, a method set_step(step) of the dataset, before_step(named, step).',
)
_FOR_STEPS = (
    "Samples are read ahead, by other threads or processes. Compute it from the number of the step: "
    "before_step(named, step), after_step(parameters, buffers, step)."
)
_IN_STEP = (BEFORE_STEP, AFTER_STEP, FROZEN, RAMP, SCHEDULER)
_UNSEEN = {OF_OPTIMIZER: None, DATASET: _IN_STEP, COLLATE: _IN_STEP, WEIGHT: _IN_STEP}
"""Those who write where others, or all, do not see it: in copies; ahead of the step, or in other processes."""


_PLAINLY = (bool, int, float, str, list, dict, tuple)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
"""Tables of hooks that torch calls for all modules."""


class _All(frozenset[str]):
    """The set of all names."""

    def __contains__(self, _: object) -> bool:
        return True

    def intersection(self, *others: Iterable[Any]) -> "frozenset[str]":
        """Return those of the others."""
        return frozenset(others[0])


_ALL = _All()
_FIXED = (bool, int, float, str, type(None), torch.dtype, torch.device, *_CODE)
"""Kinds of values that cannot change themselves."""
_CONTAINERS = (torch.Tensor, Mapping, list, tuple, set, frozenset, deque)
_MOST_COPIED = 256


class _Watched:
    """A place, with what was there when the script last had no control."""

    def __init__(self, place: ReadPlace, role: Role, names: frozenset[str], depth: int = 0) -> None:
        self.place, self.role, self._names, self._depth = place, role, names, depth
        self.remember()

    def remember(self) -> bool:
        """Remember what is there now; return whether that is something else than before."""
        value, before = self.place.value(), self.mark
        if not self._is_same(value):
            self._value, self._is_fixed = value, _is_fixed(value)
            self.mark, self._copy = self._mark_of(value), _copy_of_fixed(value, self._names)
        return bool(before != self.mark)

    def is_changed(self) -> bool:
        """Return whether something else is there."""
        value = self.place.value()
        if value is self._value and self._is_fixed:  # most are, and each of them is asked in each step
            return False
        return not self._is_same(value) and self._mark_of(value) != self.mark

    def changed_from(self, before: Any) -> Changed:
        """Tell the change since ``before``, a mark."""
        read, now = f", which {self.role.name} reads" if self.role.name else "", self.place.value()
        now = now if self.place.keys else _said(self._mark_of(now))
        return Changed(f"{self.place.name}{read}", _said(before), now, self.place.last)

    def _is_same(self, value: Any) -> bool:
        if value is not self._value or self._is_fixed:
            return value is self._value
        try:
            return self._copy is not None and bool(_inside(value) == self._copy)
        except Exception:  # noqa: BLE001 - tensors, or the user's own __eq__
            return False

    def _mark_of(self, value: Any) -> Any:
        own = None if self.place.keys or issubclass(type(value), _CONTAINERS) else attributes(value)
        if own is not None:
            value = {key: each for key, each in own.items() if key in self._names}
        return mark_of(value, self._names, self._depth)

    # of the class, so that the first remember() has something to compare with
    _value: Any = MISSING
    _is_fixed = True
    _copy: Any = None
    mark: Any = None


class _Own:
    """Attributes of an optimizer or a schedule, with which its code may compute."""

    def __init__(self, owner: Any, name: str, way_out: str) -> None:
        self._own, self._name, self.way_out, role = vars(owner), name, way_out, Role("", True, way_out)
        self._left_out = {"state", "param_groups", "optimizer", "_step_count", "_opt_called", "_last_lr"}
        if type(owner).__module__.startswith("torch."):
            self._left_out.add("defaults")  # for groups to come
        self._count = len(self._own)
        self.watched = {
            key: _Watched(ReadPlace(owner, ((".", key),), f"{key} of {name}"), role, _ALL)
            for key in self._own.keys() - self._left_out
        }

    def changes(self) -> Iterator[Changed]:
        """Tell what differs from before."""
        for each in self.watched.values():
            if each.is_changed():
                yield each.changed_from(each.mark)
        if len(self._own) != self._count:
            for key in self._own.keys() - self.watched.keys() - self._left_out:
                if not hasattr(self._own[key], "_wrapped_by_lr_sched"):  # by a schedule of the loop's
                    yield Changed(f"{key} of {self._name}", "missing", self._own[key], key)


def _copy_of_fixed(value: Any, names: frozenset[str]) -> Any:
    """Copy what has fixed values in it, which is compared faster than its mark; None: it has others."""
    inside = None if isinstance(value, _FIXED) else _inside(value)
    if inside is None or len(inside) > _MOST_COPIED:
        return None
    is_whole = inside is value or isinstance(value, Mapping)
    keys = inside if is_whole else names.intersection(inside) if isinstance(inside, dict) else ()
    values = [inside[key] for key in keys] if isinstance(inside, dict) else inside
    return copy.copy(inside) if all(map(_is_fixed, values)) else None


def _inside(value: Any) -> Any:
    """Values in a container, or an object's attributes."""
    if type(value) in (dict, OrderedDict, list, tuple, torch.Size):
        return value
    if isinstance(value, Mapping) and len(value) <= _MOST_COPIED:
        return dict(value)
    return None if issubclass(type(value), _CONTAINERS) else attributes(value)


def _is_fixed(value: Any) -> bool:
    return isinstance(value, _FIXED) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


_COPIED = "Copies of it train on the workers. Set it before the loop, or keep it in param_groups."
_SCHEDULED = (
    "A copy of it advances on the workers. Set it before the loop; or write rates into the optimizer's param_groups, "
    "with no lr_scheduler=, which all workers take over."
)
_ON_THE_WORKERS = (
    "The state is on the workers, where copies of the optimizer train: the script can neither read nor change it, also "
    "after the loop. To train on with it, checkpoints=: the same command goes on from there. To begin anew with empty "
    "state, train in two runs: trainer.export(path) after the first, and weights=path in the second."
)


def _refuse_state(*_: object, **__: object) -> NoReturn:
    raise UsageError(
        f"the script asked for the state of the optimizer{at_line('', _script_frame())}. {_ON_THE_WORKERS}"
    )


def _of_kept(writer: str) -> str:
    instead = (
        "Evaluations run it as it is written: log the value there, or compute it in compute_metrics=."
        if writer == COMPUTE_LOSS.name
        else "Let metrics=, a function of the output of forward() and the batch, return it as a scalar by name: "
        "step.metrics has the sum over the global batch."
    )
    return f"{writer} was captured before step 0, and does not write in a step. {instead}"


def _refuse_kept(writer: str, name: str) -> NoReturn:
    place = at_line("", _script_frame())
    raise UsageError(f"the script asked for {name}, which {writer} writes{place}. {_of_kept(writer)}")


def _refuse_setter(name: str, *_: object, **__: object) -> NoReturn:
    raise UsageError(
        f"the script called {name}() of the dataset{at_line('', _script_frame())}. Samples are read ahead, by other "
        f"threads or processes: Varuna calls {name}() itself, just before it reads a sample, with the "
        f"{'pass over the dataset' if name == 'set_epoch' else 'step'} that the sample belongs to. Leave it out of the "
        "loop over trainer.steps(n)."
    )


class _StateAway(defaultdict[Any, Any]):
    """A stand-in for the state of the script's optimizer; any access to it is an error."""

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse_state
    get = items = keys = values = pop = popitem = setdefault = update = clear = copy = _refuse_state


class HandedOver:
    """Everything that training has from the script, as it was when the script last had no control."""

    def __init__(
        self,
        functions: Iterable[tuple[Role, Any]],
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: LRScheduler | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Look at everything; ``begin`` then watches.

        Args:
            functions: of the user's, with their roles.
            model: if the script has built it.
            optimizer: if the script has built it.
            schedule: of the optimizer, if the script has built it.
            kept: the user's ``state=``.
        """
        self._functions, self._kept = list(functions), {id(each) for each in (kept or {}).values()}
        self._optimizer, self._schedule, self._model = optimizer, schedule, model
        self.options = None if optimizer is None else ScriptOptions(optimizer)
        self.watch = None if model is None else ModuleWatch(model, _refuse_touch, self._names_of_forward)
        self._kept_values = KeptValues((), (), _refuse_kept)
        self._files = FileReads(function for role, function in self._functions if role in _KEEPING)
        self._read_in_steps: list[tuple[str, ReadPlace]] = []
        self._watched: list[_Watched] = []
        self._modules: list[tuple[Role, ModuleWatch]] = []
        self._own: list[_Own] = []
        self._begun = False

    @functools.cached_property
    def _reads_of_forward(self) -> Reads:
        found = Reads()
        if self._model is not None:
            found.follow_reads(self._model, "model")
        return found

    def _names_of_forward(self) -> set[str]:
        return self._reads_of_forward.names | self._reads_of_forward.texts

    def before_capture(self) -> AbstractContextManager[None]:
        """Remember what is where captured code will keep values; return the block in which it is captured."""
        written, read = list[tuple[str, ReadPlace]](), list[tuple[str, ReadPlace]]()
        for role, function in [*self._functions, (FORWARD, self._model)]:
            if role in _KEEPING and function is not None:
                found = self._reads_of_forward if role is FORWARD else Reads()
                if role is not FORWARD:
                    found.follow_reads(function, role.name)
                written += [(role.name, each) for each in found.kept]
                own = getattr(function, "__self__", found)  # such as Hugging Face's Trainer, which others change, too
                read += [(role.name, each) for each in found.places.values() if each.base is not own]
        self._kept_values = KeptValues(written, read, _refuse_kept)
        return self._files.noted()

    def begin(self) -> None:
        """Remember how everything is, before the script gets control for the first time.

        Raises:
            UsageError: a function reads what another one writes that runs elsewhere, or once.
        """
        self._kept_values.restore()
        self._refuse_unseen([(role, self._add(role, function)) for role, function in self._functions])
        if self._model is not None:
            inside = {id(each) for each in self._model.modules()}
            self._take(FORWARD, self._reads_of_forward, inside | {id(vars(each)) for each in self._model.modules()})
        self._refuse_reads_of_kept()
        self._watched += [_Watched(ReadPlace(torch_module, ((".", each),), each), FORWARD, _ALL) for each in _GLOBAL]
        if self.watch is not None:
            self.watch.begin()
        if self.options is not None:
            self.options.remember()
        if self._optimizer is not None:
            vars(self._optimizer)["state"] = _StateAway()  # for good: nothing brings the state here after the loop
            self._own.append(_Own(self._optimizer, "the optimizer", _COPIED))
        if self._schedule is not None:
            self._own.append(_Own(self._schedule, "the schedule", _SCHEDULED))
            self._first_epoch = self._schedule.last_epoch
        for own, name in self._setters:
            own[name] = functools.partial(_refuse_setter, name)
        self._begun = True

    def end(self) -> None:
        """Watch no more: the script's model has the trained values, or is not used any more."""
        self._begun = False
        for own, name in self._setters:
            own.pop(name, None)
        if self.watch is not None:
            self.watch.end()

    @functools.cached_property
    def _setters(self) -> list[tuple[dict[str, Any], str]]:
        """Attributes of the dataset, and methods that tell it where the run is, which readers call by its class."""
        return [
            (vars(dataset), name)
            for role, each in self._functions
            if role is DATASET
            for dataset in with_setters(each)
            for name in SETTERS
            if hasattr(type(dataset), name) and hasattr(dataset, "__dict__") and name not in vars(dataset)
        ]

    @contextmanager
    def script(self, options: Any = None, *, steps: int = 0) -> Iterator[None]:
        """Give the script control in this block.

        Args:
            options: of the next step, for its optimizer's groups.
            steps: that have been made.
        """
        self._refuse_written_in_step()
        if self._kept_values.restored_first():
            self._refuse_reads_of_kept()
        if self.options is not None:
            self.options.show_options(options)
        self._show_schedule(steps)
        self._refresh()
        with self._kept_values.hidden(), nullcontext() if self.watch is None else self.watch.script():
            yield

    @contextmanager
    def callbacks(self, *, may_read: bool) -> Iterator[None]:
        """Let functions of the user's run in this block, between Varuna's own code.

        Args:
            may_read: the script's model has the newest values here.
        """
        assert self.watch is not None
        self.watch.may_read = may_read
        with self._kept_values.hidden(), self.watch.script():
            yield

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let Varuna work in this block, asked for by the script; it may call the user's functions."""
        with nullcontext() if self.watch is None else self.watch.engine(), self._kept_values.shown():
            yield
        for each in self._watched:
            each.remember()

    def check(self, where: FrameType | None, who: str = "the script") -> None:
        """Refuse what the script has changed of what training reads.

        Args:
            where: the frame of the script that is running.
            who: had control.

        Raises:
            UsageError: there is something.
        """
        for change, way_out in self._changes() if self._begun else ():
            values = f": it was {shown(change.before)}, and is now {shown(change.now)}"
            raise UsageError(
                f"while trainer.steps(n) was running, {who} changed {change.name}"
                f"{'' if change.before is MISSING else values}{at_line(change.last, where)}. {way_out}"
            )
        if self._begun and (file := self._files.changed()) is not None:
            raise UsageError(
                f"while trainer.steps(n) was running, {file.path} changed{at_line('', where)}. The code at "
                f"{file.read_at} reads it. {_CAPTURED}"
            )

    def written(self, step: int) -> Writes:
        """Options of the optimizer's groups that the script has written in its turn after ``step``.

        Raises:
            UsageError: it has changed something else in the groups, or writes otherwise when a step is repeated.
        """
        return {} if self.options is None or not self._begun else self.options.written_after(step)

    # -- looking --------------------------------------------------------------------------------------------

    def _refuse_unseen(self, found: list[tuple[Role, Reads]]) -> None:
        """Refuse what one function writes for another that does not see it.

        Raises:
            UsageError: there is something.
        """
        forward = [(FORWARD, self._reads_of_forward)] if self._model is not None else []
        for writer, written in found:
            readers = _UNSEEN.get(writer, ())
            for reader, reads in (*found, *forward):
                is_unseen = reader is not writer and (readers is None or reader in readers)
                if is_unseen and (place := reads.read_of(written)) is not None:
                    raise UsageError(
                        f"{writer.name} writes {place.name}, which {reader.name} reads. It may read another value than "
                        f"in a plain loop. {writer.way_out if readers is None else _FOR_STEPS}"
                    )

    def _add(self, role: Role, function: Any) -> Reads:
        found = Reads()
        found.follow_reads(function, role.name)
        if role is DATASET and isinstance(function, list | tuple | Mapping):  # it has no code
            self._watch(ReadPlace(function, (), "dataset"), role)
        if isinstance(function, nn.Module):
            found.modules.setdefault(id(function), (function, role.name))
        self._take(role, found, set())
        return found

    def _take(self, role: Role, found: Reads, inside: set[int]) -> None:
        """Watch what some functions read, unless it lies in the model, which is watched as a whole."""
        names = frozenset(found.names | found.texts)
        own = set() if self._model is None else {id(each) for each in self._model.modules()}
        for module, _ in found.modules.values():
            if id(module) not in own:
                watch = ModuleWatch(module, _refuse_touch, functools.partial(set, names))
                watch.remember()
                self._modules.append((role, watch))
        for place in found.singletons():
            self._watch(place, role, names - found.stored)
        own |= inside | {id(each) for module, _ in found.modules.values() for each in module.modules()}
        places = (_of_class(each) for each in found.found())
        within = (_beside_modules(each) if id(each.base) in own else each for each in places)
        for place in {(id(each.base), each.keys): each for each in within if each is not None}.values():
            if not place.keys:  # an object that is passed on; what its own code writes is its own
                if role.captured:
                    self._watch(place, role, names - found.stored)
                continue
            is_shown = self._optimizer is not None and (".", "param_groups") in place.keys
            if not role.captured and (is_shown or self._is_kept(place)):
                continue
            if not role.captured:
                self._read_in_steps.append((role.name, place))
            self._watch(place, role, names)

    def _watch(self, place: ReadPlace, role: Role, names: frozenset[str] = frozenset()) -> None:
        self._watched.append(_Watched(place, role, names))
        for way in ways_into(place.value()):
            name = "".join(f".{key}" if kind == "." else f"[{key!r}]" for kind, key in way)
            inside = ReadPlace(place.base, (*place.keys, *way), f"{place.name}{name}")
            self._watched.append(_Watched(inside, role, names, len(way)))

    def _refuse_reads_of_kept(self) -> None:
        for reader, place in self._read_in_steps:
            if writer := self._kept_values.writer_of(place):
                raise UsageError(f"{reader} reads {place.name}, which {writer} writes. {_of_kept(writer)}")

    def _is_kept(self, place: ReadPlace) -> bool:
        return any(
            id(place._replace(keys=place.keys[:stop]).value()) in self._kept for stop in range(len(place.keys) + 1)
        )

    def _refresh(self) -> None:
        """Take what functions of the step read as it is now: they may have changed it, too.

        What has changed meanwhile by those that read ahead may change in the script's turn, too: it is their own.
        What was captured may not change at all.
        """
        self._watched = [
            each
            for each in self._watched
            if each.role.captured or not (each.remember() and each.role.way_out is _AHEAD)
        ]

    def _show_schedule(self, steps: int) -> None:
        """Let the script's schedule tell how far it is, and the rates of the next step."""
        if self._schedule is None or self._optimizer is None:
            return
        vars(self._schedule)["_last_lr"] = [group["lr"] for group in self._optimizer.param_groups]
        if not isinstance(self._schedule, ReduceLROnPlateau):
            self._schedule.last_epoch = self._first_epoch + steps
            self._own[-1].watched["last_epoch"].remember()

    def _changes(self) -> Iterator[tuple[Changed, str]]:
        for each in self._watched:
            if each.is_changed():
                yield each.changed_from(each.mark), each.role.way_out
        for role, watch in self._modules:
            for change in watch.changes():
                yield change._replace(name=f"{change.name} of a module that {role.name} uses"), role.way_out
        if self.watch is not None:
            for change in self.watch.changes():
                yield change._replace(name=f"{change.name} of the model"), _way_out_of_model(change)
        for own in self._own:
            yield from ((change, own.way_out) for change in own.changes())
        if self._optimizer is not None and not isinstance(vars(self._optimizer)["state"], _StateAway):
            change = Changed("the state of the optimizer", "empty", "other state", "state")
            yield change, _ON_THE_WORKERS

    def _refuse_written_in_step(self) -> None:
        if self.options is not None and (found := self.options.written()):
            (group, key), value = next(iter(found.items()))
            raise UsageError(
                f"a function that runs within the step wrote {key}={shown(value)} into param_groups[{group}] of the "
                "script's optimizer. Workers take over what the loop over trainer.steps(n) writes: do it there."
            )


def _of_class(place: ReadPlace) -> ReadPlace:
    """Return the place itself, or in the class, if a module has the attribute from there."""
    base, key = place.base, place.keys[0][1] if place.keys else None
    if (
        not isinstance(base, nn.Module)
        or key in vars(base)
        or not isinstance(getattr(type(base), str(key), None), _PLAINLY)
    ):
        return place
    return place._replace(base=type(base))


def _beside_modules(place: ReadPlace) -> ReadPlace | None:
    """The inside of a module's attribute; None: the module is watched, and that is all."""
    owner, value = place._replace(keys=place.keys[:-1]).value(), place.value()
    if not isinstance(owner, nn.Module | dict) and owner is not MISSING:
        return place._replace(base=owner, keys=place.keys[-1:])  # many layers share a configuration
    if len(place.keys) > 1 and isinstance(owner, dict):
        return place
    is_seen = isinstance(value, nn.Module | nn.Parameter) or value is MISSING or _is_fixed(value)
    is_buffer = isinstance(owner, nn.Module) and place.keys[-1][1] in owner._buffers
    return None if is_seen or is_buffer or not isinstance(owner, nn.Module) else place


def _said(before: Any) -> Any:
    """Return the part of a mark that people are shown."""
    match before:
        case (dict() as inner, int()):
            return inner
        case (list() as inner, int()) if all(isinstance(each, PLAIN) for each in inner):
            return inner
        case (tuple(), list() as values):
            return values
        case tuple():
            return MISSING
    return before


def _way_out_of_model(change: Changed) -> str:
    if change.kind in _INSTEAD:
        return f"Copies of it train on the workers, {_INSTEAD[change.kind]}"
    if change.last == "training":
        return (
            "The modes of modules are those from before step 0. Set them before varuna.Trainer, and leave train() and "
            "eval() of single modules out of the loop."
        )
    return f"Copies of the model train on the workers, with the value from before step 0. {_BY_STEP}"


def _refuse_touch(name: str, what: str) -> NoReturn:
    place = at_line("", _script_frame())
    raise UsageError(f"the script {_DONE[what].format(name=name)} {_COPIES}, {_INSTEAD[what]}{place}")


def _script_frame() -> FrameType | None:
    """The innermost frame that is neither a library's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_library(frame.f_code.co_filename) or frame.f_code.co_filename.startswith((*OWN, "<"))
    ):
        frame = frame.f_back
    return frame


def at_line(last: str, frame: FrameType | None) -> str:
    """File and line, for a message: of the statement that writes to ``last``, else where ``frame`` is."""
    if frame is None:
        return ""

    def codes() -> Iterator[types.CodeType]:
        yield frame.f_code
        seen = sys.modules.get("__main__")
        for scope in (frame.f_locals, frame.f_globals, vars(seen) if seen is not None else {}):
            for each in list(scope.values()):
                code = getattr(inspect.unwrap(each) if isinstance(each, types.FunctionType) else None, "__code__", None)
                if code is not None and not is_library(code.co_filename) and not code.co_filename.startswith(OWN):
                    yield code

    file, line = (last and written_at(last, codes)) or (frame.f_code.co_filename, frame.f_lineno)
    return f" ({Path(file).name}:{line})"
