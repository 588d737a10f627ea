"""State of a module besides parameters and buffers, and whether forward changes it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from varuna.checkpoint.io.section_state import bit_sum

_TABLES = ("_parameters", "_buffers", "_modules", "training")
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""Endings of torch's names for a module's tables of hooks."""
_DEEPEST = 3
_MOST = 64
"""Most elements of a container that are looked at."""

Numbers = Mapping[str, "int | float | bool | str"]
Attributes = Sequence[tuple[nn.Module, Mapping[str, Any]]]
"""Modules with their plain attributes"""


def plain_values(module: nn.Module) -> dict[str, int | float | bool | str]:
    """Numbers and texts in plain attributes of all modules, also in containers and objects that they hold, by path."""
    found: dict[str, int | float | bool | str] = {}
    for prefix, each in module.named_modules():
        for name, value in vars(each).items():
            if name not in _TABLES and not (name.startswith("_") and "hooks" in name):
                found.update(_values(f"{prefix}.{name}" if prefix else name, value, 0))
    return found


def changed(before: Numbers, after: Numbers) -> dict[str, tuple[Any, Any]]:
    """Path -> (before, after) of numbers that have changed."""
    return {
        path: (value, after[path])
        for path, value in before.items()
        if path in after and after[path] != value and not isinstance(value, str)
    }


def _values(path: str, value: Any, depth: int) -> Iterator[tuple[str, int | float | bool | str]]:
    if isinstance(value, bool | int | float | str):
        yield path, value
    elif depth >= _DEEPEST or isinstance(value, Tensor | nn.Module | type) or callable(value):
        return
    elif isinstance(value, Mapping):
        for key in list(value)[:_MOST]:
            yield from _values(f"{path}[{key!r}]", value[key], depth + 1)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value[:_MOST]):
            yield from _values(f"{path}[{number}]", each, depth + 1)
    elif hasattr(value, "__dict__"):
        for name, each in list(vars(value).items())[:_MOST]:
            yield from _values(f"{path}.{name}", each, depth + 1)


class ModuleNumber(NamedTuple):
    """A number in a plain attribute of a module: a ``Place``."""

    name: str
    owner: nn.Module

    def value(self) -> Any:
        """Return what is there."""
        return vars(self.owner)[self.name.rpartition(".")[2]]

    def write(self, value: Any) -> None:
        """Write there, past what the module makes of assignments."""
        object.__setattr__(self.owner, self.name.rpartition(".")[2], value)


def number_at(module: nn.Module, path: str) -> ModuleNumber | None:
    """The number at a path; None where that leads into a container or an object."""
    owner, _, name = path.rpartition(".")
    try:
        found = module.get_submodule(owner)
    except AttributeError:
        return None
    return ModuleNumber(path, found) if name in vars(found) else None


@contextmanager
def same_attributes(module: nn.Module) -> Iterator[None]:
    """After this block, plain attributes of all modules, and their hooks, are the objects that they were.

    A forward may register its hooks when it is first called, and note that in an attribute.
    """
    before = [(each, _attributes(each)) for each in module.modules()]
    attributes = [each for _, values in before for each in values.items()]
    tables = [table for name, table in attributes if name.endswith(_HOOKS) and isinstance(table, dict)]
    hooks = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for each, values in before:
            for name in _attributes(each).keys() - values.keys():
                vars(each).pop(name)
            vars(each).update(values)
        for table, registered in hooks:
            table.clear()
            table.update(registered)


def replaced(before: nn.Module, values: Attributes) -> list[str]:
    """Paths of plain attributes that have become other objects with tensors in them since ``attributes``."""
    paths = {id(each): f"{path}." if path else "" for path, each in before.named_modules()}
    return [
        f"{paths[id(each)]}{name}"
        for each, old in values
        for name, value in _attributes(each).items()
        if value is not old.get(name) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    ]


def attributes(module: nn.Module) -> Attributes:
    """Plain attributes of all modules, as they are."""
    return [(each, _attributes(each)) for each in module.modules()]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TABLES}


def marks(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Parameter -> version and sum of its bits, which change when it is written."""
    return {name: (value._version, bit_sum(value)) for name, value in module.named_parameters()}
