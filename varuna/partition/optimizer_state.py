"""All state of an optimizer, by parameter, so that it can move, be saved and be put back over other parameters.

Beside ``state[parameter]`` many an optimizer counts in its groups (``group["step"]``), in attributes of its own, or in
an optimizer that it wraps. What ``step()`` has changed of these is state. It is kept with every parameter of the
group, or of the optimizer: so it is wherever one of them is, whatever other groups and parameters are there.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varuna.checkpoint.io.section_state import JSON
from varuna.core.errors import UsageError
from varuna.data.randomness import next_in_turn
from varuna.partition.optimizers import SeveralOptimizers, calls_closure, is_torchs
from varuna.partition.plain_values import MOST_ELEMENTS, NotPlainError, as_json, from_json, is_plain_object

BESIDE = "~beside"
"""Key, in a parameter's state, of what its optimizer keeps beside it."""
_PARAMETERS = frozenset({"params", "param_names"})
_TORCHS = frozenset(
    {
        *("defaults", "state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called"),
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
        "_warned_capturable_if_run_uncaptured",
    }
)
"""Attributes that torch gives to every optimizer."""
_DEEPEST = 3

_Names = Mapping[int, str]
"""By id of a parameter."""


class StatePlace(NamedTuple):
    """A table in which an optimizer may keep state beside its parameters."""

    label: str
    """such as ``options`` (of a group), ``attributes``, ``optimizer.attributes`` (of one that it wraps)"""
    entries: dict[Any, Any]
    members: Mapping[str, None]
    """parameters that it is for"""
    around: Mapping[str, None]
    """parameters of the optimizer that has it"""
    skipped: frozenset[str] = frozenset()
    """keys of what is never state"""
    group: int | None = None
    """number of the group, if it is one's options"""

    def plain(self) -> dict[Any, list[JSON]]:
        """Entries that may be state, as JSON, each in a list."""
        return {key: found for key, value in self._candidates() if (found := _plain(value, None)) is not None}

    def marks(self) -> dict[Any, object]:
        """Return a mark of each entry, which changes with it; None for what is not plain. Waits for no device."""
        found: dict[Any, object] = {}
        for key, value in self._candidates():
            versions: list[tuple[int, int]] = []
            told = _plain(value, versions)
            found[key] = None if told is None else (told, versions)
        return found

    def _candidates(self) -> Iterator[tuple[Any, Any]]:
        for key, value in list(self.entries.items()):
            if not isinstance(key, Tensor) and key not in self.skipped:
                yield key, value


def _plain(value: Any, versions: list[tuple[int, int]] | None) -> list[JSON] | None:
    """A value as JSON, in a list; None if it is no plain value. Of tensors their ``versions``, if wanted."""

    def put(path: str, tensor: Tensor) -> bool:
        if versions is None or tensor.numel() > MOST_ELEMENTS:
            return False
        versions.append((id(tensor), tensor._version))
        return True

    try:
        return [as_json(value, put)]
    except NotPlainError:
        return None


class InnerOptimizer(NamedTuple):
    """An optimizer, or one that another holds."""

    path: str
    """prefix by which it is reached: empty, or ``optimizer.`` for the attribute of this name"""
    optimizer: torch.optim.Optimizer


def parts_in(optimizer: torch.optim.Optimizer) -> Iterator[InnerOptimizer]:
    """An optimizer and those inside it, the outer ones first; each once."""
    seen = set[int]()
    roots = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
    for root in roots:
        yield from _parts_in(root, "", 0, seen)


