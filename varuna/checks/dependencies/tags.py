"""Sections that a tensor's value depends on: weak tags by storage, kept by a dispatch mode. No patched PyTorch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varuna.partition.watching.user_lines import UserLine, accumulates, user_place

_LEAVES = frozenset({"_local_scalar_dense", "equal"})
_OVERWRITES = frozenset({"copy_", "zero_", "fill_"})
_ELEMENT_WISE = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
_PURGE_AT = 10_000
_weak: Any = StorageWeakRef


@dataclass(eq=False)
class SuspectedDependency:
    """A possible finding, and what becomes of its value."""

    kind: str
    operation: str
    place: UserLine
    sections: set[int] = field(default_factory=set)
    names: dict[str, None] = field(default_factory=dict)
    reduced: bool = False
    """its value went into ``all_reduce_shared``"""
    used: bool = False
    """its value met a section's tensors before that"""

    def add(self, tag: "Tag") -> None:
        """Add a tag's sections."""
        self.sections |= tag.sections
        self.names.update(dict.fromkeys(tag.names))


@dataclass(frozen=True)
class Tag:
    """The sections and names that a value depends on."""

    sections: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()
    mixed: tuple[SuspectedDependency, ...] = ()
    """it is the result of these: a value over several sections"""

    def __or__(self, other: "Tag") -> "Tag":
        return Tag(
            self.sections | other.sections,
            tuple(dict.fromkeys((*self.names, *other.names))),
            tuple(dict.fromkeys((*self.mixed, *other.mixed))),
        )


KNOWN = Tag()
"""The tag of what depends on no section: made by a factory, or equal on all stages."""


