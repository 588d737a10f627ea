"""The user's ``after_step``: run over the whole model by name, although a worker holds only a part of it.

What is not here takes part as a tensor without data. Every tensor is followed, by its memory, to the names whose values
went into it: so one dry run says which names the function computes others from, and in a run nothing that is here can
become what it would not be in one process.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from varuna.core.errors import ModelError, UsageError, VarunaError
from varuna.data.randomness import derive_key, seeded
from varuna.partition.graph.captured import TensorKind
from varuna.partition.graph.operations import closure
from varuna.partition.object_copies import independent
from varuna.partition.watching.fake_mode import FakeMode

AfterStep = Callable[..., None]
"""``fn(parameters, buffers)``, dicts of tensors by the model's own names, or ``fn(parameters, buffers, step)``."""

Names = frozenset[str]
_NONE: Names = frozenset()
_SHOWN = 3


@dataclass(frozen=True)
class Following:
    """The names that ``after_step`` writes, and those that it computes them from, by a dry run before the cut."""

    parameters: Mapping[str, TensorKind]
    """all of the model, by first name, in its order"""
    buffers: Mapping[str, TensorKind]
    sources: Mapping[str, Names]
    """name that the function writes -> names whose values go into that"""

    @property
    def written(self) -> Names:
        """Names that the function writes."""
        return frozenset(self.sources)

    @property
    def involved(self) -> Names:
        """Names that the function writes, or computes them from."""
        return self.written.union(*self.sources.values())

    def needed_by(self, names: Iterable[str]) -> Names:
        """Return what must be held with some names, so that the function makes of them what it makes in one process."""
        return frozenset(closure(names, lambda name: self.sources.get(name, ())))


class _ByName(dict[str, Tensor]):
    """Tensors by name, to be written in place."""

    def __setitem__(self, name: str, value: object) -> Never:
        raise UsageError(
            f"after_step= must write {name!r} in place, by .copy_(value), .lerp_(other, weight) or .zero_(); what "
            "replaces an entry of the dict changes nothing."
        )

    __delitem__ = pop = popitem = update = setdefault = clear = __setitem__  # type: ignore[assignment]


@dataclass
class _Memory:
    """The origin of one tensor's memory."""

    storage: torch.UntypedStorage
    """kept, so that no other takes its place"""
    sources: Names
    written: bool = False


@dataclass
class _Following(TorchDispatchMode):
    """Runs operations on what is here, and only follows those on what is not."""

    seed: tuple[int | str, ...]
    answer: int
    """stands for a Python number that follows from tensors without data"""
    _known: dict[int, _Memory] = field(default_factory=dict)
    _numbers: Names = _NONE
    """names that went into Python numbers, so that they may have decided on everything since"""
    _draws: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = FakeMode(allow_non_fake_inputs=True)

    def absent(self, name: str, kind: TensorKind, device: torch.device) -> Tensor:
        """Make a tensor without data, in place of one that is not here."""
        with self._fakes:
            made = torch.empty(kind.shape, dtype=kind.dtype, device=device)
        self._known[_key(made)] = _Memory(made.untyped_storage(), frozenset([name]))
        return nn.Parameter(made, requires_grad=True) if kind.trained else made

    def sources_of(self, tensor: Tensor) -> Names:
        """Return the names of what is not here whose values are in a tensor's."""
        known = self._known.get(_key(tensor))
        return _NONE if known is None else known.sources

    def is_written(self, tensor: Tensor) -> bool:
        """Return whether anything was written to what is not here, or follows from it."""
        known = self._known.get(_key(tensor))
        return known is not None and known.written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._seed(kwargs)
        lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)]
        if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")) and lists:
            return self._each(func, args, kwargs, len(lists[0]))
        sources = self._numbers
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(self.sources_of(each) or isinstance(each, FakeTensor) for each in given):
            if sources:
                self._write(func, args, kwargs, sources)
            return func(*args, **kwargs)
        sources = sources.union(*(self.sources_of(each) for each in given))
        written = self._write(func, args, kwargs, sources)
        # an operation in place returns what it writes
        if written and len(func._schema.returns) <= len(written):
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        made = self._without_data(func, args, kwargs)
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._note(each, sources)
            elif isinstance(each, int | float | bool | complex) and not _is_shape(func):
                self._numbers |= sources
        return made

    def _without_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute results without data; if their shapes or numbers follow from data, from a stand-in's."""
        try:
            with self._fakes:
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
            args, kwargs = tree_map_only(FakeTensor, self._stand_in, (args, kwargs))
            made = func(*args, **kwargs)
            with self._fakes:
                return tree_map_only(Tensor, lambda each: torch.empty_like(each), made)

    def _stand_in(self, value: Tensor) -> Tensor:
        return torch.full(tuple(value.shape), self.answer, dtype=value.dtype)

    def _write(self, func: Any, args: Any, kwargs: Any, sources: Names) -> list[Tensor]:
        """Note what an operation writes; returns those tensors."""
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        written = [
            leaf
            for argument, value in named
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]
        for each in written:
            self._note(each, sources, written=True)
        return written

    def _note(self, tensor: Tensor, sources: Names, *, written: bool = False) -> None:
        known = self._known.get(_key(tensor))
        if known is None:
            known = self._known[_key(tensor)] = _Memory(tensor.untyped_storage(), _NONE)
        known.sources |= sources
        known.written |= written

    def _each(self, func: Any, args: Any, kwargs: Any, length: int) -> Any:
        """Run an operation on lists by element: those that are here, and those that are not."""

        def at(place: int, value: Any) -> Any:
            is_list = isinstance(value, list | tuple) and len(value) == length and length > 0
            return [value[place]] if is_list else value

        made: list[Any] = []
        for place in range(length):
            some = [at(place, value) for value in args]
            more = {name: at(place, value) for name, value in kwargs.items()}
            tensors = [leaf for leaf in tree_leaves((some, more)) if isinstance(leaf, Tensor)]
            if any(self.sources_of(each) or isinstance(each, FakeTensor) for each in tensors) or self._numbers:
                sources = self._numbers.union(*(self.sources_of(each) for each in tensors))
                written = self._write(func, some, more, sources)
                if not written:
                    found = self._without_data(func, some, more)
                    for each in tree_leaves(found):
                        self._note(each, sources)
                    made += found if isinstance(found, list | tuple) else []
            else:
                found = func(*some, **more)
                made += found if isinstance(found, list | tuple) else []
        return made or None

    def _seed(self, kwargs: Mapping[str, Any]) -> None:
        """Seed a draw, so that it is the same wherever the function runs, whatever of the model is there."""
        if kwargs.get("generator") is not None:
            raise UsageError(
                "after_step= must draw from torch's default generator, which is seeded by the run's seed and the step, "
                "so that all workers draw the same. Leave generator= out."
            )
        self._draws += 1
        key = derive_key(*self.seed, self._draws)
        torch.default_generator.manual_seed(key)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(key)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_shape(func: Any) -> bool:
    return bool(func._schema.name.startswith(("aten::sym_", "aten::size", "aten::stride", "prim::")))


