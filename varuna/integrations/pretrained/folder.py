"""Contents of a model's folder and of a file of samples, checked before anything is built."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import varuna
from varuna.core.errors import UsageError
from varuna.membership.launched import watch_exceptions
from varuna.partition.initial.pretrained import fit, list_entries


def config_of(folder: str | Path, kind: Any) -> Any:
    """Return the configuration in a folder of safetensors, of which ``kind`` can build a model to be trained.

    It has no cache, which training does not need: with one, transformers does not keep the chats of a row apart.

    Args:
        folder: as ``save_pretrained`` writes it.
        kind: what ``from_config`` is called on, such as ``AutoModelForCausalLM``, or a model's class of diffusers.

    Raises:
        CheckpointError: there are no safetensors, or they are damaged.
        UsageError: there is no configuration, or it is of no class that ``kind`` builds.
    """
    watch_exceptions()  # what is refused is told without our frames
    path = Path(folder)
    list_entries(path)
    file = path / "config.json"
    if not file.is_file():
        raise UsageError(f"{path} has no config.json. Save the model with model.save_pretrained(folder).")
    try:
        if hasattr(kind, "load_config"):
            found = kind.load_config(path)
            name, is_known = found.get("_class_name"), found.get("_class_name") == kind.__name__
        else:
            found = transformers.AutoConfig.from_pretrained(path)
            name, is_known = type(found).__name__, type(found) in kind._model_mapping
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(
            f"{file} is of no model that transformers {transformers.__version__} knows: {first_line(error)}. Install "
            "a version that has it, or build the model's class yourself."
        ) from error
    if not is_known:
        raise UsageError(
            f"{file} is of a {name}, of which {kind.__name__} builds no model. Give a folder of another model, or use "
            "the class that is named there."
        )
    if getattr(found, "use_cache", False):
        found.use_cache = False
    return found


def weights_of(folder: str | Path, build: Callable[[], nn.Module]) -> varuna.Weights:
    """Return the files of a folder as the values of a base, over which adapters or a head are new.

    Args:
        folder: with safetensors.
        build: builds the base alone, here without values.

    Raises:
        CheckpointError: the files lack a part of the base, under the names that it has.
    """
    watch_exceptions()
    with torch.device("meta"):
        base = build()
    shapes = {name: tuple(each.shape) for name, each in base.named_parameters()}
    first = {id(each): name for name, each in base.named_parameters()}
    names = base.named_parameters(remove_duplicate=False)
    aliases = {name: first[id(each)] for name, each in names if first[id(each)] != name}
    fit(list_entries(Path(folder)), shapes, aliases, str(folder))
    return varuna.Weights(str(folder), missing="initialise")


def tokenizer_of(folder: str | Path) -> Any:
    """Return the tokenizer in a model's folder.

    Raises:
        UsageError: there is none.
    """
    watch_exceptions()
    try:
        if not any(next(Path(folder).glob(each), None) for each in ("tokenizer*", "vocab*", "*.model")):
            raise ValueError("there are no files of one")  # transformers would make one without words
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(
            f"{folder} has no tokenizer that can be read: {first_line(error)}. Save it there with "
            "tokenizer.save_pretrained(folder)."
        ) from error


def records(file: str | Path, *fields: str) -> list[dict[str, Any]]:
    """Return the records of a file with one JSON object per line, each of which has these fields.

    Raises:
        UsageError: there is no such file, it is empty, or a line is not of this form.
    """
    watch_exceptions()
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"{path} is not a file. Give one with a JSON object per line.")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            found.append(_record(line, f"{path}, line {number}", fields))
    if not found:
        raise UsageError(f"{path} is empty. Give a file with a JSON object per line.")
    return found


def _record(line: str, where: str, fields: Sequence[str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}. Each line must be one object.") from error
    missing = [name for name in fields if not isinstance(record, dict) or name not in record]
    if missing:
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{where} lacks {', '.join(missing)}; it has {has}.")
    return record  # type: ignore[no-any-return]


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, as a part of a sentence."""
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
