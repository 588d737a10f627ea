"""The run on disk: every event in ``events.jsonl``, every committed step in the user's JSON log."""

import json
import os
import time
from pathlib import Path

from varuna.fleet.story import GenerationStarted, RunEvent, StepRecorded, VerdictReached


class Journal:
    """Appends a line per event; on return it survives the death of this process.

    What binds the future, a verdict or the number of a generation, survives a power cut too.
    """

    def __init__(self, run_dir: Path, json_log: Path | None) -> None:
        self._events = (run_dir / "events.jsonl").open("a")
        self._steps = json_log.open("a") if json_log is not None else None

    def append(self, event: RunEvent) -> None:
        """Write one event."""
        line = {"time": round(time.time(), 3), **event.model_dump(mode="json")}
        self._events.write(json.dumps(line) + "\n")
        self._events.flush()
        if isinstance(event, VerdictReached | GenerationStarted):
            os.fsync(self._events.fileno())
        if self._steps is not None and isinstance(event, StepRecorded):
            self._steps.write(json.dumps(_step_line(event)) + "\n")
            self._steps.flush()

    def close(self) -> None:
        """Close the files."""
        self._events.close()
        if self._steps is not None:
            self._steps.close()


def _step_line(event: StepRecorded) -> dict[str, object]:
    """A line of the JSON log; a loss that is no number is written as NaN."""
    plan = event.plan
    return {
        "step": event.step,
        "loss": event.loss,
        "generation": event.generation,
        "plan": {
            "stages": plan.stages,
            "replicas": plan.replicas,
            "micro_batch": plan.micro_batch,
            "micro_batches": plan.micro_batches,
        },
        "examples_per_s": event.examples_per_s,
        "wall_time": time.time(),
    }
