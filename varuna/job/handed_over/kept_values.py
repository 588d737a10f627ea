"""Values that captured code keeps for the script: an attribute that forward() sets, a list to which loss= appends.

Such code ran a few times before step 0, on made-up values too, and does not run in steps. A value that it has left is
none of any step. So those of before Trainer are put back, and in the script's turn a stand-in takes their place::

    self.entropy = -(p * p.log()).sum(-1).mean()    # forward(), once, before step 0
    ...
    rate = base * model.entropy                     # the loop: refused here, with the way out

The script may put another value there, as it does at the beginning of an epoch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.job.handed_over.code_reads import CODE, CONTAINERS, MISSING, Key, ReadPlace
from varuna.job.handed_over.marks import attributes, is_users_object

_ASKED = """float int index complex bool len iter next getitem contains reversed call enter array str format round trunc
    neg pos abs invert eq ne lt le gt ge reduce_ex copy deepcopy getattr delitem setitem
    add sub mul matmul truediv floordiv mod pow and or xor
    radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow rand ror rxor
    iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor"""
_MOST_HIDDEN = 256
"""Values in a container that are hidden one by one: of a larger one, only the container itself."""

Refuse = Callable[[str, str], NoReturn]
"""Raises; told the name of the function that writes a value, and of the value."""


class Unknown:
    """A stand-in for a value that is not known in the script's turn: asking for it is refused, forgetting it is not."""

    __slots__ = ("_name", "_refuse")

    def __init__(self, name: str, refuse: Callable[[str], NoReturn]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_refuse", refuse)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_name')}, which is not known in the loop>"

    __hash__ = object.__hash__

    def clear(self) -> None:
        """Forget what was kept."""

    @classmethod
    def __torch_function__(cls, _: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an argument of a function of torch."""
        _asked(next(each for each in _flat((args, kwargs or {})) if isinstance(each, cls)))


def _asked(unknown: Any, *_: object) -> NoReturn:
    refuse: Callable[[str], NoReturn] = object.__getattribute__(unknown, "_refuse")
    refuse(object.__getattribute__(unknown, "_name"))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _flat(each)
    else:
        yield value


for _name in _ASKED.split():
    setattr(Unknown, f"__{_name}__", _asked)


class _Kept(NamedTuple):
    place: ReadPlace
    writer: str
    unknown: Unknown


class KeptValues:
    """The places at which captured code keeps values."""

    def __init__(
        self, written: Iterable[tuple[str, ReadPlace]], read: Iterable[tuple[str, ReadPlace]], refuse: Refuse
    ) -> None:
        """Remember the values of now.

        Args:
            written: places to which captured code writes, with the name of the function.
            read: others that it loads, and may pass to what writes to them.
            refuse: raises; told the name of a value that the script has asked for, and of the function.
        """
        self._refuse = refuse
        found = {_key(each): (each, writer) for writer, each in written if _is_kept(each)}
        self._kept = [self._described(*each) for each in found.values()]
        self._before = self._values()
        near = {_key(each): (each, writer) for writer, place in read for each in _near(place) if _is_kept(each)}
        self._read = [(*each, _seen(_own(each[0]))) for key, each in near.items() if key not in found]
        self._is_restored = False
        self._hidden: list[tuple[Any, Any]] | None = None
        """values of the places, and their insides, while stand-ins are there"""

    def restore(self) -> None:
        """Put back the values from before captured code ran."""
        found = [(place, writer, seen) for place, writer, seen in self._read if not _is_same(seen, _own(place))]
        self._kept += [self._described(place, writer) for place, writer, _ in found]
        # in the order of _kept, with which they are zipped
        self._before += [seen[:2] for *_, seen in found]
        known = {_key(place) for place, *_ in found}
        self._read = [each for each in self._read if _key(each[0]) not in known]
        for (place, *_), (value, inside) in zip(self._kept, self._before, strict=True):
            now = _own(place)
            if not _is_away(value, inside) and not _is_away(now, now if isinstance(now, CONTAINERS) else None):
                if inside is not None:
                    _fill(value, inside)
                _put(place, value)

    def restored_first(self) -> bool:
        """Put back the values from before captured code ran, if that was not done; return whether it was not."""
        is_first = not self._is_restored
        if is_first:
            self.restore()
            self._read, self._is_restored = [], True  # from now on, the script changes what it reads
        return is_first

    def writer_of(self, place: ReadPlace) -> str:
        """Return the name of the function that writes to a place, or around it; empty: none does."""
        spots = place.spots()
        found = (writer for kept, writer, _ in self._kept if not spots.isdisjoint(kept.spots(is_written=True)))
        return next(found, "")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Give the script control in this block, with stand-ins in the places."""
        self.restored_first()
        with nullcontext() if self._hidden is not None or not self._kept else self._hiding():
            yield

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let Varuna work in this block, and run captured code; put back what that leaves."""
        is_hidden = self._hidden is not None
        if is_hidden:
            self._show()
        self.restored_first()
        self._before = self._values()
        try:
            yield
        finally:
            self.restore()
            if is_hidden:
                self._hide()

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        self._hide()
        try:
            yield
        finally:
            self._show()

    def _hide(self) -> None:
        self._hidden = self._values()
        for (place, _, unknown), (value, inside) in zip(self._kept, self._hidden, strict=True):
            if _is_away(value, inside):
                continue
            if inside is not None and len(inside) <= _MOST_HIDDEN:  # it has other names, too
                _fill(value, dict.fromkeys(inside, unknown) if isinstance(inside, dict) else [unknown])
            _put(place, unknown)

    def _show(self) -> None:
        for (place, _, unknown), (value, inside) in zip(self._kept, self._hidden or (), strict=True):
            if inside is not None and any(each is unknown for each in _each(value)):
                _fill(value, inside)
            if place.value() is unknown:  # else the script has put another value there
                _put(place, value)
        self._hidden = None

    def _values(self) -> list[tuple[Any, Any]]:
        return [_seen(_own(place))[:2] for place, *_ in self._kept]

    def _described(self, place: ReadPlace, writer: str) -> _Kept:
        return _Kept(place, writer, Unknown(place.name, partial(self._refuse, writer)))


def _is_kept(place: ReadPlace) -> bool:
    """Return whether there is an owner to which a value can be given, and the value is none that is watched itself."""
    value = place.value()
    if not place.keys or (value is not MISSING and is_users_object(value)):  # a singleton, which the script may use
        return False
    owner, key = _owner(place), place.keys[-1][1]
    if isinstance(owner, tuple):  # which keeps what it has, whatever that holds
        return isinstance(value, CONTAINERS)
    if owner is MISSING or isinstance(owner, str | int | float | frozenset | None):
        return False
    if isinstance(owner, type):  # its methods store to the objects of it that they are given
        return key in vars(owner)
    if isinstance(owner, nn.Module):
        return not any(key in table for table in (owner._parameters, owner._buffers, owner._modules))
    return True


def _near(place: ReadPlace) -> Iterator[ReadPlace]:
    """Yield the place itself, if what is there can change within, or those of the attributes of its object."""
    value = place.value()
    if isinstance(value, (*CONTAINERS, Tensor)):
        yield place
    elif isinstance(value, tuple):
        yield from (place._replace(keys=(*place.keys, ("[", at))) for at in range(len(value)))
    elif not isinstance(value, (nn.Module, Optimizer, *CODE)) and (own := attributes(value)) is not None:
        yield from (ReadPlace(value, ((".", key),), f"{place.name}.{key}") for key in own)


def _seen(value: Any) -> tuple[Any, Any, int]:
    """Return a value, the inside of it that can be put back, and the count of writes to a tensor."""
    if isinstance(value, Tensor):
        return value, None, value._version
    return value, value.copy() if isinstance(value, CONTAINERS) else None, 0


def _is_same(seen: tuple[Any, Any, int], now: Any) -> bool:
    """Return whether nothing was written to a place: by what is there, since values may be tensors."""
    value, inside, version = seen
    if now is not value:
        return False
    if isinstance(value, Tensor):
        return value._version == version
    return inside is None or [*map(id, _each(value))] == [*map(id, _each(inside))]


def _key(place: ReadPlace) -> tuple[int, Key]:
    return id(_owner(place)), place.keys[-1]


def _owner(place: ReadPlace) -> Any:
    return place._replace(keys=place.keys[:-1]).value()


def _is_away(value: Any, inside: Any) -> bool:
    """Return whether another Trainer has put its stand-in there: of a rank that is a thread, or around this one."""
    return isinstance(value, Unknown) or (inside is not None and isinstance(next(iter(_each(inside)), None), Unknown))


def _own(place: ReadPlace) -> Any:
    """Return what is at a place, if the owner has it by itself and not by its class."""
    owner, (kind, key) = _owner(place), place.keys[-1]
    own = vars(owner) if kind == "." and hasattr(owner, "__dict__") else None
    return place.value() if own is None or key in own else MISSING


def _put(place: ReadPlace, value: Any) -> None:
    """Write to a place, also what its owner's code would not take; MISSING: nothing is there."""
    owner, (kind, key) = _owner(place), place.keys[-1]
    if owner is MISSING or _own(place) is value:
        return
    kinds = type if isinstance(owner, type) else object
    with suppress(AttributeError, KeyError, IndexError, TypeError):
        match kind, value is MISSING:
            case "[", True:
                del owner[key]
            case "[", False:
                owner[key] = value
            case _, True:
                kinds.__delattr__(owner, key)
            case _, False:
                kinds.__setattr__(owner, key, value)


def _fill(container: Any, values: Any) -> None:
    """Let a container hold these values alone."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(values)


def _each(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
