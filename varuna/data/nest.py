"""Nested batches as flat ones: ``{"inputs": {"x": x}, "views": [a, b]}`` has the keys ``inputs['x']`` and ``views[1]``.

A key says where its tensor is within the nest, so nothing else has to be kept to build the nest again.
"""

import re
from collections.abc import Mapping
from typing import Any

from varuna.data.sizes import of_samples

_STEP = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]")
_NESTED = re.compile(rf"([^\[]+)((?:{_STEP.pattern})+)", re.DOTALL)


def spread(fields: Mapping[str, object], is_leaf: Any) -> dict[str, object]:
    """Return all leaves of a nest of dicts, lists and tuples, by the place of each.

    Args:
        fields: a sample, or a batch.
        is_leaf: tells whether a dict, list or tuple is a leaf itself.
    """
    found: dict[str, object] = {}
    stack = [*fields.items()][::-1]
    while stack:
        place, value = stack.pop()
        inner = {} if is_leaf(value) else _inner(place, value)
        if inner:
            stack.extend([*inner.items()][::-1])
        else:
            found[place] = value
    return found


def _inner(place: str, value: object) -> dict[str, object]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {f"{place}[{_quoted(key)}]": each for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return {f"{place}[{number}]": each for number, each in enumerate(value)}
    return {}


def _quoted(key: str) -> str:
    escaped = key.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def root(place: str) -> str:
    """Return the key of the outermost dict."""
    found = _NESTED.fullmatch(place)
    return place if found is None else found[1]


def in_list(place: str) -> bool:
    """Return whether it is in a list, at any depth."""
    found = _NESTED.fullmatch(place)
    return found is not None and any(number for _, number in _STEP.findall(found[2]))


def nested(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Build the nest that a flat batch stands for: dicts, and lists for lists and tuples, as torch collates both."""
    whole: dict[str, Any] = {}
    for place, value in of_samples(batch).items():
        found = _NESTED.fullmatch(place)
        if found is None:
            whole[place] = value
            continue
        steps: list[str | int] = [found[1]]
        for name, number in _STEP.findall(found[2]):
            steps.append(int(number) if number else re.sub(r"\\(.)", r"\1", name))
        at: dict[Any, Any] = whole
        for step in steps[:-1]:
            at = at.setdefault(step, {})
        at[steps[-1]] = value
    return {key: _listed(value) for key, value in whole.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(each) for key, each in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
