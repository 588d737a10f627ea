"""The planner's table for the workers that a run has now: what runs, what else could, and what that would bring."""

from dataclasses import asdict

from varuna.core.errors import VarunaError
from varuna.core.plan import Plan
from varuna.fleet.feedback.refine import predicted
from varuna.fleet.machine.choosing import with_slow_ones
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.state.fleet import Fleet
from varuna.planner.asking.request import PlanRequest
from varuna.planner.line import line_of
from varuna.planner.report import report
from varuna.planner.sweep import rank_plans

_SHOWN = 6


def outlook(calibrator: Calibrator | None, fleet: Fleet, price_per_hour: float | None = None) -> dict[str, object]:
    """As plain values; ``why`` says why there is no table, if there is none. Takes as long as planning does.

    Args:
        calibrator: what is known of the job's costs.
        fleet: the run.
        price_per_hour: of a worker, in dollars; None: the calibration's, if it was measured.
    """
    job = fleet.job
    if calibrator is None or job is None or not fleet.history:
        return {"why": "there is no plan yet"}
    workers = fleet.groups_of(with_slow_ones(fleet) or fleet.available, by_speed=True)
    request = calibrator.request(job, workers, fleet.generations.micro_batch, _SHOWN)
    if request is None or not workers:
        return {"why": "no worker is there to plan for" if request is not None else "this run has a planner of its own"}
    measured = calibrator.calibrations is not None
    try:
        ranking = rank_plans(request)
        table = report(request, ranking, price_per_hour=price_per_hour).model_dump(mode="json")
        return {
            "workers": request.count,
            "measured": measured,
            "plans": table["plans"],
            "outpaced": table["outpaced"],
            "rejected": table["rejected"],
            "idle": table["idle"],
            "running": _predicted(request, fleet.record.plan),
            "generation": fleet.generation,
        }
    except VarunaError as error:
        return {"why": str(error)}


def _predicted(request: PlanRequest, plan: Plan) -> dict[str, object]:
    """Seconds of a step of the plan that runs, by what is known now, and the line that it needs."""
    prediction, line = predicted(request.calibrations, plan), line_of(plan, request)
    return {
        "stages": plan.stages,
        "replicas": plan.replicas,
        "shape": plan.shape,
        "micro_batch": plan.micro_batch,
        "step_s": prediction.step_s,
        "line": None if line is None else line.model_dump(mode="json"),
        **asdict(prediction.breakdown),
    }
