"""Draws a recorded step in answer to a request."""

from contextlib import suppress

from varuna.core.errors import FleetError
from varuna.extras.pictures.step_picture import picture, simulation_of
from varuna.fleet.page.step_sheet import DeskAnswer
from varuna.fleet.run_folder.timelines import parse_timeline

_MOST_SIMULATED = 20_000
"""Micro-batches times stages: a manager has other things to do than to simulate larger steps."""


def drawn(answer: DeskAnswer) -> DeskAnswer:
    """Draw a timeline as SVG: measured and, if every stage has told its times, simulated; return others as they are."""
    if answer.status != 200:
        return answer
    timeline = parse_timeline(answer.body, "the record")
    trace = None
    if timeline.plan.stages * len(timeline.plan.micro_batches_of(0)) <= _MOST_SIMULATED:
        with suppress(FleetError):  # no rank of some stage has told its times
            trace = simulation_of(timeline)
    return DeskAnswer(200, picture(timeline, trace).encode())
