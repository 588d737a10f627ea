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
may not touch the tensors of the script's model either.
"""

import copy
import functools
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from varuna.core.errors import UsageError
from varuna.data.told import SETTERS, with_setters
from varuna.engine.stage.parameter_groups import Writes
from varuna.job.handed_over.code_reads import MISSING, ReadPlace, Reads, is_library, written_at
from varuna.job.handed_over.marks import PLAIN, mark, shown, ways_into
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


_PLAINLY = (bool, int, float, str, list, dict, tuple)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_FIXED = (bool, int, float, str, type(None), torch.dtype, torch.device, *_CODE)
"""Kinds of values that cannot change themselves."""
_MOST_COPIED = 256


class _Watched:
    """A place, with what was there when the script last had no control."""

    def __init__(self, place: ReadPlace, role: Role, names: frozenset[str], depth: int = 0) -> None:
        self.place, self.role, self._names, self._depth = place, role, names, depth
        self.look()

    def look(self) -> bool:
        """Remember what is there now; return whether that is something else than before."""
        value, before = self.place.value(), self.mark
        if not self._is_same(value):
            self._value, self.mark, self._copy = value, self._mark_of(value), _copy_of_fixed(value)
        return bool(before != self.mark)

    def is_changed(self) -> bool:
        """Return whether something else is there."""
        value = self.place.value()
        return not self._is_same(value) and self._mark_of(value) != self.mark

    def _is_same(self, value: Any) -> bool:
        return value is self._value and (isinstance(value, _FIXED) or (self._copy is not None and value == self._copy))

    def _mark_of(self, value: Any) -> Any:
        return mark(value, self._names, self._depth)

    _value: Any = MISSING
    _copy: Any = None
    mark: Any = None


def _copy_of_fixed(value: Any) -> Any:
    """Copy a dict or a list of fixed values, which is compared faster than its mark; None: it is something else."""
    if type(value) not in (dict, list) or len(value) > _MOST_COPIED:
        return None
    inside = value.values() if type(value) is dict else value
    return copy.copy(value) if all(isinstance(each, _FIXED) for each in inside) else None


_ON_THE_WORKERS = (
    "The state is on the workers, where copies of the optimizer train: the loop can neither read nor change it. To "
    "begin anew with empty state, train in two runs: trainer.export(path) after the first, and weights=path in the "
    "second."
)


def _refuse_state(*_: object, **__: object) -> NoReturn:
    raise UsageError(f"the script asked for the state of the optimizer{_place('', _script_frame())}. {_ON_THE_WORKERS}")


def _refuse_setter(name: str, *_: object, **__: object) -> NoReturn:
    raise UsageError(
        f"the script called {name}() of the dataset{_place('', _script_frame())}. Samples are read ahead, by other "
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
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Look at everything; ``begin`` then watches.

        Args:
            functions: of the user's, with their roles.
            model: if the script has built it.
            optimizer: if the script has built it.
            kept: the user's ``state=``.
        """
        self._functions, self._kept = list(functions), {id(each) for each in (kept or {}).values()}
        self._optimizer, self._model = optimizer, model
        self.options = None if optimizer is None else ScriptOptions(optimizer)
        self.watch = None if model is None else ModuleWatch(model, _refuse_touch, self._names_of_forward)
        self._watched: list[_Watched] = []
        self._modules: list[tuple[Role, ModuleWatch]] = []
        self._plain: dict[str, Any] = {}
        self._state: Any = None
        self._begun = False

    @functools.cached_property
    def _reads_of_forward(self) -> Reads:
        found = Reads()
        if self._model is not None:
            found.follow(self._model, "model")
        return found

    def _names_of_forward(self) -> set[str]:
        return self._reads_of_forward.names | self._reads_of_forward.texts

    def begin(self) -> None:
        """Remember how everything is, before the script gets control for the first time."""
        for role, function in self._functions:
            self._add(role, function)
        if self._model is not None:
            inside = {id(each) for each in self._model.modules()}
            self._take(FORWARD, self._reads_of_forward, inside | {id(vars(each)) for each in self._model.modules()})
        if self.watch is not None:
            self.watch.begin()
        if self.options is not None:
            self.options.look()
        self._look_at_optimizer()
        for own, name in self._setters:
            own[name] = functools.partial(_refuse_setter, name)
        self._begun = True

    def end(self) -> None:
        """Watch no more: the script's model has the trained values, or is not used any more."""
        self._begun = False
        for own, name in self._setters:
            own.pop(name, None)
        if self._optimizer is not None and isinstance(self._optimizer.state, _StateAway):
            vars(self._optimizer)["state"] = self._state
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
    def script(self, options: Any = None) -> Iterator[None]:
        """In this block the script has control, with ``options`` of the next step in its optimizer's groups."""
        self._refuse_written_in_step()
        if self.options is not None:
            self.options.show(options)
        self._refresh()
        with nullcontext() if self.watch is None else self.watch.script():
            yield

    @contextmanager
    def callbacks(self, *, may_read: bool) -> Iterator[None]:
        """In this block functions of the user's run between Varuna's own code.

        Args:
            may_read: the script's model has the newest values here.
        """
        assert self.watch is not None
        self.watch.may_read = may_read
        with self.watch.script():
            yield

    def aside(self) -> AbstractContextManager[None]:
        """In this block Varuna works, asked for by the script."""
        return nullcontext() if self.watch is None else self.watch.engine()

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
                f"{'' if change.before is MISSING else values}{_place(change.last, where)}. {way_out}"
            )

    def written(self, step: int) -> Writes:
        """Options of the optimizer's groups that the script has written in its turn after ``step``.

        Raises:
            UsageError: it has changed something else in the groups, or writes otherwise when a step is repeated.
        """
        return {} if self.options is None or not self._begun else self.options.written_after(step)

    # -- looking --------------------------------------------------------------------------------------------

    def _add(self, role: Role, function: Any) -> None:
        found = Reads()
        found.follow(function, role.name)
        if role is DATASET and isinstance(function, list | tuple | Mapping):  # it has no code
            self._watch(ReadPlace(function, (), "dataset"), role)
        if isinstance(function, nn.Module):
            found.modules.setdefault(id(function), (function, role.name))
        self._take(role, found, set())

    def _take(self, role: Role, found: Reads, inside: set[int]) -> None:
        """Watch what some functions read, unless it lies in the model, which is watched as a whole."""
        names = frozenset(found.names | found.texts)
        own = set() if self._model is None else {id(each) for each in self._model.modules()}
        for module, _ in found.modules.values():
            if id(module) not in own:
                watch = ModuleWatch(module, _refuse_touch, functools.partial(set, names))
                watch.look()
                self._modules.append((role, watch))
        others = {id(each) for module, _ in found.modules.values() for each in module.modules()}
        for place in {(id(each.base), each.keys): each for each in map(_of_class, found.found())}.values():
            if id(place.base) in inside | own | others or (not role.captured and self._is_kept(place)):
                continue
            self._watch(place, role, names)

    def _watch(self, place: ReadPlace, role: Role, names: frozenset[str] = frozenset()) -> None:
        self._watched.append(_Watched(place, role, names))
        for way in ways_into(place.value()):
            name = "".join(f".{key}" if kind == "." else f"[{key!r}]" for kind, key in way)
            inside = ReadPlace(place.base, (*place.keys, *way), f"{place.name}{name}")
            self._watched.append(_Watched(inside, role, names, len(way)))

    def _is_kept(self, place: ReadPlace) -> bool:
        return any(
            id(place._replace(keys=place.keys[:stop]).value()) in self._kept for stop in range(len(place.keys) + 1)
        )

    def _refresh(self) -> None:
        """Take everything as it is now: the user's functions may have changed it in a step, a check or a capture.

        What has changed meanwhile by those that read ahead may change in the script's turn, too: it is their own.
        """
        self._watched = [each for each in self._watched if not (each.look() and each.role.way_out is _AHEAD)]

    def _look_at_optimizer(self) -> None:
        if self._optimizer is not None:
            own = vars(self._optimizer)
            self._plain = {key: mark(value) for key, value in own.items() if _is_option(key, value)}
            self._state, own["state"] = self._optimizer.state, _StateAway()

    def _changes(self) -> Iterator[tuple[Changed, str]]:
        for each in self._watched:
            if each.is_changed():
                place = each.place
                name = f"{place.name}, which {each.role.name} reads"
                yield Changed(name, _said(each.mark), place.value(), place.last), each.role.way_out
        for role, watch in self._modules:
            for change in watch.changes():
                yield change._replace(name=f"{change.name} of a module that {role.name} uses"), role.way_out
        if self.watch is not None:
            for change in self.watch.changes():
                yield change._replace(name=f"{change.name} of the model"), _way_out_of_model(change)
        if self._optimizer is not None:
            own = vars(self._optimizer)
            for key, before in self._plain.items():
                if key not in own or mark(own[key]) != before:
                    change = Changed(f"{key} of the optimizer", _said(before), own.get(key, "missing"), key)
                    yield (
                        change,
                        "Copies of it train on the workers. Set it before the loop, or keep it in param_groups.",
                    )
            if own["state"] is not self._state and not isinstance(own["state"], _StateAway):
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


def _is_option(key: str, value: Any) -> bool:
    """Return whether an optimizer's attribute is a value that its step may compute with."""
    is_own = key not in ("state", "param_groups", "defaults") and not key.startswith("_")
    return is_own and isinstance(value, (*PLAIN, list, dict))


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
    place = _place("", _script_frame())
    raise UsageError(f"the script {_DONE[what].format(name=name)} {_COPIES}, {_INSTEAD[what]}{place}")


def _script_frame() -> FrameType | None:
    """The innermost frame that is neither torch's, nor ours, nor a deepcopy's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*OWN, "<", copy.__file__)):
        frame = frame.f_back
    return frame


def _place(last: str, frame: FrameType | None) -> str:
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
