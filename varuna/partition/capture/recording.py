"""A record of what a model's constructor does to each parameter and buffer, made without running it.

The model is built under fake tensors while a dispatch mode writes every operation down. What made one tensor is
then run for that tensor alone: no stage ever holds another stage's parameters, and buffers that are in no
checkpoint (rotary tables) come out exactly as the constructor makes them.

Memory is followed by storage, not by tensor: views, ``.data`` and ``nn.Parameter`` need no special case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from varuna.core.errors import ModelError
from varuna.data.randomness import seeded
from varuna.partition.capture.real_values import written_tensors

_ALLOCATES = ("aten::empty", "aten::new_empty")
_OVERWRITES = frozenset({"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_"})
"""Operations that overwrite their first argument completely."""


class View(NamedTuple):
    """A tensor as a place in a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Operation:
    """One recorded call; tensors among its flat arguments are views."""

    call: Callable[..., Any]
    name: str
    arguments: tuple[Any, ...]
    structure: TreeSpec
    made: tuple[View | None, ...]
    """results that live in a storage of their own, by position among the flat results"""
    draws: bool
    """consumes random numbers"""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations on every storage; goes on top of a ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[Operation] = []
        self._history: dict[int, frozenset[int]] = {}  # storage -> operations that its content depends on
        self._given: dict[int, Tensor] = {}  # bytes of storages that are real: from NumPy or Python values
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no number is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run and record one operation."""
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        arguments = tuple(self._argument(leaf) for leaf in leaves)
        if func is torch.ops.aten._local_scalar_dense.default and not self.draws(arguments[0]):
            with _disable_current_modes():
                return self.replay(arguments[0]).item()
        results = func(*args, **kwargs)
        name = func._schema.name
        written = [self.view(value) for value in written_tensors(func, args, kwargs)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._note(func, name, arguments, structure, written, tree_leaves(results), draws)
        return results

    def note_draw(self, call: Callable[..., Any], tensor: Tensor, *rest: Any) -> None:
        """Record ``call(tensor, *rest)``, which draws until it is content, as one operation that fills ``tensor``."""
        view = self.view(tensor)
        leaves, structure = tree_flatten(((tensor, *rest), {}))
        arguments = tuple(self._argument(leaf) for leaf in leaves)
        self._note(call, "aten::normal_", arguments, structure, [view], [], draws=True)

    def view(self, tensor: Tensor) -> View:
        """Return the place of a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = storage
            if not isinstance(tensor, FakeTensor):
                with _disable_current_modes():
                    self._given[key] = _bytes_of(storage).clone()
        return View(key, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def draws(self, view: View) -> frozenset[int]:
        """Return the numbers of the operations with random numbers that a tensor depends on."""
        return frozenset(i for i in self._history.get(view.storage, ()) if self._operations[i].draws)

    def replay(self, view: View, seed: int = 0, *keys: int | str) -> Tensor:
        """Run the operations that made one tensor for real, with random numbers of ``(seed, *keys)``.

        Memory that nothing has been written to is zero.

        Raises:
            ModelError: its values depend on others in a way that Python saw.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes(), torch.no_grad(), seeded(seed, *keys):
            for index in sorted(self._history.get(view.storage, ())):
                self._run(self._operations[index], storages)
            return self._tensor(view, storages).clone()

    # -- inside ------------------------------------------------------------------------------------------

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.view(leaf)
        return None if isinstance(leaf, torch.Generator) else leaf  # every tensor gets a generator of its own

    def _note(
        self,
        call: Callable[..., Any],
        name: str,
        arguments: tuple[Any, ...],
        structure: TreeSpec,
        written: list[View],
        results: list[Any],
        draws: bool,
    ) -> None:
        known = {argument.storage for argument in arguments if isinstance(argument, View)}
        views = [self.view(result) if isinstance(result, Tensor) else None for result in results]
        made = tuple(view if view is not None and view.storage not in known else None for view in views)
        fresh = {view.storage for view in made if view is not None}
        if name.startswith(_ALLOCATES) or not (fresh or written):
            return
        overwritten = {written[0].storage} if name in _OVERWRITES and self._is_whole(written[0]) else set()
        sources = [argument for argument in arguments if isinstance(argument, View)]
        read = {view.storage for view in sources if not (overwritten and view == written[0])}
        before = frozenset[int]().union(*(self._history.get(storage, frozenset()) for storage in read))
        index = len(self._operations)
        self._operations.append(Operation(call, name, arguments, structure, made, draws))
        for storage in fresh | {view.storage for view in written}:
            # a write over a part adds to what the storage depends on; one over all of it starts anew
            kept = frozenset() if storage in fresh | overwritten else self._history.get(storage, frozenset())
            self._history[storage] = before | kept | {index}

    def _is_whole(self, view: View) -> bool:
        """Return whether the view covers its storage."""
        size = torch.Size(view.size).numel()
        dense = sorted(zip(view.stride, view.size, strict=True))
        expected = 1
        for stride, extent in dense:
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return view.offset == 0 and size * view.dtype.itemsize == self._storages[view.storage].nbytes()

    def _run(self, operation: Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in operation.arguments):
            raise ModelError(
                f"the model's constructor passes a random value through Python into {operation.name}: it cannot be "
                'replayed for a single tensor. Keep that value in a tensor, or use init="constructor".'
            )
        leaves = [self._tensor(leaf, storages) if isinstance(leaf, View) else leaf for leaf in operation.arguments]
        args, kwargs = tree_unflatten(leaves, operation.structure)
        results = tree_leaves(operation.call(*args, **kwargs))
        for view, result in zip(operation.made, results, strict=False):
            if view is None:
                continue
            # views recorded of this result count on its strides, which a real kernel may choose differently
            if (tuple(result.stride()), result.storage_offset()) == (view.stride, view.offset):
                storages[view.storage] = result.untyped_storage()
            else:
                self._tensor(view, storages).copy_(result)

    def _tensor(self, view: View, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        if view.storage not in storages:
            given = self._given.get(view.storage)
            size = self._storages[view.storage].nbytes()
            content = torch.zeros(size, dtype=torch.uint8) if given is None else given.clone()
            storages[view.storage] = content.untyped_storage()
        empty = torch.empty(0, dtype=view.dtype)
        return empty.set_(storages[view.storage], view.offset, view.size, view.stride)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
