"""Answers to requests for a step as it was recorded."""

import json
from pathlib import Path
from typing import NamedTuple

from varuna.core.errors import FleetError
from varuna.fleet.run_folder.timelines import kept_steps, read_timeline


class DeskAnswer(NamedTuple):
    """To an HTTP request: 200 with what was wanted, 202 as long as it is not there, or an error in words."""

    status: int
    body: bytes


def refusal(status: int, text: str) -> DeskAnswer:
    """An error in words."""
    return DeskAnswer(status, json.dumps({"error": text}).encode())


def recorded_step(run_dir: Path | None, step: int | None) -> DeskAnswer:
    """A step that the folder of a run keeps; without a step the last one. Reads the disk."""
    kept = [] if run_dir is None else kept_steps(run_dir)
    wanted = kept[-1] if step is None and kept else step
    if run_dir is not None and wanted is not None:
        try:
            if (found := read_timeline(run_dir, wanted)) is not None:
                return DeskAnswer(200, found.model_dump_json().encode())
        except FleetError as error:
            return refusal(500, str(error))
    listed = f"Recorded: {', '.join(map(str, kept))}. Name one of these" if kept else "None was"
    which = "no step" if step is None else f"step {step}"
    return refusal(404, f"this run has no workers that could be asked, and {which} was recorded. {listed}")
