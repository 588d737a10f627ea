"""A checkpoint as a Hugging Face folder: safetensors files by the model's own names, index, ``config.json``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from varuna.checkpoint.io.frozen import FROZEN
from varuna.checkpoint.io.restore import Wanted, read_states
from varuna.checkpoint.io.section_state import AVERAGE, SectionState
from varuna.checkpoint.manifest import Manifest
from varuna.checkpoint.names import CONFIG
from varuna.core.errors import CheckpointError, ObjectMissing
from varuna.core.saved import ITEM_BYTES
from varuna.store.base import Store
from varuna.store.folder import unwritable

FILE_BYTES = 5 * 10**9
"""The most that one file of a folder holds, as in Hugging Face's exports."""
_KINDS = ("parameters/", "buffers/")


class ExportedFolder(NamedTuple):
    """The size of an export: numbers of files and tensors, and bytes."""

    files: int
    tensors: int
    size_bytes: int
    has_config: bool


def is_exported(name: str) -> bool:
    """Return whether an entry of a section's state is part of the model, not of its training."""
    return name.startswith(_KINDS)


def own_names(state: SectionState) -> dict[str, Tensor]:
    """Return the model's tensors in a section, by its own names."""
    return {name.partition("/")[2]: value for name, value in state.tensors.items() if is_exported(name)}


def is_average(path: str) -> bool:
    """Return whether an entry of a section's state is the average of a parameter."""
    return path.startswith("optimizer/") and path.endswith(f"/{AVERAGE}")


def averaged_names(state: SectionState) -> dict[str, Tensor]:
    """Return the model's tensors in a section, by its own names: averages where there are any."""
    return {**own_names(state), **{_averaged(path): v for path, v in state.tensors.items() if is_average(path)}}


def _averaged(path: str) -> str:
    """Return the parameter of an average."""
    return path.split("/", 1)[1].rsplit("/", 1)[0]


def export_checkpoint(
    store: Store,
    manifest: Manifest,
    folder: Path,
    *,
    config: str | None = None,
    file_bytes: int = FILE_BYTES,
    average: bool = False,
) -> ExportedFolder:
    """Write a checkpoint's model; sections are read one at a time, and only what the model has of them.

    A tied parameter is written once, under its first name. ``config.json`` is ``config``, else what the run left in
    the checkpoint directory, else it is missing.

    Args:
        store: the checkpoint directory.
        manifest: of the checkpoint.
        folder: empty, or not there yet.
        config: text of ``config.json``.
        file_bytes: most that one file holds.
        average: write averages of the parameters in their place.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, or there are no averages.
        DamagedCheckpoint: the checkpoint's bytes are not those that were written.
        StoreError: it cannot be read.
    """
    _check_whole(manifest)
    if average and not any(is_average(piece.name) for shard in manifest.shards for piece in shard.pieces):
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} has no averages of parameters: train with Trainer(..., ema=0.999)"
        )
    sizes = _sizes(manifest, average=average)
    groups = _groups(sizes, file_bytes)
    names = [f"model-{n + 1:05d}-of-{len(groups):05d}.safetensors" for n in range(len(groups))]
    if len(groups) == 1:
        names = ["model.safetensors"]
    homes = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    text = config if config is not None else _saved_config(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(f"{folder} is not empty. Export into a new folder.")
        for file, group in zip(names, _read(store, manifest, groups, average=average), strict=True):
            save_file(group, str(folder / file), metadata={"format": "pt"})
        if len(groups) > 1:
            _write_index(folder, homes, sum(sizes.values()))
        if text is not None:
            (folder / CONFIG).write_text(text)
    except OSError as error:
        raise unwritable("write", folder, error) from error
    return ExportedFolder(len(groups), len(sizes), sum(sizes.values()), text is not None)


class ModelForm:
    """A publication of a whole model: a file for each part, with an index if there are several, and ``config.json``."""

    def __init__(self, config: str | None, aliases: Mapping[str, str]) -> None:
        """Describe it.

        Args:
            config: text of ``config.json``.
            aliases: other names of tied parameters, as ``safetensors.torch.load_model`` expects them.
        """
        self._config = config
        self.metadata: Mapping[str, str] = {"format": "pt", **aliases}

    def wants(self, path: str) -> bool:
        """Return whether an entry is part of the model."""
        return is_exported(path)

    def file_of(self, part: int, parts: int) -> str:
        """Name the file of a part, as Hugging Face does."""
        return "model.safetensors" if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.safetensors"

    def complete(self, folder: Path, files: Sequence[str]) -> None:
        """Write index and configuration.

        Raises:
            OSError: the folder cannot be written.
        """
        if len(files) > 1:
            homes: dict[str, str] = {}
            size_bytes = 0
            for file in files:
                with safe_open(str(folder / file), framework="pt") as opened:
                    homes.update(dict.fromkeys(opened.keys(), file))
                    slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118  no mapping
                    size_bytes += sum(ITEM_BYTES[each.get_dtype()] * prod(each.get_shape()) for each in slices)
            _write_index(folder, homes, size_bytes)
        if self._config is not None:
            (folder / CONFIG).write_text(self._config)


def _write_index(folder: Path, homes: Mapping[str, str], size_bytes: int) -> None:
    """Say in which file each tensor is."""
    index = {"metadata": {"total_size": size_bytes}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_whole(manifest: Manifest) -> None:
    """Refuse what could not be loaded: adapters without their base, under names that only the training script has.

    Raises:
        CheckpointError: says what to do instead.
    """
    left_out = any(FROZEN in shard.scalars for shard in manifest.shards)
    names = [piece.name for shard in manifest.shards for piece in shard.pieces]
    if left_out or any(name.startswith("parameters/base_model.model.") for name in names):
        what = "leaves out frozen parameters" if left_out else "is of a model with adapters of PEFT"
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} {what}, which only the training script knows. "
            "Run the script again: it resumes, and trainer.export(folder) after its loop writes what can be loaded."
        )


def _sizes(manifest: Manifest, *, average: bool) -> dict[str, int]:
    """Return the bytes of each tensor of the model, in the order of sections; an average may have another dtype."""
    pieces = {piece.name: prod(piece.shape) * ITEM_BYTES[piece.dtype] for s in manifest.shards for piece in s.pieces}
    found = {path.partition("/")[2]: size_bytes for path, size_bytes in pieces.items() if is_exported(path)}
    averages = {_averaged(path): size_bytes for path, size_bytes in pieces.items() if average and is_average(path)}
    return {name: averages.get(name, size_bytes) for name, size_bytes in found.items()}


def _groups(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Divide names over files, in order; a tensor larger than a file has one for itself."""
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, size_bytes in sizes.items():
        if groups[-1] and size_bytes > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size_bytes
    return groups


def _read(store: Store, manifest: Manifest, groups: list[list[str]], *, average: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file; no more than one file and one section are in memory."""
    waiting: dict[str, Tensor] = {}
    section = 0
    wanted: Wanted = (lambda name: is_exported(name) or is_average(name)) if average else is_exported
    for group in groups:
        while not waiting.keys() >= set(group):
            state = read_states(store, manifest, {section: wanted})[section]
            waiting.update(averaged_names(state) if average else own_names(state))
            section += 1
        yield {name: waiting.pop(name) for name in group}


def _saved_config(store: Store) -> str | None:
    try:
        return store.get(CONFIG).decode()
    except ObjectMissing:
        return None
