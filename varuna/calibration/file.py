"""Calibration files: read, checked, written."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from varuna.calibration.format import VERSION, Calibrations
from varuna.core.errors import UsageError
from varuna.core.model import ModelFacts

RUN_FILE = "calibration.json"
"""File in a run's folder with the times of its own steps."""
_SHOWN = 6  # problems named at once
_LARGEST_BYTES = 64 * 2**20  # no calibration is larger; do not read a checkpoint by mistake


def read_calibration(path: Path) -> Calibrations:
    """Read and check a calibration file.

    Raises:
        UsageError: there is no such file, or what it says cannot be; names every field that is off.
    """
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise UsageError(f"{path} is larger than any calibration. Name a file that `varuna calibrate` wrote.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read a calibration from {path}: {error}. Make one with `varuna calibrate`."
        ) from error
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not JSON: {error}. A calibration is one JSON object; see docs/calibration-file.md."
        ) from error
    if not isinstance(content, dict) or content.get("format", "varuna-calibration") != "varuna-calibration":
        raise UsageError(f"{path} is not a calibration: it must be a JSON object with format 'varuna-calibration'.")
    version = content.get("version", VERSION)
    if version != VERSION:
        raise UsageError(
            f"{path} is a calibration of version {version!r}, but this Varuna reads version {VERSION}. "
            "Calibrate again, or use the Varuna that wrote it."
        )
    try:
        return Calibrations.model_validate(content)
    except ValidationError as error:
        raise UsageError(
            f"{path} is not a valid calibration:\n{_problems(error)}\nSee docs/calibration-file.md."
        ) from error


def write_calibration(calibrations: Calibrations, path: Path) -> None:
    """Write a file that ``read_calibration`` reads back as the same value; fields at their defaults are left out."""
    content = calibrations.model_dump(mode="json", exclude_defaults=True)
    content = {"format": calibrations.format, "version": calibrations.version, **content}
    path.write_text(_compact(content) + "\n", encoding="utf-8")


def check_matches(calibrations: Calibrations, facts: ModelFacts) -> None:
    """Refuse calibrations of another model than the one that was captured.

    Raises:
        UsageError: says what differs.
    """
    known, needed = calibrations.first, facts.digest
    found = known.model
    if found.digest is not None and found.digest != needed:
        raise UsageError(
            f"the calibration is of model {found.name!r} with digest {found.digest[:12]}, but this job's model has "
            f"{needed[:12]}: its graph, sections or parameters differ. Calibrate again: varuna calibrate SCRIPT"
        )
    if known.section_count != len(facts.sections):
        raise UsageError(
            f"the calibration has {known.section_count} sections, but this job's model has "
            f"{len(facts.sections)}. Calibrate again: varuna calibrate SCRIPT"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, if its names differ; of equal names JSON would silently take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return found


def _problems(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False)[:_SHOWN]:
        where = ".".join(map(str, problem["loc"])) or "file"
        found = problem["input"]
        shown = "" if problem["type"] in ("missing", "value_error") else f" (found {_short(found)})"
        lines.append(f"  {where}: {problem['msg'].removeprefix('Value error, ')}{shown}")
    more = error.error_count() - len(lines)
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _compact(content: object, indent: str = "") -> str:
    """JSON with lists of numbers and small objects on one line each, as a person would write it."""
    flat = json.dumps(content)
    if len(flat) + len(indent) <= 110 or not isinstance(content, dict | list) or not content:
        return flat
    inner = indent + "  "
    if isinstance(content, list):
        rows = [inner + _compact(value, inner) for value in content]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    rows = [f"{inner}{json.dumps(key)}: {_compact(value, inner)}" for key, value in content.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
