"""Values that a function reads around it, found in its bytecode: closures, globals, attributes of its object.

Functions that it calls by such a name count, too, unless a library has defined them; so do methods of its object's
class and bases, what decorators add, imports within it, and classes that it builds objects of. What it stores itself
does not: a counter or a cache of its own. What is read by another way, such as a file, ``globals()[name]`` or a C
extension, is not seen. A place is a base and the way from there::

    def loss(self, output, batch):            base                     keys
        return (
            SCALE                             module's globals         [SCALE]
            * config.weights["a"]             cell of config           .cell_contents .weights [a]
            * self.rate                       the bound object         .rate
        )
"""

import contextvars
import dis
import functools
import importlib.util
import inspect
import sys
import types
from collections import Counter, deque
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from varuna.data.placed_datasets import SETTERS
from varuna.job.handed_over.marks import attributes, is_users_object, mark_of
from varuna.partition.watching.own_code import OWN
from varuna.process.scripts import LIBRARIES

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "missing", "__reduce__": lambda _: "MISSING"})()
_MOST_FUNCTIONS = 300
_OF_CONTAINERS = """append appendleft extend extendleft insert add update setdefault pop popleft popitem clear remove
    discard sort reverse __setitem__"""
_WRITES = frozenset(_OF_CONTAINERS.split())
"""Methods of containers, for whose sake alone a function does not read one."""
_BASES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_SILENT = ("CACHE", "PUSH_NULL", "PRECALL", "NOP", "EXTENDED_ARG", "RESUME")
_PLAIN = str | bytes | int | float | complex | None
_NUMBERS, _DEEPEST = (int, float), 3
_IMPORT = "import "
"""Begins the name of a module that a function imports itself."""
_GLOBAL = "global "
"""Begins the name of a global that a function stores, which there may not be yet."""
CONTAINERS = (dict, list, set, deque)
_WATCHED = (nn.Module, torch.Tensor, torch.optim.Optimizer)
_OF_C = (types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)

Key = tuple[str, Any]
"""An attribute (``.``) or an item (``[``), by name."""
_Start = tuple[Any, tuple[Key, ...], str]
"""Container from which a local variable comes, the way from there, and the variable's name in the user's code."""


class ReadPlace(NamedTuple):
    """The place of a value: a dictionary or a cell, and the way from there."""

    base: Any
    """a namespace's dictionary, a closure's cell, or an object"""
    keys: tuple[Key, ...]
    name: str
    """as the user's code says it"""

    def value(self) -> Any:
        """Return what is there now."""
        found = self.base
        for key in self.keys:
            found = _step(found, key)
            if found is MISSING:
                break
        return found

    def write(self, value: Any) -> None:
        """Write there."""
        owner, (kind, name) = self._replace(keys=self.keys[:-1]).value(), self.keys[-1]
        if kind == "[":
            owner[name] = value
        else:
            setattr(owner, name, value)

    def spots(self, *, is_written: bool = False) -> set[tuple[int, Any]]:
        """Marks of the place, of which reading and writing it have one in common, also on two ways to it.

        Each is an object, by its id, and one of its entries; None: whichever there is; ...: all that there are.
        """
        owners = [self._replace(keys=self.keys[:stop]).value() for stop in range(len(self.keys) + 1)]
        whole = {(id(owners[-1]), None)} if isinstance(owners[-1], CONTAINERS) else set()
        entries = [(id(owner), key) for owner, (_, key) in zip(owners, self.keys, strict=False)]
        if not is_written:
            return {*entries, *whole, *((id(owner), ...) for owner in owners if isinstance(owner, CONTAINERS))}
        last = [spot for owner, key in entries[-1:] for spot in ((owner, key), (owner, None))]
        return {*last, *whole, *((owner, ...) for owner, _ in whole)}

    @property
    def last(self) -> str:
        """The name that a statement that writes there has."""
        found = str(self.keys[-1][1]) if self.keys else ""
        return self.name if found == "cell_contents" else found


