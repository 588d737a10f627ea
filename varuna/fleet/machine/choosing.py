"""The choice of the next generation's plan, and of the workers that take part in it.

Slow workers are left out, or get fewer micro-batches, whichever makes the step shorter. The plan that ran last stays
unless another one is clearly better.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from varuna.core.devices import are_enough
from varuna.core.errors import NoPlanError
from varuna.core.plan import Plan
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.questions import Planned, Unplannable, WhichPlan
from varuna.fleet.state.worker import changed

ABOUT = 0.9
"""A worker that reaches this share of the speed that is expected of it is as fast as expected."""


def plan_and_workers(transition: Transition, live: tuple[str, ...]) -> tuple[Plan, tuple[str, ...]]:
    """Plan for the workers that should be used; those about to leave, or not in touch, only if it takes them.

    Raises:
        NoPlanError: nothing fits, whoever is used.
        UnansweredError: a plan is being made.
    """
    fleet, dealt = transition.fleet, dealt_plan(transition)
    found: tuple[Plan, tuple[str, ...]] | None = None
    for usable in (fleet.available,) if dealt is not None else (fleet.available, fleet.staying, fleet.in_touch):
        if found is None and usable and usable != live:
            with suppress(NoPlanError):
                found = _seated_safely(fleet, _plan_keeping(transition, usable), usable)
    if dealt is not None and (found is None or is_faster(fleet, dealt.plan, found[0])):
        names = with_slow_ones(fleet)
        _note_planned_for(transition, names)
        return _clearly_better(fleet, dealt, names, by_speed=True), names
    return found or _seated_safely(fleet, _plan_keeping(transition, live), live)


def dealt_plan(transition: Transition) -> Planned | None:
    """The plan for all who stay, slow ones included, which get fewer micro-batches; None: there is none.

    Raises:
        UnansweredError: it is being made.
    """
    names = with_slow_ones(transition.fleet)
    if not names:
        return None
    try:
        known = plan_for(transition, names, by_speed=True)
    except NoPlanError:
        return None
    return known if known.plan.speeds else None


def is_faster(fleet: Fleet, dealt: Plan, even: Plan) -> bool:
    """Return whether a plan that gives slow workers less to do is faster than one without them.

    Nominal figures of a network are no reason to send workers away: until something was measured, speeds are compared.
    """
    if fleet.speeds.expected_s is None:
        return sum(depth * dealt.speed_of(replica) for replica, depth in enumerate(dealt.depths)) > even.workers
    return dealt.step_s < even.step_s


def with_slow_ones(fleet: Fleet) -> tuple[str, ...]:
    """All workers that stay and are in touch; () if none is slow."""
    names = fleet.staying
    return names if any(name in fleet.speeds.slow for name in names) else ()


def _seated_safely(fleet: Fleet, plan: Plan, usable: tuple[str, ...]) -> tuple[Plan, tuple[str, ...]]:
    """Make spares of those on nodes that may be taken away soon, if there are spares."""
    safe = fleet.without_risk(usable)
    return plan, safe if can_seat(fleet, plan, safe) else usable


def can_seat(fleet: Fleet, plan: Plan, names: Sequence[str]) -> bool:
    """Return whether these workers are enough for a plan, in every class of devices that it is for."""
    return are_enough(plan.classes, fleet.counted(names))


def _plan_keeping(transition: Transition, usable: tuple[str, ...]) -> Plan:
    """The plan that ran last, if nothing is clearly better: then only its seats get other workers.

    Raises:
        NoPlanError: nothing fits.
    """
    if _is_best_known(transition.fleet, usable):
        return transition.fleet.record.plan
    known = plan_for(transition, usable)
    _note_planned_for(transition, usable)
    return _clearly_better(transition.fleet, known, usable)


def _note_planned_for(transition: Transition, names: Sequence[str]) -> None:
    """Note which workers the newest plan could have used."""
    fleet = transition.fleet
    transition.update(generations=changed(fleet.generations, planned_for=fleet.counted(names)))


def plan_to_come(fleet: Fleet, known: Planned) -> Plan:
    """Return the plan that a morph now would run, if ``known`` is the best plan that is known.

    Whoever asks for a morph must know: one that changes nothing would be asked for again and again.
    """
    if known.plan.speeds:
        return _clearly_better(fleet, known, with_slow_ones(fleet), by_speed=True)
    names = fleet.available
    return fleet.record.plan if _is_best_known(fleet, names) else _clearly_better(fleet, known, names)


def _is_best_known(fleet: Fleet, usable: tuple[str, ...]) -> bool:
    """The plan that ran last was the best one for ``planned_for`` workers: so it is for fewer, if they are enough."""
    if not fleet.history or fleet.generations.replan or fleet.record.plan.speeds:
        return False
    planned_for = fleet.generations.planned_for
    looked_at = all(workers <= planned_for.get(name, 0) for name, workers in fleet.counted(usable).items())
    return looked_at and can_seat(fleet, fleet.record.plan, usable)


def _clearly_better(fleet: Fleet, known: Planned, names: Sequence[str], *, by_speed: bool = False) -> Plan:
    """The plan that was found, or the one that ran last if that is about as fast, by what is known now.

    Args:
        fleet: between two generations, or before that.
        known: what was found.
        names: of the workers that it is for.
        by_speed: how fast each is counts.
    """
    plan = known.plan
    if not fleet.history or fleet.generations.replan or not can_seat(fleet, fleet.record.plan, names):
        return plan
    old = fleet.record.plan
    if old.holders == 1 < plan.holders:  # state that is held twice is worth more than the same seats
        return plan
    now = old.at_speeds(fleet.groups_of(names, by_speed=by_speed))
    if any(old.speed_of(replica) * ABOUT > speed for replica, speed in enumerate(now.speeds)):
        return plan  # somebody is slower than the old one was made for
    return old if plan.step_s >= known.running_s * (1 - fleet.config.min_gain) else plan


def plan_for(transition: Transition, names: Sequence[str], *, by_speed: bool = False) -> Planned:
    """Plan with the run's micro-batch; only if nothing fits with it, and the user left m open, with a smaller one.

    Args:
        transition: asks, and takes what was answered.
        names: of the workers.
        by_speed: how fast each is counts.

    Raises:
        NoPlanError: nothing fits.
        UnansweredError: it is being made.
    """
    fleet = transition.fleet
    kept, workers = fleet.generations.micro_batch, fleet.groups_of(names, by_speed=by_speed)
    question = WhichPlan(workers, kept, fleet.loss_rate.planned_per_hour)
    answer = transition.answer_to(question)
    if isinstance(answer, Planned):
        return answer
    assert isinstance(answer, Unplannable)
    if kept is not None and fleet.job is not None and fleet.job.micro_batch is None:
        other = transition.answer_to(replace(question, micro_batch=None))
        if isinstance(other, Planned) and other.plan.micro_batch < kept:
            return other
        if isinstance(other, Unplannable):
            raise NoPlanError(other.complaint)
    raise NoPlanError(answer.complaint)
