"""A worker behind a training that others have ended: its state, from the last checkpoint, alone in this process.

So does a newcomer of a run pass the trainings that were over before it came; so does whoever had no part in the end of
one, or lost a peer after it. What the script asks of the training (its model, losses of other data, predictions) has
the same bits as on those who have trained, since nothing of that depends on the plan.
"""

import time

from varuna.checkpoint.manifest import Manifest, check_compatible, intact, look
from varuna.core.model import JobFacts
from varuna.engine.base.transport import local_store
from varuna.engine.worker.session import Session
from varuna.job.spec import JobSpec
from varuna.job.start import Behind, open_session
from varuna.membership.launched import at_end
from varuna.membership.static import StaticMembership, World
from varuna.planner.choose import plan_run
from varuna.process.console import say
from varuna.store.opening import open_store

SHOWN_BOUND_S = 60.0
"""From the last word of a training's workers until the manager has made their parts a checkpoint."""
_POLL_S = 0.1


def look_back(spec: JobSpec, facts: JobFacts, steps: int, behind: Behind) -> Session | None:
    """A session that has the state after ``steps`` steps once its ``steps()`` are through; None: nobody has kept it.

    Args:
        spec: the job.
        facts: as this worker told them when it began.
        steps: that the training has made.
        behind: how to look at it.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another job.
        NoPlanError: the model does not fit on one worker.
    """
    manifest = _shown(behind.place, steps)
    if manifest is None:
        return None
    check_compatible(manifest, facts)
    say(f"this worker reads what a training that is over has left: the checkpoint of step {steps} in {behind.place}")
    alone = StaticMembership(
        World(0, 1, local_store(), "127.0.0.1", 0),
        lambda job, workers, micro_batch: plan_run(job, workers=workers, micro_batch=micro_batch),
        found=manifest,
    )
    session = open_session(spec, steps, alone, behind=behind)
    at_end(session.leave)
    return session


def _shown(place: str, steps: int) -> Manifest | None:
    """The manifest of a step, which the manager may be about to write; None if it does not come."""
    store, until_s = open_store(place), time.monotonic() + SHOWN_BOUND_S
    while not (folder := look(store, steps)).is_committed:
        if time.monotonic() >= until_s:
            return None
        time.sleep(_POLL_S)
    return intact(store, folder)
