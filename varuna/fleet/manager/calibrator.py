"""A run measures itself: plans come from what was seen, and what was predicted is compared with what was.

The first plan is made from a file, from what an earlier run has left, or from what a worker measured before it joined;
without these from operation counts. Once ranks have told of some seconds of training, their times refine that
calibration, which later plans, later runs and ``varuna plan --run`` use.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from varuna.calibration.cache import remember, remembered
from varuna.calibration.file import RUN_FILE, check_matches
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import WorkerGroups, as_if_equal, class_names, device_of, of_count, size_of
from varuna.core.errors import NoPlanError
from varuna.core.messages import Beat
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.times import RankTimes, StepParts, merged, of_stage
from varuna.fleet.feedback.gap import explain_gap
from varuna.fleet.feedback.refine import costs_of, predicted, refine
from varuna.fleet.machine.choosing import with_slow_ones
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import MorphRequested, Recalibrated
from varuna.fleet.state.morph_gain import MorphEstimate, estimate_morph
from varuna.fleet.state.run_events import GenerationRecord, GenerationTimed, Notice
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import RunPlanner, with_options
from varuna.planner.micro_batch import describe_sizes, knows_sizes
from varuna.planner.pricing.network import are_apart
from varuna.planner.pricing.predict import Prediction
from varuna.planner.pricing.spanning import stages_of

LEAST_S = 10.0
"""Of training in a generation: less is noise, and a run that is over by then needs no better plan."""
LEAST_STEPS = 5
LASTS_S = 600.0
"""So long a plan with fewer holders of state must have been better before it is chosen: not for one slow minute."""
FORGETS_S, _LONGEST_S = 600.0, 3600.0
"""After so long what a network was measured to be may be over, if a plan with more holders is better without it. Each
time it is not, after twice as long."""

_NETWORKS = ("within_vm", "across_vms")
_TOLD_APART = {
    "micro_batch": "m = {}",
    "first.starts": "stages from sections {}",
    "first.kept": "activations kept of {} sections",
    "first.stash_limits": "{} micro-batches in flight",
    "first.stash_on_device": "{} of them on the device",
    "first.split_last": "{} split backwards",
    "first.empties": "the stage before the last runs empty: {}",
    "speeds": "replicas of speed {}",
    "policy": "policy {}",
}
"""Parts that tell plans of one shape apart, in the order in which people would look for them."""

Told = GenerationTimed | Notice | MorphRequested
"""Consequences of what ranks told: lines for the journal, and events for the state machine."""

PlanWith = Callable[[JobFacts, WorkerGroups, int | None, Calibrations | None], Plan]


class Calibrator:
    """Hears what ranks' steps took; for one thread, on which plans are made too."""

    def __init__(
        self,
        plan: PlanWith,
        *,
        run_dir: Path,
        cache: Callable[[JobFacts, str], Path] | None,
        given: Calibrations | None = None,
        most_workers: int = 1,
    ) -> None:
        """Begin without any measurement.

        Args:
            plan: plans from a calibration, or from operation counts without one.
            run_dir: gets the refined calibration.
            cache: where later runs of a job look for that of a class of devices; None: nowhere.
            given: the user's calibrations, instead of those in the cache.
            most_workers: that the run may grow to. m holds for the whole run, so it must be small enough for them.
        """
        self._plan, self._run_dir, self._cache = plan, run_dir, cache
        self._given, self._most_workers = given, most_workers
        self.begin_training()

    def begin_training(self, offered: Sequence[str] = ()) -> None:
        """Begin without any measurement of the job that comes now, but for what workers have offered."""
        self._offered: dict[str, Calibrations] = {}  # by class of device
        self._job: JobFacts | None = None
        self.calibrations: Calibrations | None = None
        """None: nothing was measured yet"""
        self._generation = -1
        self._heard: dict[int, RankTimes] = {}
        self._due_steps = LEAST_STEPS
        self._due_beats = 0
        self._explained = self._described = False
        self._begun: set[str] = set()  # classes of devices that were planned for
        self._networks: dict[str, dict[str, object]] = {}  # by class of devices, before this run has measured any
        self._favoured_s: float | None = None  # since when a plan with fewer holders is better
        self._doubts_s, self._patience_s = float("inf"), FORGETS_S  # when measured networks are doubted
        for each in offered:
            self.add_offered(each)

    def plan(self, job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        """The best plan that is known; a ``Planner``."""
        if self._job is None:
            self._job = job
        self._begin_classes(job, workers)
        may_grow = len(class_names(workers)) == 1 and size_of(workers) < self._most_workers
        if micro_batch is None and job.micro_batch is None and may_grow:
            grown = of_count(as_if_equal(workers), self._most_workers)
            with suppress(NoPlanError):  # it may take fewer
                micro_batch = self._plan(job, grown, None, self.calibrations).micro_batch
        return self._plan(job, workers, micro_batch, self.calibrations)

    def add_offered(self, offered: str) -> None:
        """Add what a joining worker plans from, or has measured; the first of each class of devices counts.

        What is no calibration is passed over: a worker of another version may have sent it.
        """
        with suppress(ValidationError):
            told = Calibrations.model_validate_json(offered)
            self._offered = {name: told.only(name) for name in told.classes} | self._offered

    def _begin_classes(self, job: JobFacts, workers: WorkerGroups) -> None:
        """Look up what to begin with for each class of devices that was not planned for before.

        Raises:
            UsageError: the user's calibration is of another model.
        """
        for name in class_names(workers):
            if name not in self._begun:
                self._begun.add(name)
                known = self._first(job, name)
                if known is not None:
                    self.calibrations = known if self.calibrations is None else self.calibrations.joined(known)

    def _first(self, job: JobFacts, name: str) -> Calibrations | None:
        """Return what is known of a class before it trains.

        Raises:
            UsageError: the user's calibration is of another model.
        """
        if self._given is not None:
            check_matches(self._given, job.model)
            if self.calibrations is None:
                return self._given
            if not {name, device_of(name), ""}.isdisjoint(self._given.classes):
                return None
        known = remembered(job, self._cache(job, name), name) if self._cache is not None else None
        device = device_of(name)
        if self.calibrations is not None and known is None and device in map(device_of, self.calibrations.classes):
            return None  # of another region
        offered = self._offered.get(device) or self._offered.get("")  # of a file that names no class
        if known is not None and (offered is None or knows_sizes(known.first, job.global_batch)):
            return known
        return offered if offered is not None and offered.first.section_count == len(job.model.sections) else known

    def begin_generation(self, job: JobFacts, record: GenerationRecord) -> list[Recalibrated | Notice]:
        """A generation begins, or more was learned: what its stages should take, if that is known."""
        if self.calibrations is None:
            return []
        told: list[Recalibrated | Notice] = []
        if not self._described and job.micro_batch is None and len(self.calibrations.first.sizes) > 1:
            told.append(Notice(text=describe_sizes(self.calibrations.first, record.plan.micro_batch)))
        self._described = True
        rate = min(self.calibrations.of(name).across_vms.link.bytes_per_s for name in record.plan.classes)
        return [*told, Recalibrated(record.generation, self.compute_s(record.plan), rate)]

    def request(self, job: JobFacts, workers: WorkerGroups, micro_batch: int | None, wanted: int) -> PlanRequest | None:
        """Return the request that the planner would get now, for so many plans, to any thread. None: it takes none."""
        if not isinstance(self._plan, RunPlanner):
            return None
        return self._plan.request(job, workers, micro_batch, self.calibrations, wanted)

    def compute_s(self, plan: Plan) -> tuple[float, ...] | None:
        """Calibrated compute of a micro-batch, by slot of the plan; None if nothing was measured."""
        if self.calibrations is None:
            return None
        found = []
        for pipeline in plan.pipelines:
            stages = costs_of(self.calibrations, plan.as_if_all(pipeline)).stages
            last = len(stages) - 1
            for k, stage in enumerate(stages):
                recompute_s = 0.0 if k == last or stage.keeps_all else stage.recompute_s
                found.append(stage.forward_s + recompute_s + stage.backward_s)
        return tuple(found)

    def predicted_s(self, plan: Plan) -> float:
        """Seconds of a step of ``plan``, by what is known now and not when it was made."""
        known = self._prediction(plan)
        return plan.step_s if known is None else known.step_s

    def _prediction(self, plan: Plan) -> Prediction | None:
        return None if self.calibrations is None else predicted(self._for_job(self.calibrations), plan)

    def _for_job(self, calibrations: Calibrations) -> Calibrations:
        """With what the job's options change."""
        return calibrations if self._job is None else with_options(calibrations, self._job)

    def learn_from_beat(self, fleet: Fleet, worker: str, beat: Beat, now_s: float) -> list[Told]:
        """Add the times of a worker's steps; return what follows from them, if anything."""
        rank = fleet.rank_of(worker)
        if beat.times is None or fleet.job is None or beat.generation != fleet.generation or rank is None:
            return []
        if rank >= fleet.record.plan.workers:
            return []  # a spare of an older version, which tells what it did before
        if self._generation != fleet.generation:
            self._generation, self._heard, self._due_steps, self._due_beats = fleet.generation, {}, LEAST_STEPS, 0
            self._favoured_s, self._doubts_s = None, now_s + self._patience_s
        if now_s >= self._doubts_s:
            self._doubts_s = now_s + self._patience_s
            if told := self._doubt(fleet, fleet.job, fleet.record.plan, now_s):
                return told
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

    def finish_run(self, plan: Plan) -> None:
        """Keep what a short run has measured, since it is over."""
        stages = self._stages(plan)
        if self.calibrations is None and stages and self._job is not None:
            refined = self._refined(_nominal(self._job), plan)
            if refined is not None:
                remember(refined, self._run_dir / RUN_FILE)

    def _refined(self, base: Calibrations, plan: Plan) -> Calibrations | None:
        """Correct what is known of each class of devices by the first of its pipelines; None: still nothing is known.

        Pipelines that are planned for any class may run on several, and say nothing of one.
        """
        found, names = self.calibrations, set[str]()
        is_apart, across = are_apart(plan.classes), base.across_regions
        several_last = sorted(plan.kinds, key=lambda each: bool(each[1].stage_classes))
        for replicas, pipeline in several_last:
            parts = dict[str, list[int] | None](stages_of(pipeline.stage_classes)) or {pipeline.device_class: None}
            for name, own in parts.items():
                stages = self._stages(plan, replicas) if name not in names else []
                names.add(name)
                if stages and (plan.is_by_class or base.names == ("",)):
                    refined = refine(
                        Calibrations(across_regions=across, classes={name: base.of(name)}),
                        plan.as_if_all(pipeline),
                        stages,
                        options=self._for_job,
                        is_whole=plan.is_uniform,
                        is_apart=is_apart,
                        own=own,
                        relayed=self._relayed(plan, replicas),
                    )
                    across = refined.across_regions
                    found = refined if found is None else found.joined(refined)
        # Figures that were for any class make room for what was measured.
        return found if found is None or "" in plan.classes else found.without_any()

    def _stages(self, plan: Plan, replicas: range | None = None) -> list[RankTimes]:
        """Times by stage, of workers of full speed; empty until every rank has reported, or if there are none.

        Args:
            plan: that runs.
            replicas: that are divided alike; None: the first ones.
        """
        alike = plan.kinds[0][0] if replicas is None else replicas
        full = [replica for replica in alike if plan.speed_of(replica) == 1.0]
        if set(self._heard) != set(range(plan.workers)) or not full:
            return []
        found = []
        for stage in range(plan.pipeline_of(alike.start).stages):
            found.append(of_stage(self._heard[plan.rank_of(replica, stage)] for replica in full))
        return found

    def _relayed(self, plan: Plan, replicas: range) -> frozenset[int]:
        """Stages whose messages to the next one go through another machine, in any of these pipelines."""
        return frozenset(
            stage
            for stage in range(plan.pipeline_of(replicas.start).stages - 1)
            for replica in replicas
            if plan.rank_of(replica, stage + 1) in self._heard[plan.rank_of(replica, stage)].relayed
        )

    def _learn(self, fleet: Fleet, job: JobFacts, plan: Plan, stages: list[RankTimes], now_s: float) -> list[Told]:
        base, known = self.calibrations or _nominal(job), self._prediction(plan)
        told: list[Told] = [
            GenerationTimed(
                generation=fleet.generation,
                predicted_s=plan.step_s if known is None else known.step_s,
                is_nominal=known is None,
                predicted=None if known is None else StepParts(**asdict(known.breakdown)),
                stages=tuple(stages),
            )
        ]
        gap = explain_gap(self._for_job(base), plan, stages) if self.calibrations is not None else None
        if gap is not None and not self._explained:
            self._explained = True
            told.append(Notice(text=f"{gap}. Future plans take this into account"))
        self._keep_networks(base, plan)
        self.calibrations = self._refined(base, plan)
        if self.calibrations is not None:
            remember(self.calibrations, self._run_dir / RUN_FILE)
            if self._cache is not None:
                for name in self.calibrations.classes:
                    remember(self.calibrations, self._cache(job, name))
        return [*told, *self._better(fleet, job, plan, now_s)]

    def _better(self, fleet: Fleet, job: JobFacts, plan: Plan, now_s: float) -> list[Told]:
        """A morph, if the plan that is best now saves more until the next change than the switch costs.

        One that leaves workers idle, or state with fewer holders, must have been better for a while.
        """
        best, weighing = self._weighed(fleet, job, plan, now_s)
        if weighing is None or _is_safer(best, plan):
            self._favoured_s = None
        if weighing is None:
            return []
        if _is_safer(plan, best):
            self._favoured_s = now_s if self._favoured_s is None else self._favoured_s
            if now_s < self._favoured_s + LASTS_S:
                return []
        favoured = f"{_named(best, plan)} over {_named(plan, best)}"
        return [
            Notice(text=f"measured times favour {favoured}: {weighing}"),
            MorphRequested("measured times favour another plan"),
        ]

    def _weighed(self, fleet: Fleet, job: JobFacts, plan: Plan, now_s: float) -> tuple[Plan, MorphEstimate | None]:
        """The plan that is best now, and what it saves until the next change, if that is more than the switch costs."""
        best = self._best(fleet, job)
        if best is None:
            return plan, None
        weighing = estimate_morph(
            plan.model_copy(update={"step_s": self.predicted_s(plan)}),
            best,
            computing_s=min(
                fleet.experience.gap_s(now_s), (job.steps - fleet.recorded.step - 1) * fleet.recorded.wall_s
            ),
            stall_s=fleet.experience.stall_s(job, best),
            exposed_s=0.0,  # the same workers: of what that is worth, ``_is_safer`` decides
        )
        return best, weighing if weighing.is_worth(fleet.config.min_measured_gain) else None

    def _keep_networks(self, before: Calibrations, plan: Plan) -> None:
        """Remember networks as they were thought to be before this run has measured any."""
        for name in (*before.classes, *plan.classes):
            known = before.of(name)
            self._networks.setdefault(name, {field: getattr(known, field) for field in _NETWORKS})

    def _doubt(self, fleet: Fleet, job: JobFacts, plan: Plan, now_s: float) -> list[Told]:
        """Forget what networks were measured to be, if a plan with more holders of state is then better.

        What a plan does not use, it does not measure: a network that was slow for a minute would be slow for ever.
        """
        measured = self.calibrations
        if measured is None or not self._networks:
            return []
        believed = {
            name: each.model_copy(update=self._networks.get(name, {})) for name, each in measured.classes.items()
        }
        self.calibrations = measured.model_copy(update={"classes": believed})
        best, weighing = self._weighed(fleet, job, plan, now_s)
        if weighing is None or not _is_safer(best, plan):
            self.calibrations = measured
            return []
        self._patience_s = min(2 * self._patience_s, _LONGEST_S)
        text = f"the network may be better by now, and then {_named(best, plan)} is, than {_named(plan, best)}"
        return [
            Notice(text=f"{text}: {weighing}. It is tried again"),
            MorphRequested("a network that was slow is tried again"),
        ]

    def _best(self, fleet: Fleet, job: JobFacts) -> Plan | None:
        """The best plan for the workers that stay, with or without slow ones."""
        known = job.model_copy(update={"losses_per_hour": fleet.loss_rate.planned_per_hour})
        found = list[Plan]()
        for names, by_speed in ((fleet.available, False), (with_slow_ones(fleet), True)):
            with suppress(NoPlanError):
                workers = fleet.groups_of(names, by_speed=by_speed)
                found += [self.plan(known, workers, fleet.generations.micro_batch)] if workers else []
        return min(found, key=attrgetter("step_s"), default=None)


def _nominal(job: JobFacts) -> Calibrations:
    """Calibrations from operation counts, for any class of devices."""
    return Calibrations.of_one(nominal_calibration(job.model))


def _is_safer(plan: Plan, other: Plan) -> bool:
    """Whether all state has a second holder in a plan alone, or more workers take part in it."""
    return (min(plan.replicas, 2), plan.workers) > (min(other.replicas, 2), other.workers)


def _named(plan: Plan, other: Plan) -> str:
    """A plan's shape, and if another one has it too, what tells the two apart first."""
    if plan.shape == other.shape:
        for name, words in _TOLD_APART.items():
            value = attrgetter(name)(plan)
            if value != attrgetter(name)(other):
                shown = (" ".join(map(str, value)) or "no") if isinstance(value, tuple) else value
                return f"{plan.shape} ({words.format(shown)})"
    return plan.shape