@dataclass
class Reads:
    """Places that some functions read."""

    places: dict[tuple[int, tuple[Key, ...]], ReadPlace] = field(default_factory=dict)
    written: dict[tuple[int, tuple[Key, ...]], ReadPlace] = field(default_factory=dict)
    """places that the functions store to themselves"""
    kept: list[ReadPlace] = field(default_factory=list)
    """those of them to which no library's code stores"""
    names: set[str] = field(default_factory=set)
    """all attributes and globals that the code names"""
    texts: set[str] = field(default_factory=set)
    """all texts in it, such as keys"""
    modules: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)
    """that the functions call"""
    classes: dict[int, type] = field(default_factory=dict)
    """of the user's, whose code the functions run"""
    stored: set[str] = field(default_factory=set)
    """attributes that the functions store, of whatever object"""
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _near: set[str] = field(default_factory=set)
    """names in the code that is looked into"""
    _is_users: bool = True
    """no library has defined it"""
    _owners: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """objects whose methods are looked into"""

    def found(self) -> list[ReadPlace]:
        """Return all places but those that the functions write, or that lie in something that they write."""
        found = [
            place
            for (base, keys), place in self.places.items()
            if not any((base, keys[:stop]) in self.written for stop in range(1, len(keys) + 1))
        ]
        known, named = {(id(each.base), each.keys) for each in found}, self.names | self.texts
        named -= self.stored | {key for _, keys in self.written for kind, key in keys if kind == "."}
        for each in self.classes.values():
            places = (ReadPlace(each, ((".", key),), f"{each.__name__}.{key}") for key in vars(each) if key in named)
            found += [place for place in places if (id(each), place.keys) not in known]
        return found

    def singletons(self) -> list[ReadPlace]:
        """Objects of the user's that the functions have put into places of theirs, as singletons are."""
        written = [(place.name, place.value()) for place in self.written.values()]
        written += [
            (name, each) for name, found in written if type(found) is dict for each in list(found.values())[:16]
        ]
        return [ReadPlace(value, (), name) for name, value in written if is_users_object(value)]

    def read_of(self, written: "Reads") -> ReadPlace | None:
        """Return a place that these functions read and those of ``written`` write, if there is one."""
        spots = {spot for place in written.written.values() for spot in place.spots(is_written=True)}
        return next((each for each in self.places.values() if not spots.isdisjoint(each.spots())), None)

    def numbers(self) -> list[ReadPlace]:
        """Return places of numbers around the functions and in the user's objects that they use, written or not."""
        found = [place for place in self.places.values() if isinstance(place.base, dict | types.CellType)]
        found = [place for place in found if type(place.value()) in _NUMBERS and not _is_librarys(place.base)]
        seen = set[int]()
        for owner, name in self._owners.values():
            found.extend(_numbers_in(owner, name, seen, 0))
        return found

    def follow_reads(self, subject: Any, name: str) -> None:
        """Look into a function, a method, a class, or an object that can be called or indexed."""
        if isinstance(subject, functools.partial):
            self.follow_reads(subject.func, name)
            for key, each in ((".args", subject.args), (".keywords", subject.keywords)):
                self._leaf(ReadPlace(subject, ((".", key[1:]),), f"{name}{key}"), each)
            return
        if isinstance(subject, types.MethodType):
            self._codes(subject.__func__, subject.__self__, _label(subject.__self__, name))
        elif isinstance(subject, types.FunctionType | functools._lru_cache_wrapper):
            self._codes(subject, MISSING, name)
        elif isinstance(subject, type):
            self._class(subject, name)
        elif isinstance(subject, nn.Module):
            self.modules.setdefault(id(subject), (subject, name))
            for path, each in subject.named_modules():
                forward = vars(each).get("forward", type(each).forward)
                self._codes(getattr(forward, "__func__", forward), each, f"{name}.{path}" if path else name)
                for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values()):
                    self.follow_reads(hook, f"a hook of {path or name}")
        elif not isinstance(subject, CODE):
            for method in ("__call__", "__getitem__", "__getitems__", "__len__", "index_at", *SETTERS):
                function = inspect.getattr_static(type(subject), method, None)
                if isinstance(function, types.FunctionType):
                    self._codes(function, subject, name)

    def _class(self, found: type, name: str) -> None:
        """Look into what an instance of a class does when it is built, called or indexed, or by a method named here."""
        for each in _users_classes(found):
            for key, value in list(vars(each).items()):
                if key == "forward" or key in self._near or (key.startswith("__") and callable(value)):
                    self._codes(getattr(value, "__func__", value), found, name)  # __new__ is a static method
        for each in _users_classes(type(found)):
            self._codes(vars(each).get("__call__"), found, name)

    def _codes(self, function: Any, owner: Any, name: str) -> None:
        """Look into a function, and what it wraps."""
        while isinstance(function, types.FunctionType | functools._lru_cache_wrapper):
            wrapped = getattr(function, "__wrapped__", None)
            if isinstance(registry := getattr(function, "registry", None), types.MappingProxyType):  # singledispatch
                for each in registry.values():
                    self._codes(each, owner, name)
            if wrapped is None or not is_library(
                function.__code__.co_filename if hasattr(function, "__code__") else "<frozen"
            ):
                self._code(function, owner, name)
            function = wrapped

    def _code(self, function: Any, owner: Any, name: str) -> None:
        code = getattr(function, "__code__", None)
        if code is None or (id(code), id(owner)) in self._seen or len(self._seen) >= _MOST_FUNCTIONS:
            return
        self._seen.add((id(code), id(owner)))
        if (owner is MISSING or isinstance(owner, type)) and (
            is_library(code.co_filename) or code.co_filename.startswith(OWN)
        ):
            return
        if not isinstance(owner, type):
            self._owners.setdefault(id(owner), (owner, name))
        if owner is not MISSING:
            kinds = owner if isinstance(owner, type) else type(owner)
            self.classes.update({id(each): each for each in _users_classes(kinds)})
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        own = _defaults(function)
        if code.co_argcount and owner is not MISSING:
            own[code.co_varnames[0]] = (owner, (), name)
        if "super" in code.co_names and "__class__" in cells:
            self._supers(code, cells["__class__"].cell_contents, owner, name)
        before = self._near, self._is_users
        self._near = {name for each in _with_inner(code) for name in each.co_names}
        self._is_users = not is_library(code.co_filename)
        for each in _with_inner(code):
            self.names.update(each.co_names)
            self.texts.update(text for text in each.co_consts if isinstance(text, str))
            if code.co_name != "__init__":
                self.stored.update(step.argval for step in dis.get_instructions(each) if step.opname == "STORE_ATTR")
            for base, keys, stores in _loads(each, own):
                self._take(function, cells, own, (base, keys, stores))
        self._near, self._is_users = before

    def _supers(self, code: types.CodeType, within: type, owner: Any, name: str) -> None:
        """Look into methods of base classes that code calls by ``super()``."""
        line = (owner if isinstance(owner, type) else within if owner is MISSING else type(owner)).__mro__
        for method in code.co_names:
            later = line[line.index(within) + 1 :] if within in line else ()
            found = next((vars(each)[method] for each in later if method in vars(each)), None)
            self._codes(getattr(found, "__func__", found), owner, name)

    def _take(self, function: Any, cells: Mapping[str, Any], own: Mapping[str, _Start], load: tuple[Any, ...]) -> None:
        base, keys, stores = load
        before: tuple[Key, ...]
        if base in own:
            start, before, said = own[base]
        elif base in cells:
            start, before, said = cells[base], ((".", "cell_contents"),), base
        elif base in function.__globals__ or base.startswith(_GLOBAL):
            said = base.removeprefix(_GLOBAL)
            start, before = function.__globals__, (("[", said),)
        elif base.startswith(_IMPORT):
            said = _module_name(base, function.__globals__)
            start, before = sys.modules.get(said), ()
        else:
            return
        if stores:
            self._wrote(ReadPlace(start, (*before, *keys), f"{said}{''.join(map(_shown, keys))}"))
            return
        self._resolve(start, before, keys, said)

    def _wrote(self, place: ReadPlace) -> None:
        if len(place.keys) > 1 and place.keys[-2] == (".", "__dict__"):
            place = place._replace(keys=(*place.keys[:-2], (".", place.keys[-1][1])))
        self.written.setdefault((id(place.base), place.keys), place)
        if self._is_users:
            self.kept.append(place)

    def _resolve(self, start: Any, before: tuple[Key, ...], keys: Sequence[Key], said: str) -> None:
        """Follow a way as far as there are values, and note where it ends."""
        done, value = list(before), ReadPlace(start, before, said).value()
        for kind, key in keys:
            if isinstance(value, MutableMapping | MutableSequence | MutableSet | deque) and kind == ".":
                if key in _WRITES:
                    self._wrote(ReadPlace(start, tuple(done), said))
                    return
                if type(value) in (dict, list, set, deque) or not isinstance(value, Mapping) or key not in value:
                    break
                kind = "["  # a dict whose entries are its attributes
            if isinstance(value, torch.Tensor) and kind == "." and key.endswith("_") and not key.endswith("__"):
                self._wrote(ReadPlace(start, tuple(done), said))
                return
            if self._ends(value, (kind, key), said) or (kind == "." and _is_of_c(value, key)):
                break
            if kind == "." and self._is_code(value, key, said):
                way = (*done, (kind, key))
                if not isinstance(value, nn.Module):  # the loop may put another one there
                    self.places.setdefault((id(start), way), ReadPlace(start, way, f"{said}.{key}"))
                return
            done.append((kind, key))
            said = f"{said}{_shown((kind, key))}"
            value = _step(value, (kind, key))
            if value is MISSING:
                break
        if done:
            self._leaf(ReadPlace(start, tuple(done), said), value)
        elif not isinstance(start, (*_WATCHED, *CODE)):  # passed to another function
            self.places.setdefault((id(start), ()), ReadPlace(start, (), said))

    def _ends(self, value: Any, key: Key, said: str) -> bool:
        """Return whether there is no way into a value from outside of code that the function calls."""
        if key[0] == "(":
            return not isinstance(value, functools._lru_cache_wrapper)
        if isinstance(value, contextvars.ContextVar):
            return True
        if isinstance(value, CODE) and not isinstance(value, types.ModuleType | type):
            if not _is_own(value, key[1]):
                return True
            self.follow_reads(value, said)
        return False

    def _is_code(self, value: Any, name: str, said: str) -> bool:
        """Look into a method or a property; return whether it is one."""
        kinds = value if isinstance(value, type) else type(value)
        found = inspect.getattr_static(kinds, name, None)
        if isinstance(found, staticmethod | classmethod):
            self._codes(found.__func__, kinds if isinstance(found, classmethod) else MISSING, said)
        elif isinstance(found, property) and value is not kinds and _told(value, found) is MISSING:
            self._codes(found.fget, value, said)
        elif isinstance(found, types.FunctionType) and not _is_own(value, name):
            self._codes(found, value, said)
        else:
            return False
        return True

    def _leaf(self, place: ReadPlace, value: Any) -> None:
        self.places.setdefault((id(place.base), place.keys), place)
        if isinstance(value, torch.Tensor | _PLAIN):
            return
        if isinstance(value, Mapping | list | tuple | set | deque):
            for each in list(value.values() if isinstance(value, Mapping) else value)[:16]:
                if not isinstance(each, torch.Tensor | _PLAIN):
                    self.follow_reads(each, place.name)
            return
        self.follow_reads(value, place.name)


