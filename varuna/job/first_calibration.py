"""Basis of the first plan: a calibration that is given, remembered, or measured within seconds."""

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError

from varuna.calibration.cache import cache_file, remember, remembered
from varuna.calibration.file import check_matches, read_calibration
from varuna.calibration.format import Calibrations
from varuna.core.errors import UsageError, VarunaError
from varuna.core.model import JobFacts
from varuna.engine.device.capacity import device_class
from varuna.engine.stage.job import Job
from varuna.job.spec import CAPTURED_SAMPLES, JobSpec
from varuna.membership.launched import manager
from varuna.partition.initial.initial_values import InitialParameters
from varuna.planner.micro_batch import knows_sizes
from varuna.process.console import say, warn
from varuna.process.host_lock import turn
from varuna.timing.quick import LIMIT_S, quick_calibration

_NONE = "none"
"""In place of a file: plan from operation counts, and measure nothing at the start."""
_AGAIN = 2
"""Factor on the time to measure, where an earlier run's ended before the best size was known."""
_TURN_BOUND_S = 10 * LIMIT_S
"""For the worker of a host that measures; one that waits longer measures for itself."""


def first_calibration(spec: JobSpec, facts: JobFacts, job: Job, beginning: InitialParameters) -> Calibrations | None:
    """Return the calibration to begin with; None: plan from operation counts.

    The workers of a host take turns, so that one of them measures and the others find what it has remembered.

    Args:
        spec: the job.
        facts: the same for the planner.
        job: the same for the engine.
        beginning: gives the model's buffers.

    Raises:
        UsageError: ``VARUNA_CALIBRATION`` cannot be read, or is of another model.
    """
    given = os.environ.get("VARUNA_CALIBRATION", "")
    if given == _NONE:
        return None
    if given:
        read = read_calibration(Path(given))
        check_matches(read, facts.model)
        return read
    own = device_class(spec.device)
    file = cache_file(facts, own)
    if spec.fixed_micro_batch is not None or facts.global_batch == 1 or spec.recipe.sizes is not None:
        return remembered(facts, file, own)
    key = sha256(f"times of {facts.model.digest}".encode()).hexdigest()
    with turn(key, _TURN_BOUND_S, "measuring micro-batch sizes"):
        known = remembered(facts, file, own)
        if known is None or not knows_sizes(known.first, facts.global_batch):
            limit_s = LIMIT_S if known is None else _AGAIN * LIMIT_S
            work = f"times of {_subject(facts, own or file.stem)} for {facts.global_batch} within {limit_s}"
            measured = _of_run(work, facts, lambda: _measured(spec, job, beginning, facts, limit_s))
            if measured is not None:  # the second time is the last, whatever it found
                sized = {"sized_for": facts.global_batch}
                known = measured if known is None else measured.each(lambda each: each.model_copy(update=sized))
                remember(known, file)
        return known


def _subject(facts: JobFacts, device: str) -> str:
    """Return a name for what is measured."""
    told = f"{facts.model.digest} {facts.precision} {facts.compiled} {facts.threads} {device}"
    return sha256(told.encode()).hexdigest()


def _of_run(work: str, facts: JobFacts, measure: Callable[[], Calibrations | None]) -> Calibrations | None:
    """Ask another worker of the run for its times on such a device, or measure now: the first of each class counts."""
    run = manager()
    if run is None:
        return measure()
    with suppress(ValidationError, UsageError):
        if data := run.seek_work(work, "times of its kind of device"):
            found = Calibrations.model_validate_json(data)
            check_matches(found, facts.model)
            return found
    measured = None
    try:
        measured = measure()
    finally:
        run.offer_work(work, b"" if measured is None else measured.model_dump_json().encode())
    return measured


def _measured(
    spec: JobSpec, job: Job, beginning: InitialParameters, facts: JobFacts, limit_s: float
) -> Calibrations | None:
    """Measure; a job that cannot be measured can be trained all the same, or says itself what is wrong with it."""
    say("measuring micro-batch sizes for some seconds: this job is new on this machine")
    try:
        batch = spec.batch(CAPTURED_SAMPLES)
        return quick_calibration(job, beginning, batch, global_batch=facts.global_batch, limit_s=limit_s)
    except (VarunaError, RuntimeError, ValueError, TypeError, ArithmeticError, LookupError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(f"micro-batch sizes cannot be measured ({why}). The plan is made from operation counts.")
        return None
