"""The sweep: every depth P that the workers allow, ranked by predicted step time (paper §"Parametrized Simulation").

For each P the sections are balanced once and D takes all workers. Depths that do not fit memory are
rejected with the missing bytes; the others are simulated, best bound first, until no bound can win.
"""

from dataclasses import dataclass

from pydantic import Field

from varuna.core.calibration import NOMINAL, Calibration
from varuna.core.errors import UsageError
from varuna.core.model import ModelFacts
from varuna.core.plan import Plan
from varuna.core.units import format_bytes
from varuna.core.value import Value
from varuna.planner.balance import balance
from varuna.planner.memory import largest_stash, stage_memory
from varuna.planner.predict import pipeline_costs, predict_step_s
from varuna.schedule.policy import stash_limit
from varuna.simulator.bounds import lower_bound_s
from varuna.simulator.costs import PipelineCosts

_TIE = 1.01  # plans within 1 % are equal: the one with fewer stages loses less per failure


class Rejection(Value):
    """A depth that cannot run."""

    stages: int = Field(description="P")
    replicas: int = Field(description="D that the workers would allow")
    reason: str
    missing_bytes: int | None = Field(default=None, description="at the worst stage; None if memory is not why")


class Ranking(Value):
    """What the sweep found."""

    plans: tuple[Plan, ...] = Field(description="simulated, best first")
    outpaced: tuple[Plan, ...] = Field(description="not simulated: their step_s is a lower bound above the best")
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A plan that fits, its costs, and what it takes at least."""

    plan: Plan
    costs: PipelineCosts
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """What is the same for every depth."""

    model: ModelFacts
    workers: int
    global_batch: int
    micro_batch: int
    memory_bytes: int | None
    calibration: Calibration
    policy: str

    def ranking(self, stages: int | None) -> Ranking:
        outcomes = [self.candidate(depth) for depth in self.depths(stages)]
        candidates = [outcome for outcome in outcomes if isinstance(outcome, _Candidate)]
        candidates.sort(key=lambda candidate: (candidate.bound_s, candidate.plan.stages))
        simulated: list[Plan] = []
        best_s = float("inf")
        for candidate in candidates:
            if candidate.bound_s > best_s * _TIE:
                break
            simulated.append(_simulated(candidate))
            best_s = min(best_s, simulated[-1].step_s)
        return Ranking(
            plans=_best_first(simulated),
            outpaced=tuple(candidate.plan for candidate in candidates[len(simulated) :]),
            rejected=tuple(outcome for outcome in outcomes if isinstance(outcome, Rejection)),
        )

    def depths(self, stages: int | None) -> range:
        if stages is not None and stages < 1:
            raise UsageError(
                f"stages={stages} was asked for, but a pipeline has at least 1. Raise or leave out --stages."
            )
        if stages is not None:
            return range(stages, stages + 1)
        return range(1, min(self.workers, len(self.model.sections)) + 1)

    def candidate(self, stages: int) -> _Candidate | Rejection:
        sections = len(self.model.sections)
        if stages > sections:
            reason = f"P={stages} was asked for, but the model has {sections} sections"
            return Rejection(stages=stages, replicas=0, reason=reason)
        if stages > self.workers:
            found = "is 1 worker" if self.workers == 1 else f"are {self.workers} workers"
            reason = f"P={stages} was asked for, but there {found}"
            return Rejection(stages=stages, replicas=0, reason=reason)
        plan = self._fill(self._outline(stages))
        rejection = self._over_memory(plan)
        if rejection is not None:
            return rejection
        costs = pipeline_costs(
            self.model,
            plan.starts,
            replicas=plan.replicas,
            micro_batch=self.micro_batch,
            calibration=self.calibration,
        )
        bound_s = lower_bound_s(costs, micro_batches=_longest(plan), stash_limits=plan.stash_limits)
        return _Candidate(plan=plan.model_copy(update={"step_s": bound_s}), costs=costs, bound_s=bound_s)

    def _outline(self, stages: int) -> Plan:
        """P x D with the sections of each stage and the default in-flight depths."""
        forwards = [section.forward_s for section in self.model.sections]
        factor = self.calibration.backward_factor
        micro_batches = -(-self.global_batch // self.micro_batch)
        replicas = min(self.workers // stages, micro_batches)
        longest = -(-micro_batches // replicas)
        return Plan(
            stages=stages,
            replicas=replicas,
            micro_batch=self.micro_batch,
            global_batch=self.global_batch,
            starts=balance([f * (2 + factor) for f in forwards], [f * (1 + factor) for f in forwards], stages),
            sections=len(forwards),
            policy=self.policy,
            stash_limits=tuple(stash_limit(stages, k, longest, self.policy) for k in range(stages)),
        )

    def _fill(self, plan: Plan) -> Plan:
        """Lower the in-flight depths to what memory holds, not below P - k, and count the bytes."""
        limits = plan.stash_limits
        if self.memory_bytes is not None and self.policy == "varuna":  # the only policy that keeps any limit
            limits = tuple(
                largest_stash(
                    self.model,
                    plan.sections_of(k),
                    micro_batch=plan.micro_batch,
                    memory_bytes=self.memory_bytes,
                    wanted=wanted,
                    least=min(wanted, plan.stages - k),
                )
                for k, wanted in enumerate(limits)
            )
        needs = (
            stage_memory(self.model, plan.sections_of(k), micro_batch=plan.micro_batch, stash=limit).total
            for k, limit in enumerate(limits)
        )
        return plan.model_copy(update={"stash_limits": limits, "memory_bytes": tuple(needs)})

    def _over_memory(self, plan: Plan) -> Rejection | None:
        need = max(plan.memory_bytes)
        if self.memory_bytes is None or need <= self.memory_bytes:
            return None
        missing = need - self.memory_bytes
        return Rejection(
            stages=plan.stages,
            replicas=plan.replicas,
            reason=f"stage {plan.memory_bytes.index(need)} of P={plan.stages} needs {format_bytes(need)} "
            f"but each worker has {format_bytes(self.memory_bytes)}: {format_bytes(missing)} too little",
            missing_bytes=missing,
        )


def rank_plans(
    model: ModelFacts,
    *,
    workers: int,
    global_batch: int,
    micro_batch: int,
    memory_bytes: int | None = None,
    stages: int | None = None,
    calibration: Calibration = NOMINAL,
    policy: str = "varuna",
) -> Ranking:
    """Rank every depth, or ``stages`` alone.

    Args:
        model: sections and their costs.
        workers: most ranks to use.
        global_batch: M, examples per step.
        micro_batch: m, examples.
        memory_bytes: of one worker; unlimited if None.
        stages: P if the user fixed it.
        calibration: of the hardware.
        policy: schedule policy of the plans.

    Raises:
        UsageError: no such policy, or no stages.
    """
    return _Sweep(
        model=model,
        workers=workers,
        global_batch=global_batch,
        micro_batch=micro_batch,
        memory_bytes=memory_bytes,
        calibration=calibration,
        policy=policy,
    ).ranking(stages)


def _simulated(candidate: _Candidate) -> Plan:
    plan = candidate.plan
    step_s = predict_step_s(
        candidate.costs, micro_batches=_longest(plan), policy=plan.policy, stash_limits=plan.stash_limits
    )
    return plan.model_copy(update={"step_s": step_s})


def _best_first(plans: list[Plan]) -> tuple[Plan, ...]:
    """By step time, but first the shallowest of those that tie with the fastest."""
    ranked = sorted(plans, key=lambda plan: (plan.step_s, plan.stages))
    if not ranked:
        return ()
    best = min((plan for plan in ranked if plan.step_s <= ranked[0].step_s * _TIE), key=lambda plan: plan.stages)
    return (best, *(plan for plan in ranked if plan is not best))


def _longest(plan: Plan) -> int:
    """N of the replica with the most micro-batches."""
    return len(plan.micro_batches_of(0))