def _parts_in(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[InnerOptimizer]:
    if id(value) in seen or depth > _DEEPEST:
        return
    if isinstance(value, torch.optim.Optimizer):
        seen.add(id(value))
        yield InnerOptimizer(path, value)
        for name, each in list(vars(value).items()):
            if name not in _TORCHS:
                yield from _parts_in(each, f"{path}{name}.", depth + 1, seen)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _parts_in(each, f"{path.removesuffix('.')}[{number}].", depth + 1, seen)
    elif isinstance(value, dict):
        for key, each in list(value.items()):
            if not isinstance(key, Tensor):
                yield from _parts_in(each, f"{path.removesuffix('.')}[{key!r}].", depth + 1, seen)
    elif is_plain_object(value) and not isinstance(value, Tensor | nn.Module):
        seen.add(id(value))
        for name, each in list(vars(value).items()):
            yield from _parts_in(each, f"{path}{name}.", depth + 1, seen)


def states_in(optimizer: torch.optim.Optimizer) -> list[Any]:
    """State tables; one that two optimizers share is there once."""
    return list({id(part.state): part.state for _, part in parts_in(optimizer)}.values())


def places_in(optimizer: torch.optim.Optimizer, names: _Names) -> list[StatePlace]:
    """Find an optimizer's places for state beside its parameters; groups that two optimizers share are there once."""
    found: list[StatePlace] = []
    seen = set[int]()
    for path, part in parts_in(optimizer):
        groups = [group["params"] for group in part.param_groups]
        members = [dict.fromkeys(names[id(each)] for each in its if id(each) in names) for its in groups]
        around = dict.fromkeys(name for its in members for name in its)
        for number, (group, its) in enumerate(zip(part.param_groups, members, strict=True)):
            if id(group) not in seen:
                seen.add(id(group))
                found.append(StatePlace(f"{path}options", group, its, around, _PARAMETERS, number))
        found.append(StatePlace(f"{path}attributes", vars(part), around, around, _TORCHS))
        if id(part.state) not in seen:
            seen.add(id(part.state))
            found.append(StatePlace(f"{path}state", part.state, around, around))
        for label, table in _objects(vars(part), f"{path}attributes", 0, seen):
            found.append(StatePlace(label, table, around, around))
    return found


def _objects(table: Mapping[str, Any], label: str, depth: int, seen: set[int]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Attributes of plain objects that are attributes."""
    for name, value in list(table.items()):
        if name in _TORCHS or isinstance(value, torch.optim.Optimizer | Tensor | nn.Module) or id(value) in seen:
            continue
        if is_plain_object(value) and depth < _DEEPEST:
            seen.add(id(value))
            yield f"{label}.{name}", vars(value)
            yield from _objects(vars(value), f"{label}.{name}", depth + 1, seen)


class OptimizerState:
    """State of one optimizer over some parameters, by their names."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Look at an optimizer; nothing of it has changed so far."""
        self._optimizer, self._named = optimizer, dict(named)
        self._names = {id(parameter): name for name, parameter in named}
        self._parts: dict[str, list[InnerOptimizer]] = {name: [] for name in self._named}  # that each is in
        for part in parts_in(optimizer):
            for parameter in (each for group in part.optimizer.param_groups for each in group["params"]):
                if id(parameter) in self._names:
                    self._parts[self._names[id(parameter)]].append(part)
        self._moved: set[tuple[str, int | None, Any]] = set()  # of places: what step() or put() has changed
        self._beside: list[tuple[StatePlace, Any, list[JSON]]] | None = None  # the same with values, until one changes

    # -- what a step changes -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Step the optimizer, and note what it changes beside its parameters' state."""
        self._beside = None
        if is_torchs(self._optimizer):  # those change nothing else, and have many options
            self._optimizer.step()
            return
        before = self._marks()
        next_in_turn(0)
        try:
            self._optimizer.step()
        except Exception as error:
            if "closure" in str(error):  # as those of SAM say it
                raise UsageError(calls_closure(self._optimizer)) from error
            raise
        after = self._marks()
        changed = {key for key in before.keys() | after.keys() if before.get(key, ...) != after.get(key, ...)}
        self._moved |= {key for key in changed if after.get(key, ...) is not None}  # a cache of tensors is not state

    def _marks(self) -> dict[tuple[str, int | None, Any], object]:
        return {
            (place.label, place.group, key): mark
            for place in places_in(self._optimizer, self._names)
            for key, mark in place.marks().items()
        }

    # -- by parameter --------------------------------------------------------------------------------------------

    def of(self, name: str) -> tuple[dict[str, Tensor], dict[str, JSON]]:
        """The state of a parameter, and with it what is kept beside: tensors, and values that are not tensors.

        Raises:
            UsageError: it is of a kind that cannot be saved.
        """
        parameter = self._named.get(name)
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, JSON] = {}
        if parameter is None:
            return tensors, scalars

        def put(path: str, value: Tensor) -> bool:
            tensors[path] = value
            return True

        for path, state in self._tables_of(name).items():
            for key, value in state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{path}{key}"] = value
                    continue
                try:
                    scalars[f"{path}{key}"] = as_json(value, put, f"{path}{key}")
                except NotPlainError as error:
                    raise UsageError(
                        f"the optimizer keeps {error} in state[parameter][{key!r}] (of {name}), which cannot be moved "
                        "to another worker or saved. Keep tensors, numbers, texts, or lists and dicts of them there."
                    ) from error
        beside = self._beside_of(name)
        if beside:
            scalars[BESIDE] = beside
        return tensors, scalars

    def _beside_of(self, name: str) -> list[JSON]:
        """Lists of label, group (None: the parameter's own), key and value (in a list; none: it is gone)."""
        if self._beside is None:
            found = [(place, place.plain()) for place in places_in(self._optimizer, self._names)] if self._moved else []
            self._beside = [
                (place, key, plain.get(key, []))
                for place, plain in found
                for label, group, key in sorted(self._moved, key=repr)
                if (label, group) == (place.label, place.group)
            ]
        entries: list[JSON] = []
        for place, key, value in self._beside:
            if name in place.members:
                entries.append([place.label, None, as_json(key), value])
            if name in place.around and place.group is not None:
                entries.append([place.label, place.group, as_json(key), value])
        return entries

    def put_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the parameters' own state, of those parameters that are here."""
        for name, parameter in self._named.items():
            given = {key: value for key, value in state.get(name, {}).items() if key != BESIDE}
            tables = self._tables_of(name)
            entries: dict[str, dict[str, Any]] = {path: {} for path in tables}
            inside: set[str] = set()  # paths of tensors in containers

            def take(
                path: str, given: Mapping[str, Any] = given, inside: set[str] = inside, device: Any = parameter.device
            ) -> Tensor:
                inside.add(path)
                found: Tensor = given[path]
                return found.to(device) if found.dim() else found  # counters stay on the host

            for key, value in given.items():
                # the longest: the path of an inner optimizer begins with that of its outer one
                path = max((each for each in tables if key.startswith(each)), key=len)
                found = value if isinstance(value, Tensor) else from_json(value, take)
                entries[path][key.removeprefix(path)] = found
            for path, its in entries.items():
                if its:
                    tables[path][parameter] = {key: its[key] for key in its if f"{path}{key}" not in inside}

    def _tables_of(self, name: str) -> dict[str, Any]:
        """State tables of the optimizers that a parameter is in, by how they are reached."""
        found: dict[str, Any] = {}
        for path, part in self._parts[name]:
            if not any(part.state is each for each in found.values()):
                found[path] = part.state
        return found

    def put_beside(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what was kept beside the parameters' state; parameters that share a place must agree on it.

        Raises:
            UsageError: they do not: it depended on which parameters were together.
        """
        self._beside = None
        given = {name: its[BESIDE] for name, its in state.items() if BESIDE in its and name in self._named}
        for place in places_in(self._optimizer, self._names):
            of_members = [(name, entry) for name in place.members for entry in given.get(name, [])]
            its = [(name, e) for name, e in of_members if e[0] == place.label and e[1] is None]
            if not place.members:  # a group that has no parameters on this stage
                of_all = [(name, entry) for name in place.around for entry in given.get(name, [])]
                its = [(name, e) for name, e in of_all if e[0] == place.label and e[1] == place.group]
            self._put_into(place, its)

    def _put_into(self, place: StatePlace, its: Sequence[tuple[str, Any]]) -> None:
        known: dict[Any, tuple[str, Any]] = {}
        for name, (_, _, encoded, value) in its:
            key = from_json(encoded)
            other, before = known.setdefault(key, (name, value))
            if repr(before) != repr(value):  # as text: NaN differs from itself
                raise UsageError(
                    f"the optimizer's {place.label}[{key!r}] is {_shown(before)} where {other} was trained and "
                    f"{_shown(value)} where {name} was: it depends on which parameters are together on a stage, so "
                    "stages cannot be put together. Train with --stages 1, or combine it over the stages with "
                    "varuna.all_reduce_shared."
                )
        for key, (_, value) in known.items():
            self._moved.add((place.label, place.group, key))
            if value:
                place.entries[key] = from_json(value[0], like=place.entries.get(key))
            else:
                place.entries.pop(key, None)

    # -- undone --------------------------------------------------------------------------------------------------

    def copies(self) -> "Undo":
        """Copy all state, to be put back bit for bit."""
        self._beside = None  # a caller that copies is about to change it
        tables = [(table, {key: _copied(its) for key, its in table.items()}) for table in states_in(self._optimizer)]
        places = [
            (place, {key: _copied(place.entries[key]) for key in place.plain()})
            for place in places_in(self._optimizer, self._names)
            if not any(place.entries is table for table, _ in tables)
        ]
        return Undo(tables, places)


def _copied(value: Any) -> Any:
    """A copy, of whose tensors each has memory of its own: ``deepcopy`` copies all that theirs may be a part of."""
    parts = [
        leaf for leaf in tree_leaves(value) if type(leaf) is Tensor and leaf.nbytes < leaf.untyped_storage().nbytes()
    ]
    return deepcopy(value, {id(part): part.detach().clone() for part in parts})


class Undo(NamedTuple):
    """Copies of an optimizer's state."""

    tables: list[tuple[Any, dict[Any, Any]]]
    places: list[tuple[StatePlace, dict[Any, Any]]]

    def restore(self) -> None:
        """Put them back."""
        for table, saved in self.tables:
            table.clear()
            table.update(saved)
        for place, saved in self.places:
            for key in place.plain().keys() - saved.keys():
                del place.entries[key]
            place.entries.update(saved)


def _shown(value: list[JSON]) -> str:
    return repr(from_json(value[0])) if value else "absent"
