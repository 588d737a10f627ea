"""Runs of examples/nano_varuna.py, one for each line of JSON that comes in; what they start ends with this process."""

import dataclasses
import json
import sys
from functools import partial
from typing import Any

from examples import nano_varuna as nano
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, adamw

PADDED = partial(Tokens, padded=True)
"""Each sample has another number of targets."""
JOB = nano.Job(SmallLanguage, PADDED, adamw, global_batch=8, micro_batch=2, steps=4, sections=16)


def run(stages: int, replicas: int, faults: list[list[Any]], *, dropout: bool) -> dict[str, Any]:
    """Train ``JOB``; what came of it, in words that JSON has."""
    job = dataclasses.replace(JOB, build=Dropping) if dropout else JOB
    plan = nano.make_plan(nano.capture(job), job, stages, replicas)
    try:
        outcome = nano.train(job, plan, [nano.Fault(*fault) for fault in faults], say=lambda text: None)
    except nano.NanoError as error:
        return {"error": str(error)}
    return {**dataclasses.asdict(outcome), "losses": [outcome.losses[step] for step in range(job.steps)]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
