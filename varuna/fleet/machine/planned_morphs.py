"""Planned morphs: nodes that will leave, workers that are slow, newcomers that help, and people who ask.

All of them stop after the same vote, so that no step is lost: rank 0 raises the regroup flag. Only nodes that go before
that are left in the middle of a step. The new plan keeps the global batch (paper §"Correctness-preserving morphing").
"""

from contextlib import suppress
from dataclasses import replace

from varuna.core.errors import NoPlanError
from varuna.core.messages import Flag, RaiseFlag
from varuna.core.plan import Plan
from varuna.core.sharded_optimizer import holders_of
from varuna.fleet.machine.choosing import ABOUT, can_seat, dealt_plan, is_faster, plan_for, plan_to_come
from varuna.fleet.machine.commit import stop_generation
from varuna.fleet.machine.preemption import Way, leavers, note_replaced, way_out
from varuna.fleet.machine.salvage import break_off_limit_s
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import EndCause, Ending
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.morph_gain import estimate_morph
from varuna.fleet.state.phases import Running
from varuna.fleet.state.questions import Planned, UnansweredError, Unplannable
from varuna.fleet.state.run_events import Answered

# A regroup asked for in the last steps would meet workers that are leaving.
_LAST_STEPS = 2
# How old the newest checkpoint is, on average; workers decide when they are written.
_CHECKPOINT_AGE_S = 60.0
# Seconds between two looks at the same newcomers: what a run knows about its stalls changes.
_LOOK_AGAIN_S = 60.0


def plan_ahead(transition: Transition, phase: Running) -> None:
    """Ask for at most one planned morph, for the most pressing reason; not before the plan for it is there."""
    _ask_to_finish(transition)
    _ask_to_save(transition)
    with suppress(UnansweredError):
        _plan_ahead(transition, phase)


def _plan_ahead(transition: Transition, phase: Running) -> None:
    _answer_departures(transition)
    if (
        transition.fleet.phase is not phase
        or phase.regroup is not None
        or phase.suspicion
        or not transition.fleet.formed
    ):
        return
    fleet = transition.fleet
    if not _has_reason(fleet) or _steps_left(fleet) < _LAST_STEPS or _is_rank_away(fleet):
        return
    if fleet.requests.morph is not None:
        _answer_request(transition)
    else:
        for consider in (_consider_slow, _consider_risk, _consider_newcomers):
            if transition.fleet.phase is phase:
                consider(transition, phase)


def _has_reason(fleet: Fleet) -> bool:
    """Return whether there may be something to gain; looks at no worker, for most ticks find nothing."""
    may_change = fleet.requests.morph is not None or fleet.machines.at_risk or fleet.workers.newcomers
    return bool(may_change or fleet.speeds.slow or fleet.record.plan.speeds)


def _raise_flag(transition: Transition, flag: Flag) -> None:
    """Ask rank 0, once in a generation."""
    fleet = transition.fleet
    if isinstance(fleet.phase, Running) and flag not in fleet.phase.flags:
        transition.update(phase=replace(fleet.phase, flags=fleet.phase.flags | {flag}))
        transition.send(fleet.members[0], RaiseFlag(generation=fleet.generation, flag=flag))


def _regroup(transition: Transition, cause: str) -> None:
    """All ranks stop after the next vote."""
    phase = transition.fleet.phase
    if isinstance(phase, Running) and phase.regroup is None:
        transition.update(phase=replace(phase, regroup=EndCause(Ending.PLANNED, cause)))
        _raise_flag(transition, "regroup")


def _ask_to_finish(transition: Transition) -> None:
    """The stop flag makes all ranks save and leave after the next vote."""
    if transition.fleet.requests.finish is not None:
        _raise_flag(transition, "stop")


def _ask_to_save(transition: Transition) -> None:
    """A checkpoint is asked for as often as people want one: unlike other flags, rank 0 forgets it after the vote."""
    fleet = transition.fleet
    if fleet.requests.save and fleet.formed:
        transition.update(requests=fleet.requests.without_save())
        transition.notice("a checkpoint was requested: it is written after the current step")
        transition.send(fleet.members[0], RaiseFlag(generation=fleet.generation, flag="checkpoint"))


# -- departures ----------------------------------------------------------------------------------------------------


def _answer_departures(transition: Transition) -> None:
    """Leave nodes that are about to go, after a vote if there is time for one; the plan is asked for before."""
    fleet = transition.fleet
    going = leavers(fleet)
    if not going or not isinstance(fleet.phase, Running):
        return
    if fleet.job is not None and fleet.job.checkpoint_dir is not None and _loses_last_holder(fleet, going):
        _raise_flag(transition, "checkpoint")
    nodes = sorted({fleet.workers[name].node for name in going})
    cause = " and ".join(f"node {node} will leave ({fleet.machines.departing[node].reason})" for node in nodes)
    if not _can_do_without(transition):
        return  # as long as it lives
    match way_out(fleet, transition.now_s):
        case Way.AFTER_STEP if not (_is_drained(fleet, nodes) and _is_rank_away(fleet)):
            _regroup(transition, cause)
        case Way.AT_ONCE:
            transition.notice(f"{cause} before step {fleet.recorded.step + 1} can end: it is broken off")
            stop_generation(transition, EndCause(Ending.PLANNED, cause))
        case _:
            pass


