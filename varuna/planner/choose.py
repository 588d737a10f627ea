"""The decisions of a run: m once, then a plan for the workers of each generation."""

from varuna.core.calibration import NOMINAL, Calibration
from varuna.core.errors import NoPlanError, UsageError
from varuna.core.model import JobFacts, ModelFacts
from varuna.core.plan import Plan
from varuna.planner.plans import Ranking, rank_plans

_MICRO_BATCHES = 32  # wished per step: fills pipelines of up to about 8 stages, and feeds 32 replicas


def choose_micro_batch(global_batch: int, requested: int | None) -> int:
    """m, the same for any number of workers, so that it holds for the whole run.

    Raises:
        UsageError: the requested m is not within the global batch.
    """
    if requested is None:
        return max(1, global_batch // _MICRO_BATCHES)
    if not 1 <= requested <= global_batch:
        raise UsageError(
            f"micro_batch={requested} was asked for, but a step has {global_batch} examples. "
            f"Choose micro_batch between 1 and {global_batch}, or leave it out."
        )
    return requested


def best_plan(
    model: ModelFacts,
    *,
    workers: int,
    global_batch: int,
    micro_batch: int,
    memory_bytes: int | None = None,
    stages: int | None = None,
    calibration: Calibration = NOMINAL,
    policy: str = "varuna",
) -> Plan:
    """The first of ``rank_plans``, whose arguments these are.

    Raises:
        NoPlanError: says what was needed, what was found and what to do.
    """
    ranking = rank_plans(
        model,
        workers=workers,
        global_batch=global_batch,
        micro_batch=micro_batch,
        memory_bytes=memory_bytes,
        stages=stages,
        calibration=calibration,
        policy=policy,
    )
    if ranking.plans:
        return ranking.plans[0]
    raise NoPlanError(_explain(ranking, model, stages=stages, micro_batch=micro_batch))


def plan_run(
    job: JobFacts,
    *,
    workers: int,
    memory_bytes: int | None = None,
    stages: int | None = None,
    micro_batch: int | None = None,
    calibration: Calibration = NOMINAL,
    policy: str = "varuna",
) -> Plan:
    """The plan of a generation. An m that the user did not fix is halved until something fits.

    The arguments are those of ``rank_plans``, but for ``micro_batch``: m of the generation before; None on
    the first one.

    Raises:
        UsageError: the job's m is out of range.
        NoPlanError: nothing fits; the text is about the smallest m tried.
    """
    size = choose_micro_batch(job.global_batch, job.micro_batch if micro_batch is None else micro_batch)
    is_fixed = job.micro_batch is not None or job.model.fixed_micro_batch or memory_bytes is None
    while True:
        try:
            return best_plan(
                job.model,
                workers=workers,
                global_batch=job.global_batch,
                micro_batch=size,
                memory_bytes=memory_bytes,
                stages=stages,
                calibration=calibration,
                policy=policy,
            )
        except NoPlanError:
            if is_fixed or size == 1:
                raise
            size //= 2


def _explain(ranking: Ranking, model: ModelFacts, *, stages: int | None, micro_batch: int) -> str:
    """The closest miss, and every way out that could help."""
    if not ranking.rejected:
        return "no plan fits: a pipeline needs at least 1 worker, but there are 0. Start a worker."
    closest = min(ranking.rejected, key=lambda rejection: (rejection.missing_bytes or 0, rejection.stages))
    if closest.missing_bytes is None and closest.stages > len(model.sections):
        return f"{closest.reason}; pass cut_points=... or lower --stages."
    if closest.missing_bytes is None:
        return f"{closest.reason}; add workers or lower --stages."
    advice = ["raise --memory-per-worker"]
    if stages is not None and stages < len(model.sections):
        advice.insert(0, "raise or leave out --stages")
    elif len(ranking.rejected) < len(model.sections):
        advice.insert(0, "add workers")
    if micro_batch > 1 and not model.fixed_micro_batch:
        advice.append("pass a smaller micro_batch")
    text = " or ".join([", ".join(advice[:-1]), advice[-1]] if len(advice) > 1 else advice)
    return f"no plan fits: {closest.reason}. {text[0].upper()}{text[1:]}."
