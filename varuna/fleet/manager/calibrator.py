"""A run measures itself: plans come from what was seen, and what was predicted is compared with what was.

The first plan is made from a file, from what an earlier run has left, or from what a worker measured before it joined;
without these from operation counts. Once ranks have told of some seconds of training, their times refine that
calibration, which later plans, later runs and ``varuna plan --run`` use.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from varuna.calibration.cache import remember, remembered
from varuna.calibration.feedback.gap import explain_gap
from varuna.calibration.feedback.refine import costs_of, refine
from varuna.calibration.file import RUN_FILE, check_matches
from varuna.calibration.format import Calibration
from varuna.calibration.nominal import nominal_calibration
from varuna.core.errors import NoPlanError
from varuna.core.messages import Beat
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.times import RankTimes, StepParts, merged
from varuna.fleet.machine.choosing import speeds_of, with_slow_ones
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import MorphRequested, Recalibrated
from varuna.fleet.state.morph_gain import weigh
from varuna.fleet.state.run_events import GenerationRecord, GenerationTimed, Notice
from varuna.planner.choose import RunPlanner
from varuna.planner.micro_batch import describe_sizes, knows_sizes
from varuna.planner.pricing.predict import Prediction, predict
from varuna.planner.request import PlanRequest

LEAST_S = 10.0
"""Of training in a generation: less is noise, and a run that is over by then needs no better plan."""
LEAST_STEPS = 5

_TOLD_APART = {
    "micro_batch": "m = {}",
    "starts": "stages from sections {}",
    "kept": "activations kept of {} sections",
    "stash_limits": "{} micro-batches in flight",
    "stash_on_device": "{} of them on the device",
    "split_last": "{} split backwards",
    "speeds": "replicas of speed {}",
    "policy": "policy {}",
}
"""What tells plans of one shape apart, in the order in which people would look for it."""

Told = GenerationTimed | Notice | MorphRequested
"""What follows from what ranks told: lines for the journal, and events for the state machine."""

PlanWith = Callable[[JobFacts, int, int | None, Calibration | None], Plan]


class Calibrator:
    """Hears what ranks' steps took; for one thread, on which plans are made too."""

    def __init__(
        self,
        plan: PlanWith,
        *,
        run_dir: Path,
        cache: Callable[[JobFacts], Path] | None,
        given: Calibration | None = None,
        most_workers: int = 1,
    ) -> None:
        """Begin without any measurement.

        Args:
            plan: plans from a calibration, or from operation counts without one.
            run_dir: gets the refined calibration.
            cache: where later runs of a job look for it; None: nowhere.
            given: the user's calibration, instead of one in the cache.
            most_workers: that the run may grow to. m holds for the whole run, so it must be small enough for them.
        """
        self._plan, self._run_dir, self._cache = plan, run_dir, cache
        self._given, self._most_workers = given, most_workers
        self._offered: Calibration | None = None
        self._job: JobFacts | None = None
        self.calibration: Calibration | None = None
        """None: nothing was measured yet"""
        self._generation = -1
        self._heard: dict[int, RankTimes] = {}
        self._due_steps = LEAST_STEPS
        self._due_beats = 0
        self._explained = self._described = False

    def plan(self, job: JobFacts, workers: int, micro_batch: int | None) -> Plan:
        """The best plan that is known; a ``Planner``."""
        if self._job is None:
            self._job = job
            self.calibration = self._first(job)
        if micro_batch is None and job.micro_batch is None and workers < self._most_workers:
            with suppress(NoPlanError):  # it may take fewer
                micro_batch = self._plan(job, self._most_workers, None, self.calibration).micro_batch
        return self._plan(job, workers, micro_batch, self.calibration)

    def take(self, offered: str) -> None:
        """A worker that joins tells what it plans from, or has measured; counts before the first plan only.

        What is no calibration is passed over: a worker of another version may have sent it.
        """
        if offered and self._offered is None:
            with suppress(ValidationError):
                self._offered = Calibration.model_validate_json(offered)

    def _first(self, job: JobFacts) -> Calibration | None:
        """What to begin with.

        Raises:
            UsageError: the user's calibration is of another model.
        """
        if self._given is not None:
            check_matches(self._given, job.model)
            return self._given
        known = remembered(job, self._cache(job)) if self._cache is not None else None
        if known is not None and (self._offered is None or knows_sizes(known, job.global_batch)):
            return known
        offered = self._offered
        return offered if offered is not None and offered.section_count == len(job.model.sections) else known

    def begin(self, job: JobFacts, record: GenerationRecord) -> list[Recalibrated | Notice]:
        """A generation begins, or more was learned: what its stages should take, if that is known."""
        if self.calibration is None:
            return []
        expected_s = self.compute_s(job, record.plan)
        told: list[Recalibrated | Notice] = []
        if not self._described and job.micro_batch is None and len(self.calibration.sizes) > 1:
            told.append(Notice(text=describe_sizes(self.calibration, record.plan.micro_batch)))
        self._described = True
        rate = self.calibration.across_vms.link.bytes_per_s
        return [*told, Recalibrated(record.generation, None if expected_s is None else tuple(expected_s), rate)]

    def request(self, job: JobFacts, workers: int, micro_batch: int | None, wanted: int) -> PlanRequest | None:
        """What the planner would be asked now, for so many plans; any thread may ask. None: it takes no request."""
        if not isinstance(self._plan, RunPlanner):
            return None
        return self._plan.request(job, workers, micro_batch, self.calibration, wanted)

    def compute_s(self, job: JobFacts, plan: Plan) -> list[float] | None:
        """Calibrated compute of a micro-batch, by stage; None if nothing was measured."""
        if self.calibration is None:
            return None
        costs = costs_of(self.calibration, plan)
        last = plan.stages - 1
        return [
            stage.forward_s + (0.0 if k == last or stage.keeps_all else stage.recompute_s) + stage.backward_s
            for k, stage in enumerate(costs.stages)
        ]

    def predicted_s(self, plan: Plan) -> float:
        """Seconds of a step of ``plan``, by what is known now and not when it was made."""
        known = self._prediction(plan)
        return plan.step_s if known is None else known.step_s

    def _prediction(self, plan: Plan) -> Prediction | None:
        return None if self.calibration is None else predict(costs_of(self.calibration, plan), plan)

    def hear(self, fleet: Fleet, worker: str, beat: Beat, now_s: float) -> list[Told]:
        """A worker told what its steps took; what follows from that, if anything."""
        rank = fleet.rank_of(worker)
        if beat.times is None or fleet.job is None or beat.generation != fleet.generation or rank is None:
            return []
        if rank >= fleet.record.plan.workers:
            return []  # a spare of an older version, which tells what it did before
        if self._generation != fleet.generation:
            self._generation, self._heard, self._due_steps, self._due_beats = fleet.generation, {}, LEAST_STEPS, 0
        known = self._heard.get(rank)
        self._heard[rank] = beat.times if known is None else merged((known, beat.times))
        self._due_beats -= 1
        if self._due_beats > 0 or len(self._heard) < fleet.record.plan.workers:
            return []
        self._due_beats = max(1, fleet.record.plan.workers // 2)  # all ranks are looked at twice in a round of beats
        stages = self._stages(fleet.record.plan)
        steps = min((each.steps for each in stages), default=0)
        if steps < self._due_steps or steps * stages[0].step_s < LEAST_S:
            return []
        self._due_steps = 2 * steps
        return self._learn(fleet, fleet.job, fleet.record.plan, stages, now_s)

    def finish(self, plan: Plan) -> None:
        """The run is over: a short one leaves what it has."""
        stages = self._stages(plan)
        if self.calibration is None and stages and self._job is not None:
            remember(refine(nominal_calibration(self._job.model), plan, stages), self._run_dir / RUN_FILE)

    def _stages(self, plan: Plan) -> list[RankTimes]:
        """Times by stage, of workers of full speed; empty until every rank has reported, or if there are none.

        All-reduces are of the replica with the least wait.
        """
        full = [replica for replica in range(plan.replicas) if plan.speed_of(replica) == 1.0]
        if set(self._heard) != set(range(plan.workers)) or not full:
            return []
        found = []
        for stage in range(plan.stages):
            replicas = [self._heard[plan.rank_of(replica, stage)] for replica in full]
            reductions = [each.reductions for each in replicas if each.reductions is not None]
            fastest = min(reductions, key=lambda each: each.seconds, default=None)
            found.append(merged(replicas).model_copy(update={"reductions": fastest}))
        return found

    def _learn(self, fleet: Fleet, job: JobFacts, plan: Plan, stages: list[RankTimes], now_s: float) -> list[Told]:
        base, known = self.calibration or nominal_calibration(job.model), self._prediction(plan)
        told: list[Told] = [
            GenerationTimed(
                generation=fleet.generation,
                predicted_s=plan.step_s if known is None else known.step_s,
                is_nominal=known is None,
                predicted=None if known is None else StepParts(**asdict(known.breakdown)),
                stages=tuple(stages),
            )
        ]
        gap = explain_gap(base, plan, stages) if self.calibration is not None else None
        if gap is not None and not self._explained:
            self._explained = True
            told.append(Notice(text=f"{gap}. Future plans take this into account"))
        self.calibration = refine(base, plan, stages)
        remember(self.calibration, self._run_dir / RUN_FILE)
        if self._cache is not None:
            remember(self.calibration, self._cache(job))
        return [*told, *self._better(fleet, job, plan, now_s)]

    def _better(self, fleet: Fleet, job: JobFacts, plan: Plan, now_s: float) -> list[Told]:
        """A morph, if the plan that is best now saves more until the next change than the switch costs."""
        best = self._best(fleet, job)
        if best is None:
            return []
        weighing = weigh(
            plan.model_copy(update={"step_s": self.predicted_s(plan)}),
            best,
            computing_s=min(fleet.experience.gap_s(now_s), (job.steps - fleet.recorded_step - 1) * fleet.step_wall_s),
            stall_s=fleet.experience.stall_s(job, best),
            exposed_s=0.0,  # the same workers: nobody becomes safer
        )
        if not weighing.is_worth(fleet.config.min_measured_gain):
            return []
        favoured = f"{_named(best, plan)} over {_named(plan, best)}"
        return [
            Notice(text=f"measured times favour {favoured}: {weighing}"),
            MorphRequested("measured times favour another plan"),
        ]

    def _best(self, fleet: Fleet, job: JobFacts) -> Plan | None:
        """The best plan for the workers that stay, with or without slow ones."""
        known = job.model_copy(
            update={"memory_bytes": fleet.memory_bytes, "losses_per_hour": fleet.loss_rate.planned_per_hour}
        )
        found, names = list[Plan](), with_slow_ones(fleet)
        with suppress(NoPlanError):
            found.append(self.plan(known, len(fleet.available), fleet.micro_batch))
        with suppress(NoPlanError):
            dealt = known.model_copy(update={"speeds": speeds_of(fleet, names)})
            found += [self.plan(dealt, len(names), fleet.micro_batch)] if names else []
        return min(found, key=attrgetter("step_s"), default=None)


def _named(plan: Plan, other: Plan) -> str:
    """A plan's shape, and if another one has it too, what tells the two apart first."""
    if plan.shape == other.shape:
        for name, words in _TOLD_APART.items():
            value = getattr(plan, name)
            if value != getattr(other, name):
                shown = (" ".join(map(str, value)) or "no") if isinstance(value, tuple) else value
                return f"{plan.shape} ({words.format(shown)})"
    return plan.shape
