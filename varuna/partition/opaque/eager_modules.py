"""Modules of a model that run eagerly as one operation each: found while the model is exported.

Where export fails inside a module, the innermost one whose arguments and results are trees of tensors and plain values
becomes an operation. All else stays a graph. A module that ``forward`` or ``loss=`` makes or holds without it being a
part of the model, such as the criterion of a detector, may be one, too, if it has no parameters.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor as _torch_proxies
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from varuna.core.errors import ModelError
from varuna.data.randomness import generator_lock
from varuna.partition.opaque import calls
from varuna.partition.opaque.calls import Call, Given, GrowingSize, WritesError
from varuna.partition.opaque.each_sample import gathered
from varuna.partition.opaque.learning import SIZES, Arguments, engine_of_torch, plainly, with_learned
from varuna.partition.opaque.own_draws import OwnDrawsError, refused_seeds
from varuna.partition.opaque.template import UnfitError, same_attributes, state_of, template_of
from varuna.partition.watching.explaining import user_frame, user_line

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_proxies: Any = _torch_proxies
_autograd: Any = torch.autograd
_call_impl = nn.Module._call_impl
Builder = Callable[[], nn.Module]
InitialValues = Callable[[str], Tensor | None]
"""Name of a parameter or buffer -> its initial values, if they are known"""


_BATCHED = "forward() calls torch.vmap or another function transform"


class NotFollowedError(ModelError):
    """Something in forward() that a graph would silently lose or spoil."""

    def __init__(self, why: str, where: str) -> None:
        self.why = why
        super().__init__(
            f"the model cannot be captured: {why}{where}. Varuna can run such a submodule as written, as one "
            "operation, but not the whole model, and not a submodule whose arguments or results are more than "
            "tensors and plain values: move this code into a submodule that takes and returns tensors. See "
            "docs/partitioning.md, section Modules that run as written."
        )


class AgainError(Exception):
    """The trace so far is unusable; try again."""


@dataclass
class Pieces:
    """The modules found so far, of one model that is exported."""

    loss: nn.Module
    """is given the batch"""
    model: nn.Module
    build: Builder
    initial: InitialValues
    found: dict[str, str]
    """path of a module -> why it runs eagerly"""
    has_rows: bool = True
    """each input has a row for each sample"""
    _values: Callable[[Tensor], Tensor | None] | None = None
    """of a tensor in capture, if it is known; None: no more are looked for"""
    _inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def find(
        self, attempt: Callable[[], torch.export.ExportedProgram], values: Callable[[Tensor], Tensor | None]
    ) -> bool:
        """Export until no more modules are found that must run eagerly; whether there are any.

        Args:
            attempt: exports the model; what comes of it is not used.
            values: of a tensor in capture, for as many samples as in the larger run of a module; None if unknown.

        Raises:
            WritesError: one of them keeps something between calls.
            Exception: the model fails elsewhere, too.
        """
        # each attempt but the last finds one module more, so there are at most as many as modules
        for _ in self.model.modules():
            with self.in_place(values), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a graph that is not used
                try:
                    spoilt = _spoilt_module(attempt())
                except AgainError:
                    continue
            if spoilt is None:
                break
            self.found[spoilt] = _BATCHED
        parts = [path for path in self.found if not calls.is_kind(path)]
        # what is within another such module runs as a part of it
        inside = [path for path in parts if any(path.startswith(f"{other}.") for other in parts)]
        for path in inside:
            del self.found[path]
        return bool(self.found)

    @contextmanager
    def in_place(self, values: Callable[[Tensor], Tensor | None] | None = None) -> Iterator[None]:
        """Let modules that were found be operations while the model is exported.

        Args:
            values: as for ``find``; without, no more are looked for.
        """
        paths = {id(module.__dict__): path for path, module in self.model.named_modules()}
        self._values = values

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # stand-ins of export share their __dict__
            if module.__dict__ is self.loss.__dict__:
                self._inputs = args[0]
                if self.has_rows:
                    self._unify()
            path = paths.get(id(module.__dict__))
            is_run = path is None and _proxies.get_proxy_mode() is None  # by an operation, and as written
            if path == "" or is_run or module.__dict__ is self.loss.__dict__:
                return _call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]
            return self._called(path or calls.name_of_kind(module), module, args, kwargs)

        nn.Module._call_impl = call  # type: ignore[method-assign,assignment]
        try:
            with _own_gradients(), refused_seeds():
                yield
        finally:
            nn.Module._call_impl = _call_impl  # type: ignore[method-assign]

    def _called(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if path in self.found:
            try:
                return self._as_operation(path, module, args, kwargs)
            except UnfitError as error:
                raise NotFollowedError(self.found.pop(path), f" in {path}") from error
        any_number, calls_before = self._takes_any_number, len(_module_stack())
        try:
            result = _call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]
        except (WritesError, AgainError, OwnDrawsError):
            raise
        except Exception as error:
            if self._values is None:
                raise
            self._check_any_number(path, before=any_number)
            _unwind(calls_before, self._batch_size)
            try:
                made = self._as_operation(path, module, args, kwargs)
            except UnfitError:
                raise error from None
            except WritesError as wrote:
                raise WritesError(wrote.path, wrote.what, _told(error)) from error
            self.found[path] = _told(error)
            return made
        if self._values is not None:
            self._check_any_number(path, before=any_number)
            if _depends_on_data(result):
                try:
                    made = self._as_operation(path, module, args, kwargs)
                except (UnfitError, WritesError):
                    return result
                self.found[path] = "the shape of its result depends on data, unless it runs as written"
                return made
        return result

    def _check_any_number(self, path: str, *, before: bool) -> None:
        """Let a module run as written that fixes the number of samples: the innermost one, from the beginning."""
        if before and not self._takes_any_number:
            self.found[path] = "it works for one number of samples only, unless it runs as written"
            raise AgainError

    def _unify(self) -> None:
        """Let all inputs have one symbol for the number of samples: an operation may join them, or hide it."""
        for value in self._inputs.values():
            torch._check(value.shape[0] == self._batch_size)  # type: ignore[no-untyped-call]

    @property
    def _batch_size(self) -> Any:
        return next(iter(self._inputs.values())).shape[0]

    @property
    def _takes_any_number(self) -> bool:
        if not self.has_rows:
            return False
        sizes = [value.shape[0] for value in self._inputs.values()]
        return all(isinstance(size, torch.SymInt) and not size.node.expr.is_number for size in sizes)

    # -- one call --------------------------------------------------------------------------------------------------

    def _as_operation(self, path: str, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_made_there = calls.is_kind(path)
        module = called if is_made_there else _bare(self.model.get_submodule(path))
        batch = self._batch_size
        if not self._takes_any_number:
            raise UnfitError("the number of samples is fixed already")
        if is_made_there and any(True for _ in module.parameters()):
            raise UnfitError("forward() calls a module with parameters that is no part of the model")
        found, structure = tree_flatten(gathered((args, kwargs)))
        leaves = tuple(_leaf(value, batch) for value in found)
        tensors = [value for value in found if isinstance(value, Tensor)]
        sizes = [value for value in found if isinstance(value, torch.SymInt)]
        state, names = state_of(module)
        with plainly():
            template = template_of(module, lambda: self._rebuilt(path))
        if names != template.names:
            raise UnfitError("it is built anew with other parameters")
        what = [(value.dtype, tuple(map(str, value.shape)), value.requires_grad) for value in state]
        name = _name_of(path, type(module), (structure, leaves, what, template.fingerprint))
        if calls.known(name) is None:
            arguments = Arguments(
                self._values_of(tensors, [leaf for leaf in leaves if isinstance(leaf, Given)]),
                tuple(_in_batch(size, batch) for size in sizes),
                tuple(self._initial(f"{path}.{each}", value) for each, value in zip(names, state, strict=True)),
            )
            calls.register(name, with_learned(Call(path, template, structure, leaves), arguments))
        learned = calls.known(name).learned  # type: ignore[union-attr]
        assert learned is not None
        made = iter(calls.operation_of(name)(batch, tensors, state, sizes))
        return tree_unflatten(
            [next(made) if isinstance(leaf, calls.Made) else leaf for leaf in learned.leaves], learned.results
        )

    def _values_of(self, tensors: Sequence[Tensor], kinds: Sequence[Given]) -> tuple[Tensor | None, ...]:
        """Values of the arguments for as many samples as in the larger run; None where they are unknown."""
        found = [None if self._values is None else self._values(value) for value in tensors]
        return tuple(
            value if value is not None and list(value.shape) == kind.shape(SIZES[-1]) else None
            for value, kind in zip(found, kinds, strict=True)
        )

    def _initial(self, name: str, value: Tensor) -> Tensor:
        """Values of one parameter or buffer: its own, or random numbers where they are unknown."""
        known = None if self._values is None else self._values(value)  # of a module that forward() makes
        with plainly():
            made = self._drawn(name, tuple(value.shape), value.dtype) if known is None else known.detach().clone()
        return made.requires_grad_(value.requires_grad)

    def _drawn(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        known = self.initial(name)
        if known is not None and tuple(known.shape) == shape:
            return known.detach().to(dtype)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(shape, generator=generator) * 0.02).to(dtype)

    def _rebuilt(self, path: str) -> nn.Module:
        """The module with what its constructor computes; the rest of the model is freed.

        Raises:
            ModelError: it keeps random numbers in a plain attribute.
        """
        if calls.is_kind(path):
            raise UnfitError("it is made in forward(), and keeps tensors that are neither parameters nor buffers")
        built = []
        # attributes that differ between two seeds were drawn
        for seed in (0, 1):
            with generator_lock, torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                built.append(self.build().get_submodule(path))
        odd = same_attributes(*built)
        if odd is not None:
            raise ModelError(
                f"{path} can only run eagerly as one operation, and its constructor draws the random numbers in the "
                f"plain attribute {odd}, which would differ between workers. Register it as a buffer."
            )
        for mine, captured in zip(built[0].modules(), self.model.get_submodule(path).modules(), strict=True):
            mine.training = captured.training
        return built[0]


def _module_stack() -> Any:
    """The modules that are being called, as the capture knows them."""
    mode: Any = _proxies.get_proxy_mode()
    return mode.tracer.module_stack


def _unwind(calls: int, batch_size: Any) -> None:
    """Forget what a call that failed has left in the capture.

    Args:
        calls: number of modules that were being called before.
        batch_size: of the capture.
    """
    while len(_module_stack()) > calls:
        _module_stack().popitem()
    if isinstance(batch_size, torch.SymInt):  # sizes that depend on data: the next operation would be asked for them
        batch_size.node.shape_env.pending_fresh_unbacked_symbols.clear()


def _bare(module: Any) -> nn.Module:
    """The module itself where export has put something in front of it, as it does if the module has several names."""
    found: nn.Module = module.get_base() if isinstance(module, _proxies._AttrProxy) else module
    return found


def _depends_on_data(result: Any) -> bool:
    return any(free_unbacked_symbols(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


def _leaf(value: Any, batch: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise UnfitError("it gets something other than dense tensors")
        lines = [_in_batch(size, batch) for size in value.shape]
        fixed, slopes = tuple(line.fixed for line in lines), tuple(line.per_example for line in lines)
        return Given(value.dtype, fixed, slopes, value.requires_grad)
    if isinstance(value, torch.SymInt):
        return torch.SymInt
    if isinstance(value, _PLAIN):
        return value
    raise UnfitError(f"it gets a {type(value).__name__}")


def _in_batch(size: Any, batch: Any) -> GrowingSize:
    """A dimension as a function of the number of samples."""
    if not isinstance(size, torch.SymInt):
        return GrowingSize(int(size), 0)
    expression, symbol = size.node.expr, batch.node.expr
    if not expression.free_symbols <= {symbol}:
        raise UnfitError("it gets a tensor whose shape depends on data")
    # a line through 1 and 2, tried at 4
    one, two, four = (int(expression.subs({symbol: number})) for number in (1, 2, 4))
    if four - two != 2 * (two - one):
        raise UnfitError("it gets a tensor whose shape is not linear in the number of samples")
    return GrowingSize(2 * one - two, two - one)


def _name_of(path: str, kind: type, what: object) -> str:
    """The op's name, the same in every process for the section's digest; its first part names the module's place."""
    place, rest = (hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in (path, what))
    return f"{kind.__name__.lower()}_{place}_{rest}"


def check_followed(program: torch.export.ExportedProgram) -> None:
    """Refuse a graph that does not run.

    Raises:
        NotFollowedError: it holds calls of ``torch.vmap`` and the like.
    """
    path = _spoilt_module(program)
    if path is not None:
        raise NotFollowedError(_BATCHED, f" in {path}" if path else "")


def _spoilt_module(program: torch.export.ExportedProgram) -> str | None:
    """The module in which a transform was called that no graph holds; None if there is none, "" for the model."""
    for node in program.graph.nodes:
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            return str(stack[-1][0]).partition(".")[2] if stack else ""
    return None


def _told(error: BaseException) -> str:
    why = error.why if isinstance(error, NotFollowedError) else "capture cannot follow it"
    return f"{why}{_at(user_frame(error))}"


def _at(line: str | None) -> str:
    return "" if line is None else f" at {line}"


@contextmanager
def _own_gradients() -> Iterator[None]:
    """Refuse gradients that forward() computes, which would become constants of the graph."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotFollowedError("forward() computes gradients itself", _at(user_line()))

    _autograd._engine_run_backward = refuse  # ``torch.autograd.grad`` has many names, this only one
    try:
        yield
    finally:
        _autograd._engine_run_backward = engine_of_torch