def trace(function: AfterStep, parameters: Mapping[str, TensorKind], buffers: Mapping[str, TensorKind]) -> Following:
    """Run the function on tensors without data, and see which it writes and what goes into them.

    Args:
        function: the user's.
        parameters: all of the model, by first name.
        buffers: likewise.

    Raises:
        UsageError: it writes nothing, or something else than tensors in place.
        ModelError: it fails on tensors without data.
    """
    sources: dict[str, Names] = {}
    device = torch.device("cpu")
    # Python numbers made of tensors without data are all 1 first, then all 0: both ways of an if are seen
    for answer in (1, 0):
        tried = independent(function)  # what the function remembers stays as it is
        mode = _Following(seed=("after_step",), answer=answer)
        shown = [_ByName({n: mode.absent(n, k, device) for n, k in kinds.items()}) for kinds in (parameters, buffers)]
        values = {name: value for each in shown for name, value in each.items()}
        try:
            _call(tried, shown, 0, mode)
        except VarunaError:
            raise
        except Exception as error:
            if answer == 0 and sources:
                continue
            raise ModelError(
                "after_step= was tried before step 0 on tensors that have shapes but no values, to see what it "
                f"computes from what, and failed: {type(error).__name__}: {error}. It is given all parameters and all "
                "buffers of the model, as dicts by name, and must write to them in place, by operations of torch; "
                "where values decide, use torch.where."
            ) from error
        for name, value in values.items():
            if mode.is_written(value):
                sources[name] = sources.get(name, _NONE) | mode.sources_of(value)
    if not sources:
        raise UsageError(
            "after_step= wrote to no parameter and no buffer of the model when it was tried before step 0, for step 0. "
            "It is given dicts of tensors by name, which it changes in place, such as "
            "parameters['teacher.weight'].lerp_(parameters['student.weight'], 0.01). What it does in some steps only, "
            "let it do in all, with torch.where or a factor that is 0."
        )
    return Following(dict(parameters), dict(buffers), sources)


def run(
    function: AfterStep,
    following: Following,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    step: int,
    *,
    seed: int,
    device: torch.device,
) -> None:
    """Let the function change what is here, as it does where the whole model is.

    Args:
        function: the user's.
        following: of its dry run.
        parameters: those that are here, by name.
        buffers: likewise.
        step: that has just been applied.
        seed: of the run.
        device: on which the rest would be.

    Raises:
        UsageError: it computes something here from what is not here, unlike in its dry run; that is not written.
    """
    mode = _Following(seed=(seed, "after_step", step), answer=1)
    shown = [
        _ByName({n: held[n] if n in held else mode.absent(n, kind, device) for n, kind in kinds.items()})
        for held, kinds in ((parameters, following.parameters), (buffers, following.buffers))
    ]
    here = {**parameters, **buffers}
    places = {name: value.data_ptr() for name, value in here.items()}
    with seeded(seed, "after_step", step):
        _call(function, shown, step, mode)
    odd = {name: mode.sources_of(value) for name, value in here.items() if mode.sources_of(value)}
    if odd:
        name, sources = next(iter(odd.items()))
        raise UsageError(
            f"after_step= computed {name} from {_some(sources)} in step {step}, but not when it was tried before step "
            "0, so this worker does not hold that. Let it compute the same from the same names in every step: with "
            "torch.where, or with a factor that is 0, in place of an if."
        )
    moved = [name for name, value in here.items() if value.data_ptr() != places[name]]
    if moved:
        raise UsageError(f"after_step= gave {_some(moved)} other memory (.data = ...). Write in place, with copy_().")


def _call(function: AfterStep, shown: Sequence[Mapping[str, Tensor]], step: int, mode: _Following) -> None:
    with torch.no_grad(), mode:
        function(*shown, *([step] if takes_step(function) else []))


def takes_step(function: AfterStep) -> bool:
    """Return whether the function is told the step."""
    given = inspect.signature(function).parameters.values()
    positional = [each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 2 or any(each.kind is each.VAR_POSITIONAL for each in given)


def _some(names: Collection[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"{', '.join(known[:_SHOWN])}{more}"