class TagLedger:
    """Tags of everything that the dry run touches, and what was suspicious."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[Any, Tag]] = {}
        self._homes: set[int] = set()
        self._purge_at = _PURGE_AT
        self.suspicions: dict[tuple[str, str, str], SuspectedDependency] = {}
        self.otherwise = UserLine("<unknown>", 0, False)
        """blamed where no user's line is on the stack"""
        self._aside = False
        self._region: tuple[int, frozenset[str]] | None = None

    # -- tags ----------------------------------------------------------------------------------------------

    def tag(self, tensor: Tensor, tag: Tag, *, home: bool = False) -> None:
        """Set the tag of a tensor's storage; ``home``: writing to it never makes it another section's."""
        storage = _storage(tensor)
        if storage is None:
            return
        if len(self._tags) > self._purge_at:
            self._tags = {key: entry for key, entry in self._tags.items() if not entry[0].expired()}
            self._homes &= self._tags.keys()
            self._purge_at = 2 * len(self._tags) + _PURGE_AT
        self._tags[storage._cdata] = (_weak(storage), tag)
        if home:
            self._homes.add(storage._cdata)

    def tag_of(self, tensor: Tensor) -> Tag | None:
        """Tag of a tensor's storage; None if it was made before the dry run and belongs to no section."""
        storage = _storage(tensor)
        found = None if storage is None else self._tags.get(storage._cdata)
        return found[1] if found is not None and not found[0].expired() else None

    def _is_home(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._homes

    @contextmanager
    def inside(self, section: int, names: Sequence[str]) -> Iterator[None]:
        """In this block a section runs: what it makes is its own, and what crosses is the framework's."""
        self._region = section, frozenset(names)
        try:
            yield
        finally:
            self._region = None

    def cross(self, tensors: Iterable[Tensor]) -> None:
        """Note values that the framework passes from section to section."""
        for tensor in tensors:
            self.tag(tensor, KNOWN)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this block, note nothing: the framework works across sections, as for sums of tied gradients."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    # -- operations ------------------------------------------------------------------------------------------

    def note(self, name: str, inputs: Sequence[Any], written: Sequence[Any], out: Any) -> None:
        """Propagate tags through one ATen operation.

        Args:
            name: of the operation, without namespace and overload.
            inputs: all arguments.
            written: those that it changes in place.
            out: its result.
        """
        if self._aside:
            return
        if self._region is not None:
            self._note_inside(name, inputs, out)
        elif name.startswith(_ELEMENT_WISE):
            self._note_lists(name, inputs, written, out)
        else:
            self._note_one(name, _tensors(inputs), written, _tensors(out))

    def _note_inside(self, name: str, inputs: Sequence[Any], out: Any) -> None:
        assert self._region is not None
        section, names = self._region
        own = Tag(frozenset({section}))
        for tensor in _tensors(inputs):
            tag = self.tag_of(tensor)
            is_own = tag is None or tag.sections <= {section} or (tag.names and names >= set(tag.names))
            if tag is not None and not is_own:
                self._suspect("mixed", name, user_place(self.otherwise), own | tag)
        for tensor in _tensors(out):
            if self.tag_of(tensor) is None:
                self.tag(tensor, own)

    def _note_lists(self, name: str, inputs: Sequence[Any], written: Sequence[Any], out: Any) -> None:
        """Propagate over lists: element i of every list, and what is not a list, flow into element i of the results."""
        lists = [
            value for value in inputs if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)
        ]
        single = [value for value in inputs if isinstance(value, Tensor)]
        results = out if isinstance(out, list | tuple) else ()
        for i in range(max(map(len, lists), default=0)):
            mine = [each[i] for each in lists if i < len(each)]
            changed = [each[i] for each in written if isinstance(each, list | tuple) and i < len(each)]
            made = _tensors(results[i]) if i < len(results) else []
            large = [tensor for tensor in changed if tensor.numel() > 1 or self._is_home(tensor)]
            self._note_one(name, [*mine, *single], large[:1] or changed[:1], made)

    def _note_one(self, name: str, inputs: Sequence[Tensor], written: Sequence[Any], made: Sequence[Tensor]) -> None:
        if name in _LEAVES:
            self._leave(inputs)
            return
        target = written[0] if written and isinstance(written[0], Tensor) else None
        if name in _OVERWRITES and target is not None and _is_whole(target) and not self._is_home(target):
            self.tag(target, self._join(name, [tensor for tensor in inputs if tensor is not target], ()))
            return
        changed = [value for value in written if isinstance(value, Tensor)]  # a list is changed element by element
        tag = self._join(name, inputs, (*changed, *made))
        foreign = [tensor for tensor in inputs if self.tag_of(tensor) is None and tensor.numel() > 1]
        for tensor in (*changed, *made):
            known = self.tag_of(tensor)
            if tag.sections or tag.mixed:
                if not (tag.mixed and known is not None and known.sections and self._is_home(tensor)):
                    self.tag(tensor, tag)
            elif known is None and not foreign:
                self.tag(tensor, tag)

    def _join(self, name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Tag:
        """Tag of an operation's result; more than one section makes it a suspicion."""
        tags = [(tensor, self.tag_of(tensor)) for tensor in inputs]
        plain, mixed = Tag(), Tag()
        for _, tag in tags:
            if tag is not None and tag.mixed:
                mixed |= tag
            elif tag is not None:
                plain |= tag
        if plain.sections:
            for tensor, tag in tags:
                if tag is None and tensor.numel() > 1:
                    self._suspect("untagged", name, user_place(self.otherwise), plain, extra=_shape(tensor))
        if not plain.sections or not (mixed.mixed or len(plain.sections) > 1):
            return plain | mixed
        goes_on = any(tensor.numel() == 1 and not self._is_home(tensor) for tensor in results)
        if len(plain.sections) > 1 or goes_on:
            found = self._suspect("mixed", name, user_place(self.otherwise), plain)
            return Tag(mixed=tuple(dict.fromkeys((*mixed.mixed, found))))
        for each in mixed.mixed:
            each.used = True
        return plain

    def _leave(self, inputs: Sequence[Tensor]) -> None:
        """Note that a value becomes a Python number: from here on only the source tells its use."""
        for tensor in inputs:
            tag = self.tag_of(tensor)
            if tag is None or not (tag.sections or tag.mixed):
                continue
            for each in tag.mixed:
                each.used = True
            if tag.sections:
                place = user_place(self.otherwise)
                self._suspect("number" if accumulates(place) else "candidate", "item", place, tag)

    def _suspect(self, kind: str, name: str, place: UserLine, tag: Tag, *, extra: str = "") -> SuspectedDependency:
        key = (kind, str(place), name)
        found = self.suspicions.setdefault(key, SuspectedDependency(kind, f"{name}{extra}", place))
        found.add(tag)
        return found

    # -- all_reduce_shared, as the dry run's exchange -------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Return the tensor, which is whole already, and tag it as equal on all stages."""
        tag = self.tag_of(tensor)
        roots = tag.mixed if tag is not None else ()
        if not roots and (tag is None or not tag.sections):  # made of numbers: those that were taken out before
            roots = tuple(each for each in self.suspicions.values() if each.kind == "number")
        for each in roots:
            each.reduced = True
        shared = tensor.detach().clone()
        self.tag(shared, KNOWN)
        return shared

    def owns(self, parameter: Tensor) -> bool:
        """True: one process owns everything."""
        return True


class TagMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation to a ledger."""

    def __init__(self, ledger: TagLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {argument.name: argument for argument in func._schema.arguments}
        named = [*zip(given.values(), args, strict=False), *((given[key], value) for key, value in kwargs.items())]
        written = [
            value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._ledger.note(func._schema.name.removeprefix("aten::"), [value for _, value in named], written, out)
        return out


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None if it has none, such as a sparse tensor."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _shape(tensor: Tensor) -> str:
    return f" with a tensor of shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
