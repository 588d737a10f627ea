"""Answers to whoever wants to see a step: as it was recorded, and drawn."""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from varuna.core.errors import FleetError
from varuna.fleet.run_folder.timelines import kept_steps, parse_timeline, read_timeline
from varuna.pictures.step_picture import picture, simulation_of

_MOST_SIMULATED = 20_000
"""Micro-batches times stages: a manager has other things to do than to simulate larger steps."""


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


def drawn(answer: DeskAnswer) -> DeskAnswer:
    """A timeline as SVG, measured and, where every stage has told something, simulated; other answers as they are."""
    if answer.status != 200:
        return answer
    timeline = parse_timeline(answer.body, "the record")
    trace = None
    if timeline.plan.stages * len(timeline.plan.micro_batches_of(0)) <= _MOST_SIMULATED:
        with suppress(FleetError):  # nobody has told of some stage
            trace = simulation_of(timeline)
    return DeskAnswer(200, picture(timeline, trace).encode())