def seen_by(function: Any) -> str:
    """Return all values that a function reads, in words that differ once one has changed."""
    found = Reads()
    found.follow_reads(function, "")
    return repr([mark_of(place.value(), found.names | found.texts) for place in found.found()])


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, or to something that was installed."""
    return any(part in file for part in LIBRARIES) or file.startswith("<frozen")


def _is_librarys(base: Any) -> bool:
    """Return whether a namespace or an object belongs to a library."""
    scope = base if isinstance(base, dict) else vars(sys.modules.get(type(base).__module__, types))
    return is_library(str(scope.get("__file__", "")))


def _numbers_in(owner: Any, name: str, seen: set[int], depth: int) -> Iterator[ReadPlace]:
    """Yield places of numbers in an object of the user's, and in objects that it holds."""
    if id(owner) in seen or depth > _DEEPEST or isinstance(owner, CODE):
        return
    seen.add(id(owner))
    if isinstance(owner, list | tuple):
        for each in owner[:16]:
            yield from _numbers_in(each, name, seen, depth + 1)
    elif hasattr(owner, "__dict__") and (depth == 0 or not _is_librarys(owner)):
        for key, value in list(vars(owner).items()):
            if type(value) in _NUMBERS:
                yield ReadPlace(owner, ((".", key),), f"{name}.{key}")
            elif not isinstance(value, _PLAIN):
                yield from _numbers_in(value, f"{name}.{key}", seen, depth + 1)


