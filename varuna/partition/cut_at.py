"""Cuts that the user names: in front of modules of the model (``Trainer(cut=[...])``)."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from torch.fx import Node

from varuna.core.errors import ModelError
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.model import CutChooser

_ROOT = "model"
"""The user's model inside ``LossModule``."""
_NAMED = 8


def chooser(paths: Sequence[str]) -> CutChooser:
    """The chooser of cuts at the modules that the user names."""

    def choose(flow: Flow, _: Sequence[Cost]) -> list[int]:
        return cuts_at(flow, paths)

    return choose


def cuts_at(flow: Flow, paths: Sequence[str]) -> list[int]:
    """Positions to cut after, so that a section begins where each module is entered; ascending.

    A module that is called several times begins a section at each call.

    Args:
        flow: the captured graph.
        paths: the model's own names of modules, as in ``named_modules()``.

    Raises:
        ModelError: there is no such module, or the graph cannot be cut in front of it.
    """
    entries = _entries(flow.ops)
    live_bytes = flow.live_bytes()
    free = [path for path, starts in entries.items() if all(at > 0 and live_bytes[at - 1] is not None for at in starts)]
    cuts: set[int] = set()
    for path in paths:
        starts = entries.get(path)
        if starts is None:
            raise ModelError(_unknown(path, entries, free, flow))
        if 0 in starts:
            raise ModelError(
                f"cut=[{path!r}]: nothing runs before this module, so there is nothing to cut off. Leave it out; "
                f"the first section begins here anyway. {_offer(path, free)}"
            )
        if path not in free:
            raise ModelError(
                f"cut=[{path!r}]: the model cannot be cut before this module, because a tensor that is written in "
                "place after the cut, or a value that is not a tensor, would have to cross it. "
                f"{_offer(path, free)}"
            )
        cuts.update(at - 1 for at in starts)
    return sorted(cuts)


def _entries(ops: Iterable[Node]) -> dict[str, list[int]]:
    """Module -> position of the first op of each of its calls."""
    calls: dict[str, dict[str, int]] = {}
    for position, node in enumerate(ops):
        # the stack's keys tell two calls of a module apart, its values name the module
        for call, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            root, _, name = str(path).partition(".")
            if root == _ROOT and name:
                calls.setdefault(name, {}).setdefault(str(call), position)
    return {path: sorted(set(starts.values())) for path, starts in calls.items()}


def _unknown(path: str, entries: dict[str, list[int]], free: Sequence[str], flow: Flow) -> str:
    inside = [name for name in entries if name.startswith(f"{path}.")]
    if inside:
        why = "this module holds others and is never called itself. Name those inside it"
        members = dict.fromkeys(f"{path}.{name[len(path) + 1 :].split('.')[0]}" for name in inside)
        choice = [name for name in free if name in members] or [name for name in free if name in inside]
        return f"cut=[{path!r}]: {why}: {_some(choice)}."
    if path in _entries(flow.rebuilt):
        return (
            f"cut=[{path!r}]: this module computes from inputs and constants only, and is run again wherever it "
            f"is needed, so no section begins with it. {_offer(path, free)}"
        )
    return f"cut=[{path!r}]: forward() does not call a module of this name. {_offer(path, free)}"


def _offer(path: str, free: Sequence[str]) -> str:
    tail = [name for name in free if name.endswith(f".{path}") or path.endswith(f".{name}")]
    near = list(dict.fromkeys([*tail, *get_close_matches(path, free, _NAMED, 0.5)]))
    return f"Similar names that can be cut at: {_some(near or free)}."


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) or "none"
    return f"{shown}, … ({len(names) - _NAMED} more)" if len(names) > _NAMED else shown
