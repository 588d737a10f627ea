"""A safetensors checkpoint in Hugging Face's layout, read tensor by tensor."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from varuna.core.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""As transformers calls them; another library's names are taken where there is one of each."""
_WRAPPED = ".base_layer."
"""Part of the name under which PEFT keeps a layer that has adapters."""
_NAMED = 5
"""Most names that a message lists."""

Shape = tuple[int, ...]


class TensorEntry(NamedTuple):
    """The place of a tensor, by the file's own name."""

    file: Path
    name: str
    shape: Shape
    dtype: str


class Fit(NamedTuple):
    """The fit of files to a model: each parameter's entry, entries that are left over, and parameters without one."""

    entries: dict[str, TensorEntry]
    unexpected: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """parameters without an entry"""
    misshapen: tuple[str, ...] = ()
    """parameters whose entry is of another shape"""
    differences: str = ""
    """both, for people"""

    @property
    def without(self) -> frozenset[str]:
        """Parameters that the files have no values for."""
        return frozenset((*self.absent, *self.misshapen))


def list_entries(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file, of a folder with ``model.safetensors``, or of one with an index; reads headers only.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    entries: dict[str, TensorEntry] = {}
    for file in _files(path):
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    found = opened.get_slice(name)
                    entries[name] = TensorEntry(file, name, tuple(found.get_shape()), str(found.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"weights={str(path)!r}: {file} cannot be read ({error}). Download or save it again."
            ) from error
    return entries


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    named = [each for each in (path / INDEX, path / SINGLE) if each.is_file()][:1]
    indices, found = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
    for each in (named, indices, found):
        if len(each) == 1:
            return [each[0]] if each[0].suffix == ".safetensors" else _indexed(each[0])
    held = f"{len(found)} safetensors files without an index" if found else "no safetensors file"
    raise CheckpointError(
        f"weights={str(path)!r} must be a safetensors file, or a folder with {SINGLE} or {INDEX}; found "
        f"{held if path.is_dir() else 'nothing'} there. Save one with model.save_pretrained(folder)."
    )


def _indexed(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        return [index.parent / name for name in sorted(set(names))]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}. Save it again.") from error


def fit(
    entries: Mapping[str, TensorEntry],
    shapes: Mapping[str, Shape],
    aliases: Mapping[str, str],
    where: str,
    *,
    may_miss: bool = False,
) -> Fit:
    """Find the entry of every parameter, under any of its names, and with or without the prefix of a base model.

    Args:
        entries: by the file's names.
        shapes: parameter (first name) -> shape.
        aliases: further name of a tied parameter -> its first name.
        where: the path, for messages.
        may_miss: parameters may be missing or of another shape, but not all of them.

    Raises:
        CheckpointError: parameters are missing or of another shape; names them.
    """
    names = {name: _known(name, [alias for alias, first in aliases.items() if first == name]) for name in shapes}
    exact = {name: match for name, known in names.items() if (match := _first(known, entries))}
    # only names that no entry has vote: an exact match needs no prefix
    prefix, added = _prefix([known for name, known in names.items() if name not in exact], entries)
    found = dict(exact)
    for name in shapes.keys() - exact.keys():
        candidates = [_renamed(known, prefix, added) for known in names[name]]
        if match := _first(candidates, entries):
            found[name] = match
    missing = [name for name in shapes if name not in found]
    misshapen = [name for name, shape in shapes.items() if name in found and found[name].shape != shape]
    odd = [
        f"{name} is {list(found[name].shape)} in the file but {list(shapes[name])} in the model" for name in misshapen
    ]
    used = {entry.name for entry in found.values()}
    known_names = {_renamed(name, prefix, added) for name in aliases} | aliases.keys()
    unexpected = tuple(name for name in entries if name not in used and name not in known_names)
    parts = [f"{some(missing)} missing"] if missing else []
    parts += [f"{some(odd)}"] if odd else []
    said = "; ".join(parts)
    nothing_fits = len(missing) + len(odd) == len(shapes)
    if said and (nothing_fits or not may_miss):
        remedy = (
            "Build the model with the configuration and class that the weights were saved from, or leave weights= out."
        )
        if not nothing_fits:
            remedy += f' If they are new (another head): weights=varuna.Weights({where!r}, missing="initialise").'
        left = f"; {some(unexpected)} unexpected" if unexpected else ""
        raise CheckpointError(f"the weights in {where} do not fit the model: {said}{left}. {remedy}")
    return Fit(found, unexpected, tuple(missing), tuple(misshapen), said)


def read_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """Read some tensors, floating ones as fp32, each file opened once.

    Raises:
        CheckpointError: a file cannot be read.
    """
    by_file: dict[Path, list[str]] = {}
    for key, entry in entries.items():
        by_file.setdefault(entry.file, []).append(key)
    tensors: dict[str, Tensor] = {}
    for file, keys in by_file.items():
        try:
            with safe_open(str(file), framework="pt") as opened:
                for key in keys:
                    value: Tensor = opened.get_tensor(entries[key].name)
                    # copied: what safetensors returns is mapped from the file, which may change
                    tensors[key] = value.to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the weights in {file} cannot be read: {error}. Save them again.") from error
    return {key: tensors[key] for key in entries}


def fingerprint(entries: Mapping[str, TensorEntry]) -> str:
    """Hash of names, shapes, dtypes and file sizes: not of the values, which would take a full read."""
    digest = hashlib.sha256()
    for file in sorted({entry.file for entry in entries.values()}):
        digest.update(repr((file.name, file.stat().st_size)).encode())
    digest.update(repr(sorted((e.name, e.shape, e.dtype) for e in entries.values())).encode())
    return digest.hexdigest()[:16]


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more


def _known(name: str, aliases: list[str]) -> list[str]:
    """A parameter's names, and those that it had before PEFT wrapped its layer."""
    names = [name, *aliases]
    return [*names, *(each.replace(_WRAPPED, ".") for each in names if _WRAPPED in each)]


def _first(names: Iterable[str], entries: Mapping[str, TensorEntry]) -> TensorEntry | None:
    return next((entries[name] for name in names if name in entries), None)


def _renamed(name: str, prefix: str, added: bool) -> str:
    """The file's name for the model's: ``prefix`` is what the file adds, or what it lacks."""
    return prefix + name if added else name.removeprefix(prefix)


def _prefix(unmatched: list[list[str]], entries: Mapping[str, TensorEntry]) -> tuple[str, bool]:
    """The one prefix that gives most parameters their entry: (prefix, whether the file adds it)."""
    by_ending: dict[str, set[str]] = {}
    for name in entries:
        for start in _starts(name):
            by_ending.setdefault(name[start:], set()).add(name[:start])
    votes: Counter[tuple[str, bool]] = Counter()
    for known in unmatched:
        found = {(prefix, True) for name in known for prefix in by_ending.get(name, ())}
        found |= {(name[:start], False) for name in known for start in _starts(name) if name[start:] in entries}
        votes.update(found)
    # of equal votes the prefix itself decides, not the order of a table
    return max(votes, key=lambda vote: (votes[vote], vote), default=("", True))


def _starts(name: str) -> list[int]:
    """Return the positions where a shorter name could begin: after each dot."""
    return [position + 1 for position, letter in enumerate(name) if letter == "."]