def _is_of_c(value: Any, key: str) -> bool:
    """Return whether an attribute is a method without code in Python, or of a value that is compared as a whole."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return True
    return not isinstance(value, type) and isinstance(inspect.getattr_static(type(value), key, None), _OF_C)


def _is_own(value: Any, key: str) -> bool:
    return key in getattr(value, "__dict__", ())


def _label(owner: Any, name: str) -> str:
    return "self" if name.endswith("=") else name


def _users_classes(found: type) -> list[type]:
    """The class and its bases, without those of libraries, and functions for autograd, which run in every step."""
    if issubclass(found, torch.autograd.Function):
        return []
    files = (
        (each, str(getattr(sys.modules.get(each.__module__), "__file__", None) or "<frozen")) for each in found.__mro__
    )
    return [each for each, file in files if not is_library(file) and not file.startswith(OWN)]


def _shown(key: Key) -> str:
    """Return a step of a way as code has it."""
    kind, name = key
    return "()" if kind == "(" else f".{name}" if kind == "." else f"[{name!r}]"


def _told(value: Any, found: Any) -> Any:
    """Return a plain value that a library, or C, computes for an attribute; MISSING: it is another thing."""
    is_c = not isinstance(found, property) or is_library(getattr(found.fget, "__code__", _told.__code__).co_filename)
    if not is_c or not hasattr(type(found), "__set__") or isinstance(value, _WATCHED):
        return MISSING
    try:
        told = found.__get__(value)
    except Exception:  # noqa: BLE001 - whatever a property raises
        return MISSING
    return told if isinstance(told, _PLAIN) else MISSING


def _module_name(base: str, scope: Mapping[str, Any]) -> str:
    name = base.removeprefix(_IMPORT)
    try:
        return importlib.util.resolve_name(name, scope.get("__package__") or "")
    except ImportError:
        return name


def _step(value: Any, key: Key) -> Any:
    kind, name = key
    if kind == "(":
        is_kept = isinstance(value, functools._lru_cache_wrapper) and value.cache_info().currsize == 1
        return value() if is_kept else MISSING
    if kind == "[":
        try:
            return value[name]
        except Exception:  # noqa: BLE001 - the user's __getitem__ may raise anything
            return MISSING
    if type(value) is types.CellType:
        try:
            return value.cell_contents
        except ValueError:
            return MISSING
    own = attributes(value)
    if own is not None and name in own:
        return own[name]
    if isinstance(value, nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            if name in table:
                return table[name]
    return _of_its_class(value, name)


def _of_its_class(value: Any, name: str) -> Any:
    if isinstance(value, type):
        found = inspect.getattr_static(value, name, MISSING)
    else:  # faster than that
        found = next((vars(each)[name] for each in type(value).__mro__ if name in vars(each)), MISSING)
    if isinstance(found, types.MemberDescriptorType):
        return found.__get__(value)
    if found is not MISSING and not isinstance(found, CODE):
        return found if (told := _told(value, found)) is MISSING else told
    if found is MISSING and hasattr(type(value), "__getattr__") and not isinstance(value, _WATCHED):
        try:
            return getattr(value, name)
        except Exception:  # noqa: BLE001 - the user's __getattr__ may raise anything
            return MISSING
    return found


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def _defaults(function: types.FunctionType) -> dict[str, _Start]:
    """Defaults of arguments that can change in place."""
    code, given, named = function.__code__, function.__defaults__ or (), function.__kwdefaults__ or {}
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    found: list[tuple[str, Any, Any, Any]]
    found = [(name, given, number, each) for number, (name, each) in enumerate(zip(names, given, strict=True))]
    found += [(name, named, name, each) for name, each in named.items()]
    return {name: (base, (("[", key),), name) for name, base, key, each in found if not isinstance(each, _PLAIN)}


def _loads(code: types.CodeType, own: Mapping[str, _Start]) -> Iterator[tuple[str, tuple[Key, ...], bool]]:
    """Yield (name, way from it, whether it is stored to) of everything that a code loads from outside of it."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _SILENT]
    stores = Counter(_stored_local(each) for each in steps)
    aliases: dict[str, tuple[str, tuple[Key, ...]]] = {}
    for at, each in enumerate(steps):
        if each.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            yield f"{_GLOBAL if each.opname == 'STORE_GLOBAL' else ''}{each.argval}", (), True
        if each.opname == "IMPORT_NAME":
            aliases.update(_imported(steps, at))
        name = _base(each, own.keys() | aliases.keys())
        if name is None:
            continue
        name, begin = aliases.get(name, (name, ())) if name not in own else (name, ())
        keys, end = _way(steps, at + 1)
        keys = (*begin, *keys)
        # getattr(x, "name") reads x.name, setattr(x, "name", value) writes it: the name of the function is loaded first
        called = steps[at - 1].argval if at and steps[at - 1].opname == "LOAD_GLOBAL" else ""
        is_text = end < len(steps) and steps[end].opname in _CONSTANTS and isinstance(steps[end].argval, str)
        if called == "getattr" and is_text:
            keys = (*keys, (".", steps[end].argval))
        by_text = called == "setattr" and is_text
        stored = [((".", steps[end].argval),)] if by_text else list(_stored(steps[end : end + 4]))
        if not stored and (end >= len(steps) or steps[end].opname != "LOAD_SUPER_ATTR"):
            yield name, keys, False
        yield from ((name, (*keys, *more), True) for more in stored)
        local = _stored_local(steps[end]) if end < len(steps) else ""
        # a local variable that is stored once is another name for what it was made of
        if stores[local] == 1 and local and local not in own:
            aliases[local] = (name, keys)


