"""Real values beside fake tensors, while a model is exported: what a branch of ``forward`` asks for.

Export runs ``forward`` on tensors without data. Here each operation whose arguments are known is run for real as well.
What follows from the code alone (masks of ``ones``, positions of ``arange``, tables) is then known for certain, and a
branch on it is not a branch on data. What follows from the first samples, or from first parameters, is known for those
only: export goes on as they do and notes what it took for granted (``guards``).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from varuna.data.randomness import generator_lock
from varuna.partition.graph.detached_copies import follow_copy
from varuna.partition.watching.explaining import user_line
from varuna.partition.watching.torch_versions import follow_number, followed_numbers, known_sizes

MOST_BYTES = 2**28
"""The largest result that is computed where only the code is known: no branch is worth more."""
_ALL_BYTES = 2**30
"""Bytes of all such results together."""
_ALLOCATES = ("aten::empty", "aten::new_empty")
_OF_A_FORM = re.compile(r"^aten::((?P<new>new_)\w+|\w+_like)$")
_DRAWS = ("normal_", "uniform_", "exponential_", "random_", "bernoulli_", "log_normal_", "geometric_", "cauchy_")
_OVERWRITES = frozenset({"aten::fill_", "aten::zero_", "aten::copy_", *(f"aten::{name}" for name in _DRAWS)})
_SYMBOLS = (SymInt, SymFloat, SymBool)


class ValueSource(IntEnum):
    """The source from which a value follows."""

    CODE = 0
    SAMPLES = 1
    PARAMETERS = 2
    """and random numbers"""


Given = Mapping[int, tuple[Tensor, ValueSource]]
"""id of a tensor without data -> its value, and what that follows from"""


class _Memory:
    """The memory that all views of one real tensor share."""

    def __init__(self, grade: ValueSource | None) -> None:
        self.grade = grade
        """None: unknown; memory that nothing has filled, or that was filled with something unknown"""


class _Value:
    def __init__(self, real: Tensor, memory: _Memory) -> None:
        self.real, self.memory = real, memory


class RealValues:
    """Follows the operations of one export."""

    def __init__(self, most: ValueSource, given: Given) -> None:
        """Prepare.

        Args:
            most: what is followed: no value that depends on more is known.
            given: id of a tensor that export is given -> its value, which operations may write to.
        """
        self.most, self._given = most, given
        self._known: Any = WeakIdKeyDictionary()  # tensor -> _Value
        self._inside = False
        self._spent_bytes = 0
        self.places: dict[str, str] = {}
        """export's name of a number that it took out of a tensor -> the user's line that did"""
        self.decided: list[frozenset[str]] = []
        """numbers, by decision that was made by their values"""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Let every fake tensor mode also compute real values, in this block."""
        modes: Any = FakeTensorMode
        environments: Any = ShapeEnv
        dispatch, from_tensor = modes.dispatch, modes.from_tensor
        defer = environments.guard_or_defer_runtime_assert

        def dispatching(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self._inside:  # what an operation is made of
                return dispatch(mode, func, types, args, kwargs or {})
            self._inside = True
            # torch's operations run no code of the user's: what watches calls of torch need not see how they are made
            quiet = getattr(func, "namespace", None) == "aten"
            try:
                run = partial(dispatch, mode, func, types)
                with torch._C.DisableTorchFunction() if quiet else nullcontext():
                    return self._operation(run, mode, func, self._with_numbers(mode, func, args), kwargs or {})
            finally:
                self._inside = False

        def making(mode: FakeTensorMode, tensor: Tensor, **how: Any) -> Any:  # export makes all that it is given anew
            made = from_tensor(mode, tensor, **how)
            if id(tensor) in self._given:
                real, grade = self._given[id(tensor)]
                self._known[made] = _Value(real, _Memory(grade))
            return made

        def deferring(environment: ShapeEnv, expression: Any, message: str, *given: Any, **how: Any) -> Any:
            if message.startswith("propagate_real_tensors"):  # it asks for a value that is no more than an example
                numbers = expression.free_symbols - known_sizes(environment).keys()
                self.decided.append(frozenset(map(str, numbers)))
            return defer(environment, expression, message, *given, **how)

        with generator_lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same on every worker
            modes.dispatch, modes.from_tensor = dispatching, making
            environments.guard_or_defer_runtime_assert = deferring
            try:
                yield
            finally:
                modes.dispatch, modes.from_tensor = dispatch, from_tensor
                environments.guard_or_defer_runtime_assert = defer
                self._known.clear()

    def real(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor that is followed; None if it is unknown."""
        found: _Value | None = self._known.get(tensor)
        return None if found is None or found.memory.grade is None else found.real

    def fill(self, constants: dict[str, Any]) -> None:
        """Give constants that forward() made of the code alone their values; call it while watching."""
        for name, constant in constants.items():
            value = self._known.get(constant) if isinstance(constant, FakeTensor) else None
            if value is not None and value.memory.grade is ValueSource.CODE:
                constants[name] = value.real.clone()

    def _operation(
        self, run: Callable[..., Any], mode: FakeTensorMode, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return run(args, kwargs)
        leaves, structure = tree_flatten((args, dict(kwargs)))
        form = _OF_A_FORM.search(func._schema.name)
        values = [self._form(leaf, form) if form else self._value(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        written = [self._value(tensor) for tensor in written_tensors(func, args, kwargs)]
        grade = self._grade(func, leaves, values, written)
        if grade is ValueSource.CODE and torch.Tag.data_dependent_output in func.tags:
            found = self._real(mode, func, leaves, structure, values)
            if isinstance(found, bool | int | float):
                return found
        if grade is ValueSource.CODE and torch.Tag.dynamic_output_shape in func.tags:
            found = self._real(mode, func, leaves, structure, values)
            if isinstance(found, Tensor):
                fixed = mode.fake_tensor_converter.from_real_tensor(mode, found)
                self._known[fixed] = _Value(found, _Memory(grade))
                return fixed
        made = run(args, kwargs)
        follow_copy(func, args, made)
        if torch.Tag.data_dependent_output in func.tags and isinstance(made, _SYMBOLS):
            self.places |= dict.fromkeys(map(str, made.node.expr.free_symbols), user_line() or "an unknown line")
        real = None
        is_known = grade is not None or _is_view(func) or func._schema.name.startswith(_ALLOCATES)
        if is_known and all(value is not None for value in values) and self._is_affordable(made):
            real = self._real(mode, func, leaves, structure, values)
        for value in written:
            if value is not None:
                value.memory.grade = grade if real is not None else None
        if real is not None:
            self._note(mode, made, real, grade, values)
        return made

    def _with_numbers(self, mode: FakeTensorMode, func: Any, args: Any) -> Any:
        """Turn masks that are known for certain, among the indices of a tensor, into numbers of known count."""
        if func is not torch.ops.aten.index.Tensor:
            return args
        indices: list[Any] = []
        for index in args[1]:
            value = self._value(index) if isinstance(index, Tensor) and index.dtype is torch.bool else None
            if value is None or value.memory.grade is not ValueSource.CODE:
                indices.append(index)
            else:
                make = mode.fake_tensor_converter.from_real_tensor
                indices += [make(mode, each) for each in value.real.nonzero().unbind(1)]
        return (args[0], indices, *args[2:])

    def _value(self, tensor: Tensor) -> _Value | None:
        found: _Value | None = self._known.get(tensor)
        if found is None and type(tensor) is Tensor and tensor.device.type == "cpu":  # an attribute, or from Python
            found = self._known[tensor] = _Value(tensor.detach().clone(), _Memory(ValueSource.CODE))
        return found

    def _grade(
        self, func: Any, leaves: list[Any], values: list[_Value | None], written: list[_Value | None]
    ) -> ValueSource | None:
        """Grade of what the operation makes and writes; None if it is unknown."""
        name = func._schema.name
        if name.startswith(_ALLOCATES):
            return None
        read = values
        if name in _OVERWRITES and written and written[0] is not None and _is_whole(written[0].real):
            # what is overwritten as a whole need not have been known
            read = values[1:]
        grades = [None if value is None else value.memory.grade for value in read]
        if torch.Tag.nondeterministic_seeded in func.tags:
            grades.append(ValueSource.PARAMETERS)  # the next micro-batch draws others: no more than an example
        if any(isinstance(leaf, _SYMBOLS) for leaf in leaves):
            grades.append(ValueSource.SAMPLES)
        worst = ValueSource.CODE
        for grade in grades:
            if grade is None or grade > self.most:
                return None
            worst = max(worst, grade)
        return worst

    def _form(self, tensor: Tensor, form: re.Match[str]) -> _Value | None:
        """A tensor of which an operation uses only the form, as ``new_zeros`` and ``zeros_like`` do."""
        shape = () if form["new"] else tensor.shape
        if all(isinstance(size, int) for size in shape):
            return _Value(torch.empty(shape, dtype=tensor.dtype), _Memory(ValueSource.CODE))
        return self._value(tensor)

    def _is_affordable(self, made: Any) -> bool:
        """Return whether a result is small enough to be computed."""
        if self.most is not ValueSource.CODE:
            return True
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        size = sum(size for size in sizes if isinstance(size, int))
        self._spent_bytes += size
        return size <= MOST_BYTES and self._spent_bytes <= _ALL_BYTES

    def _real(
        self, mode: FakeTensorMode, func: Any, leaves: list[Any], structure: Any, values: list[_Value | None]
    ) -> Any:
        """The operation's result on the values; None if it cannot be run."""
        given, of_tensors = list[Any](), iter(values)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                value = next(of_tensors)
                if value is None:
                    return None
                given.append(value.real)
            elif isinstance(leaf, _SYMBOLS):
                number = _number(mode, leaf)
                if number is None:
                    return None
                given.append(number)
            elif isinstance(leaf, torch.device) and leaf.type != "cpu":
                return None
            else:
                given.append(leaf)
        args, kwargs = tree_unflatten(given, structure)
        try:
            return func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - values are a help: without them, export says what it cannot follow
            return None

    def _note(
        self, mode: FakeTensorMode, made: Any, real: Any, grade: ValueSource | None, sources: list[_Value | None]
    ) -> None:
        # a view has its base's memory, so that a write to either is known of both
        memories = {source.real.untyped_storage()._cdata: source.memory for source in sources if source is not None}
        for fake, found in zip(tree_leaves(made), tree_leaves(real), strict=False):
            if isinstance(fake, FakeTensor) and isinstance(found, Tensor):
                if fake in self._known or not _is_alike(fake, found):
                    continue
                memory = memories.get(found.untyped_storage()._cdata) or _Memory(grade)
                self._known[fake] = _Value(found, memory)
                if grade is not None and grade <= ValueSource.SAMPLES:
                    for size, extent in zip(fake.shape, found.shape, strict=True):
                        _bind(mode, size, extent)
            elif isinstance(fake, _SYMBOLS) and grade is not None:
                _bind(mode, fake, found)


def written_tensors(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that the operation writes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return found


def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _is_whole(value: Tensor) -> bool:
    """Return whether a tensor covers its memory."""
    return value.numel() * value.element_size() == value.untyped_storage().nbytes() and _is_dense(value)


def _is_dense(value: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_alike(fake: Tensor, real: Tensor) -> bool:
    pairs = zip(fake.shape, real.shape, strict=False)
    same = all(size == extent for size, extent in pairs if isinstance(size, int))
    return same and fake.dim() == real.dim() and fake.dtype is real.dtype


def _number(mode: FakeTensorMode, symbol: Any) -> Any:
    """The number that a symbol stands for in this batch; None if that is unknown."""
    environment = mode.shape_env
    if environment is None:
        return None
    known = symbol.node.expr.xreplace(known_sizes(environment))
    known = known.xreplace(followed_numbers(environment))
    return None if known.free_symbols else symbol.node.pytype(known)


def _bind(mode: FakeTensorMode, symbol: Any, value: Any) -> None:
    """Tell export the value that an unknown number has in this batch."""
    if mode.shape_env is None or not isinstance(symbol, _SYMBOLS) or value != value:  # NaN has no order
        return
    expression = symbol.node.expr
    if expression.is_Equality and expression.rhs == 1:  # of a truth
        expression, value = expression.lhs, int(value)
    if expression.is_Symbol and expression not in known_sizes(mode.shape_env):
        follow_number(mode.shape_env, expression, value)
