"""Answers that the shell finds for the state machine."""

from tests.unit.fleet.support import make_job, two_stages
from varuna.core.devices import WorkerGroups, equal_workers
from varuna.core.errors import NoPlanError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.manager.answering import plan_answer
from varuna.fleet.state.questions import Planned, Unplannable, WhichPlan

JOB = make_job()
PLAN = two_stages(JOB, 4, None).model_copy(update={"step_s": 3.0})
QUESTION = WhichPlan(workers=equal_workers(4), micro_batch=None)


def refuse(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    raise NoPlanError("nothing fits")


def unpredictable(plan: Plan) -> float:
    raise NoPlanError("measured sections are not those of the plan")


def test_a_plan_that_runs_and_cannot_be_predicted_takes_as_long_as_when_it_was_made() -> None:
    assert plan_answer(refuse, unpredictable, QUESTION, JOB, PLAN) == Unplannable("nothing fits", running_s=3.0)
    found = plan_answer(two_stages, unpredictable, QUESTION, JOB, PLAN)
    assert isinstance(found, Planned)
    assert found.running_s == 3.0