def _way(steps: Sequence[dis.Instruction], at: int) -> tuple[tuple[Key, ...], int]:
    """The way that is followed from an instruction on, and where it has ended."""
    keys: list[Key] = []
    while at < len(steps):
        now, then = steps[at], steps[min(at + 1, len(steps) - 1)]
        if now.opname in _ATTRIBUTES and now.argval in _LOOKUPS and then.opname in _CONSTANTS:
            return (*keys, *_LOOKUPS[now.argval], ("[", then.argval)), at
        if now.opname in _ATTRIBUTES:
            keys.append((".", now.argval))
            at += 1
        elif now.opname == "CALL" and now.argval == 0:
            keys.append(("(", ""))
            at += 1
        elif now.opname in _CONSTANTS and _is_subscript(then):
            keys.append(("[", now.argval))
            at += 2
        else:
            break
    return tuple(keys), at


_LOOKUPS: dict[str, tuple[Key, ...]] = {"get": (), "getenv": ((".", "environ"),)}
"""Methods that look an item up by the text that follows, with the way to what has the items."""


def _stored_local(step: dis.Instruction) -> str:
    """Name of the local variable that an instruction stores to, the first of them; empty: none."""
    if not step.opname.startswith("STORE_FAST"):
        return ""
    return str(step.argval[0] if isinstance(step.argval, tuple) else step.argval)