def _can_do_without(transition: Transition) -> bool:
    """Return whether those who stay have a plan, if need be with stragglers, which can hold state."""
    usable = transition.fleet.available, transition.fleet.staying
    return any(_plan(look_ahead(transition, names)) is not None for names in usable)


def _is_drained(fleet: Fleet, nodes: list[str]) -> bool:
    """Return whether there is no hurry."""
    return all(fleet.machines.departing[node].is_drain for node in nodes)


def _is_rank_away(fleet: Fleet) -> bool:
    """Return whether a rank could not be told of its next part."""
    return any(_takes_part(fleet, name) and not fleet.is_in_touch(name) for name in fleet.record.grid)


def _loses_last_holder(fleet: Fleet, going: list[str]) -> bool:
    """Return whether some section is whole on no rank that stays."""
    plan, job = fleet.record.plan, fleet.job
    assert job is not None
    leaving = frozenset(going)
    staying = {rank for rank, name in enumerate(fleet.record.grid) if name in fleet.workers and name not in leaving}
    holders = holders_of(plan, job.model.sections, shared=job.memory.shard_optimizer)
    return any(
        all(plan.home_of(replica, section) not in staying for replica in holders[section])
        for section in range(plan.sections)
    )


# -- people, stragglers, newcomers -----------------------------------------------------------------------------------


def _answer_request(transition: Transition) -> None:
    """Answer a request for a morph: it happens if the best plan is another one, or its workers are."""
    fleet, why = transition.fleet, transition.fleet.requests.morph
    assert why is not None
    plan = _plan(best_ahead(transition))
    transition.update(requests=transition.fleet.requests.without_morph())
    if plan is None:
        transition.publish(Answered(what="morph"))
        transition.notice(f"{why}, but no plan fits the current workers", warning=True)
    elif plan.same_work(fleet.record.plan) and (plan.speeds or set(fleet.record.grid) <= set(fleet.available)):
        transition.publish(Answered(what="morph"))
        workers = len(fleet.joined if plan.speeds else fleet.available)
        transition.notice(f"{why}, but {plan.shape} is the best plan for {workers} workers")
    else:
        transition.update(generations=transition.fleet.generations.replanning())
        _regroup(transition, why)


def _consider_slow(transition: Transition, phase: Running) -> None:
    """Leave stragglers out or give them less to do, and more to those that have recovered, if steps get shorter."""
    fleet = transition.fleet
    plan, ranks = fleet.record.plan, fleet.record.ranks
    behind = {
        name: plan.speed_of(plan.place_of(ranks[name]).replica) / fleet.speed_of(name)
        for name in fleet.speeds.slow
        if _takes_part(fleet, name)
    }
    slow = sorted((name for name in behind if behind[name] * ABOUT > 1), key=ranks.__getitem__)
    if slow:
        answer, most_s = best_ahead(transition), max(behind.values())
        if isinstance(answer, Planned) and answer.plan.step_s < answer.running_s * most_s:
            _regroup(transition, " and ".join(f"worker {name} is slow ({fleet.speeds.slow[name]})" for name in slow))
    elif recovered := _recovered(fleet):
        answer = best_ahead(transition)
        if isinstance(answer, Planned) and not plan_to_come(fleet, answer).same_work(plan):
            _regroup(transition, " and ".join(f"worker {name} is faster than it was" for name in recovered))


def _recovered(fleet: Fleet) -> list[str]:
    """Members of slow pipelines that have become faster as a whole than their plan was made for."""
    found, plan = list[str](), fleet.record.plan
    for replica, speed in enumerate(plan.speeds):
        members = [fleet.members[rank] for rank in plan.ranks_of(replica)]
        if speed < ABOUT * min(map(fleet.speed_of, members)):
            found += members
    return found


def _consider_risk(transition: Transition, phase: Running) -> None:
    """Let spares take the seats of nodes that may be taken away, while their state can still move without hurry."""
    fleet = transition.fleet
    nodes = sorted(
        node
        for node, risk in fleet.machines.at_risk.items()
        if not risk.replaced and any(_takes_part(fleet, name) for name in fleet.workers.on(node))
    )
    safe = fleet.without_risk(fleet.available)
    if not nodes or not can_seat(fleet, fleet.record.plan, safe):
        return
    answer = look_ahead(transition, fleet.available)
    known = answer if isinstance(answer, Planned) else Planned(fleet.record.plan, answer.running_s)
    if can_seat(fleet, plan_to_come(fleet, known), safe):
        note_replaced(transition, nodes)
        at_risk = fleet.machines.at_risk
        reasons = " and ".join(f"node {node} may be taken away soon ({at_risk[node].reason})" for node in nodes)
        _regroup(transition, f"{reasons}; spares take its place" if len(nodes) == 1 else f"{reasons}; spares take over")


