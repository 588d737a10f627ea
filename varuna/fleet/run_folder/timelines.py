"""Timelines of steps in a run's folder: a few that the manager keeps by itself, and those that somebody asked for."""

import gzip
import re
from pathlib import Path

from pydantic import ValidationError

from varuna.core.errors import FleetError
from varuna.core.times import StepTimeline
from varuna.fleet.net.ca import write_private

FOLDER = "timelines"
_KEPT, _KEPT_BYTES = 64, 64 * 2**20
_NAME = re.compile(r"step-(\d+)\.json\.gz")


def kept_steps(run_dir: Path) -> list[int]:
    """Steps whose timelines are in the folder of a run, ascending."""
    names = (_NAME.fullmatch(path.name) for path in (run_dir / FOLDER).glob("step-*.json.gz"))
    return sorted(int(name[1]) for name in names if name)


def read_timeline(run_dir: Path, step: int) -> StepTimeline | None:
    """The timeline of a step; None if the folder has none.

    Raises:
        FleetError: the file is damaged, or of another version.
    """
    path = _path(run_dir, step)
    try:
        return parse_timeline(gzip.decompress(path.read_bytes()), str(path))
    except FileNotFoundError:
        return None
    except (OSError, EOFError) as error:
        raise FleetError(f"cannot read {path}: {error}. Name another step.") from error


def parse_timeline(text: bytes, source: str) -> StepTimeline:
    """A timeline as JSON.

    Raises:
        FleetError: it is damaged, or of another version.
    """
    try:
        return StepTimeline.model_validate_json(text)
    except ValidationError as error:
        raise FleetError(
            f"{source} is not a timeline that this version of Varuna reads: it is damaged, or another version wrote "
            "it. Use that version's `varuna timeline`."
        ) from error


def write_timeline(run_dir: Path, timeline: StepTimeline) -> None:
    """Keep it for this user alone, and forget the oldest beyond a bound on number and bytes; a full disk is borne."""
    path = _path(run_dir, timeline.step)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, gzip.compress(timeline.model_dump_json().encode(), compresslevel=3))
        kept = sorted(path.parent.glob("step-*.json.gz"), key=lambda each: each.stat().st_mtime_ns, reverse=True)
        size_bytes = 0
        for number, each in enumerate(kept):
            size_bytes += each.stat().st_size
            if number and (number >= _KEPT or size_bytes > _KEPT_BYTES):
                each.unlink()
    except OSError:
        return  # whoever asked gets it all the same


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step}.json.gz"