def _imported(steps: Sequence[dis.Instruction], at: int) -> Iterator[tuple[str, tuple[str, tuple[Key, ...]]]]:
    """Yield local variables of an import statement, each with the name of its module and the way from there."""
    # IMPORT_NAME takes the level and the list of names from the two instructions before it
    names, module = steps[at - 1].argval, "." * int(steps[at - 2].argval or 0) + steps[at].argval
    keys: tuple[Key, ...] = ()
    for step in steps[at + 1 :]:
        if step.opname == "IMPORT_FROM":
            keys = ((".", step.argval),) if names else ()
        elif local := _stored_local(step):
            whole = module if names or steps[at + 1].opname == "IMPORT_FROM" else module.partition(".")[0]
            yield local, (f"{_IMPORT}{whole}", keys)
            if not names:
                return
        elif step.opname not in ("SWAP", "ROT_TWO"):
            return


_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")


def _base(step: dis.Instruction, own: Collection[str]) -> str | None:
    if step.opname in _BASES:
        return str(step.argval)
    if "LOAD_FAST" in step.opname:  # the last of two, as 3.13 fuses them
        last = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        return str(last) if last in own else None
    return None


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _stored(steps: Sequence[dis.Instruction]) -> Iterator[tuple[Key, ...]]:
    """Yield the places stored to after a way: ``x.a = ``, ``x["a"] = ``, ``x[i] = ``, ``x.a += ``, ``x["a"] += ``."""
    names = [step.opname for step in steps]
    if names[:1] == ["STORE_ATTR"]:
        yield ((".", steps[0].argval),)
    elif names[:2] == ["COPY", "LOAD_ATTR"]:
        yield ((".", steps[1].argval),)
    elif len(names) > 1 and names[0] in _CONSTANTS and names[1] in ("STORE_SUBSCR", "COPY"):
        yield (("[", steps[0].argval),)
    elif names[1:2] == ["STORE_SUBSCR"] or names[1:3] == ["COPY", "COPY"]:
        yield ()


def written_at(name: str, codes: Callable[[], Iterator[types.CodeType]]) -> tuple[str, int] | None:
    """File and line of the first statement that writes to something of that name."""
    for code in codes():
        for each in _with_inner(code):
            line, before = each.co_firstlineno, ""
            for step in dis.get_instructions(each):
                line = (step.positions.lineno if step.positions is not None else None) or line
                if step.opname.startswith("STORE_") and (
                    step.argval == name or (before, step.opname) == (name, "STORE_SUBSCR")
                ):
                    return each.co_filename, line
                if step.opname not in _SILENT:
                    before = step.argval if step.opname in _CONSTANTS else ""
    return None