def _consider_newcomers(transition: Transition, phase: Running) -> None:
    """Take newcomers in if what they save until the next change exceeds the stall."""
    fleet = transition.fleet
    assert fleet.job is not None
    unordered = {name for name in fleet.workers.newcomers if fleet.is_available(name)}
    if not unordered or (unordered <= phase.considered and transition.now_s < phase.considered_s + _LOOK_AGAIN_S):
        return
    newcomers = [name for name in fleet.joined if name in unordered]
    fresh = [name for name in newcomers if name not in phase.considered]
    if any(transition.now_s < fleet.workers[name].joined_s + fleet.config.join_grace_s for name in fresh[:1]):
        return
    answer = best_ahead(transition)
    running = fleet.record.plan.model_copy(update={"step_s": answer.running_s})
    known = answer if isinstance(answer, Planned) else Planned(running, answer.running_s)
    plan = plan_to_come(fleet, known)
    weighing = estimate_morph(
        running,
        plan,
        computing_s=fleet.recorded.wall_s * _steps_before_change(transition),
        stall_s=fleet.experience.stall_s(fleet.job, plan),
        exposed_s=_exposed_s(transition),
    )
    named = [name for name in newcomers if not fleet.is_member(name)] or newcomers
    who = f"worker{'s' * (len(named) > 1)} {' and '.join(named)}"
    if weighing.is_worth(fleet.config.min_gain):
        left_s = break_off_limit_s(fleet, plan, weighing.faster, transition.now_s)
        if left_s is None:
            transition.notice(f"{who} will be admitted: {weighing}")
            _regroup(transition, f"{who} joined")
        else:
            transition.notice(
                f"{who} will be admitted at once: {weighing}. Step {fleet.recorded.step + 1} would take another "
                f"{left_s:.0f} s; it is broken off, and its sums of gradients are kept"
            )
            stop_generation(transition, EndCause(Ending.PLANNED, f"{who} joined"))
        return
    transition.update(phase=replace(phase, considered=frozenset(newcomers), considered_s=transition.now_s))
    # Who was here when the generation began, and has no part in its plan, is not new to anybody.
    if arrived := [name for name in fresh if not fleet.is_member(name)]:
        transition.notice(f"{' and '.join(arrived)} joined as spare: {weighing}")


def _takes_part(fleet: Fleet, name: str) -> bool:
    worker = fleet.workers.get(name)
    return worker is not None and worker.is_joined and worker.seated


def _steps_before_change(transition: Transition) -> float:
    """Steps that the run is expected to do before workers come or go again, or it ends."""
    fleet = transition.fleet
    every_s = max(fleet.recorded.every_s, fleet.recorded.wall_s, 1e-9)
    return min(fleet.experience.gap_s(transition.now_s) / every_s, _steps_left(fleet))


def _exposed_s(transition: Transition) -> float:
    """Seconds of work that only the workers hold: since the newest checkpoint, or all of it."""
    fleet = transition.fleet
    assert fleet.job is not None
    since_start_s = transition.now_s - fleet.experience.began_s
    return since_start_s if fleet.job.checkpoint_dir is None else min(since_start_s, _CHECKPOINT_AGE_S)


def best_ahead(transition: Transition) -> Planned | Unplannable:
    """The best plan for the workers that stay: without slow ones, or with less for them to do.

    Raises:
        UnansweredError: one of them is being made.
    """
    dealt, even = dealt_plan(transition), look_ahead(transition, transition.fleet.available)
    if dealt is not None and (not isinstance(even, Planned) or is_faster(transition.fleet, dealt.plan, even.plan)):
        return dealt
    return even


def look_ahead(transition: Transition, names: tuple[str, ...]) -> Planned | Unplannable:
    """The plan for these workers, if there is one; made once in a generation, since every tick may ask.

    Raises:
        UnansweredError: it is being made.
    """
    try:
        if names:
            return plan_for(transition, names)
        complaint = "there are no workers"
    except NoPlanError as error:
        complaint = str(error)
    return Unplannable(complaint, running_s=transition.fleet.record.plan.step_s)


def _plan(answer: Planned | Unplannable) -> Plan | None:
    return answer.plan if isinstance(answer, Planned) else None


def _steps_left(fleet: Fleet) -> int:
    """Steps that are not recorded."""
    assert fleet.job is not None
    return fleet.job.steps - fleet.recorded.step - 1
