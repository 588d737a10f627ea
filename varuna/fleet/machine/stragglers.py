"""Stragglers: found by their heartbeats, and left out of the next plan or given fewer micro-batches.

A worker is compared with those that run the same stage, each by the speed that is known of it: like with like. Where
pipelines are cut differently, all are compared, each by what its stage was predicted to take. One that is left out gets
another chance after a while.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from statistics import median
from typing import Any

from varuna.core.messages import Beat
from varuna.core.plan import Plan
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Running
from varuna.fleet.state.stutter import (
    NO_EVIDENCE,
    RECENT_BEATS,
    Straggler,
    slower_than_peers,
    slower_than_predicted,
    usual_s,
)
from varuna.fleet.state.worker import changed

_FULL_SPEED = 0.85
"""As fast as the fastest, by what beats can tell."""
_GRID = 0.07
"""Speeds are told to about 7 %, so that machines of a kind have one."""
_LEAST_SPEED = 0.02
_NO_NEWS = 0.19
"""A smaller change of a speed's logarithm is noise of the estimate."""


def _note(transition: Transition, **changes: Any) -> None:
    """Replace what is known of speeds."""
    transition.update(speeds=changed(transition.fleet.speeds, **changes))


def note_speeds(transition: Transition, expected_s: tuple[float, ...] | None, link_bytes_per_s: float | None) -> None:
    """Note what the ranks of the plan that runs should take, by all that was measured."""
    _note(transition, expected_s=expected_s, link_bytes_per_s=link_bytes_per_s)


def note_beat(transition: Transition, name: str, beat: Beat) -> None:
    """Compare a worker's new compute times with those of its peers."""
    fleet, phase, slow_ratio = transition.fleet, transition.fleet.phase, transition.fleet.config.slow_ratio
    if slow_ratio is None or not isinstance(phase, Running) or not fleet.formed or fleet.job is None:
        return
    worker = fleet.workers[name]
    if beat.generation != fleet.generation or not worker.seated:
        return
    if not worker.is_joined:  # who leaves says so on another thread than its heart beats on
        return
    if beat.forward_s is None or beat.backward_s is None or beat.forward_s + beat.backward_s <= 0:
        return
    if len(fleet.generations.planned_for) > 1 and not fleet.record.plan.is_by_class:
        return  # a pipeline on devices of several classes: nobody is like the others
    plan, rank, compute_s = fleet.record.plan, fleet.record.ranks[name], beat.forward_s + beat.backward_s
    recent_s = (*worker.recent_s, compute_s)[-RECENT_BEATS:]
    if plan.replicas > 1:
        known_s = _comparable_s(fleet, rank)
        if known_s is None:
            return
        speed_adjusted_s = compute_s * fleet.speed_of(name) / known_s
        ratio = slower_than_peers(
            speed_adjusted_s, _exchange(transition, _circle_of(plan, rank), worker.speed_adjusted_s, speed_adjusted_s)
        )
        transition.update_worker(name, compute_s=compute_s, speed_adjusted_s=speed_adjusted_s, recent_s=recent_s)
    else:
        transition.update_worker(name, compute_s=compute_s, recent_s=recent_s)
        ratio = slower_than_predicted(rank, _fair_s(transition.fleet), fleet.speeds.expected_s)
    if ratio is None:
        return
    evidence, lead = worker.evidence.updated(ratio, slow_ratio), worker.lead.updated(1 / ratio, slow_ratio)
    if (evidence, lead) != (worker.evidence, worker.lead):
        transition.update_worker(name, evidence=evidence, lead=lead)
    for each in (evidence, lead):
        if each.is_conclusive and (each.beats >= RECENT_BEATS or fleet.record.plan.replicas == 1):
            _judge(transition, name, evidence.ratio if each is evidence else 1 / lead.ratio)
            return


def _circle_of(plan: Plan, rank: int) -> int:
    """Number of those that a rank is compared with: one for each stage; where pipelines are unlike, for each class."""
    return plan.slot_of(rank) if plan.is_uniform else list(plan.classes).index(plan.class_of(rank))


def _circles(plan: Plan) -> int:
    return plan.stages if plan.is_uniform else len(plan.classes)


def _ranks_like(plan: Plan, rank: int) -> Sequence[int]:
    """Those that a rank is compared with, itself included."""
    if plan.is_uniform:
        return plan.peers_of(rank)
    return [each for each in range(plan.workers) if plan.class_of(each) == plan.class_of(rank)]


def _comparable_s(fleet: Fleet, rank: int) -> float | None:
    """Return the divisor that makes a rank's time comparable: 1 where all compared do the same; None: nobody knows."""
    plan = fleet.record.plan
    if plan.is_uniform:
        return 1.0
    return fleet.speeds.expected_s[plan.slot_of(rank)] or None if fleet.speeds.expected_s is not None else None


def _exchange(transition: Transition, circle: int, old_s: float | None, new_s: float) -> list[float]:
    """Put a rank's new compute time in the place of its old one; returns those of its peers, ascending."""
    circles = transition.fleet.speeds.compute_s or ((),) * _circles(transition.fleet.record.plan)
    peers_s = list(circles[circle])
    if old_s is not None:
        del peers_s[bisect_left(peers_s, old_s)]
    all_s = peers_s.copy()
    insort(all_s, new_s)
    _note(transition, compute_s=(*circles[:circle], tuple(all_s), *circles[circle + 1 :]))
    return peers_s


def _fair_s(fleet: Fleet) -> dict[int, float]:
    """The newest compute time of each stage of the one pipeline, in this generation, as if all were equally fast."""
    found = {}
    for stage, name in enumerate(fleet.record.grid):
        worker = fleet.workers.get(name)
        if worker is not None and worker.is_joined and worker.compute_s is not None:
            found[stage] = worker.compute_s * fleet.speed_of(name)
    return found


# -- what follows ------------------------------------------------------------------------------------------------


def _judge(transition: Transition, name: str, ratio: float) -> None:
    """A worker's speed is not what was known. If it is faster than its peers, they are estimated as well.

    Where most are slow, nobody is slower than the others in the middle; but somebody is faster.
    """
    fleet, plan = transition.fleet, transition.fleet.record.plan
    if plan.replicas == 1:
        found = {name: min(1.0, fleet.speed_of(name) / ratio)}
    else:
        rank = fleet.record.ranks[name]
        circle = _circle_of(plan, rank)
        ranks = _ranks_like(plan, rank)
        peers = {fleet.members[each]: each for each in ranks if fleet.members[each] in fleet.workers}
        usual = {
            each: usual_s(told) / known_s
            for each, at in peers.items()
            if (told := fleet.workers[each].recent_s) and (known_s := _comparable_s(fleet, at))
        }
        speed_adjusted_s = [seconds * fleet.speed_of(each) for each, seconds in usual.items() if each != name]
        if not speed_adjusted_s:  # its peers have just left
            return
        found = {name: min(1.0, median(speed_adjusted_s) / usual[name])}
        if ratio < 1:
            # The very fastest may be so by chance; what several fast ones take in the middle is not.
            fast_s = [seconds for seconds in usual.values() if seconds * _FULL_SPEED <= min(usual.values())]
            found = {each: median(fast_s) / seconds for each, seconds in usual.items()} | found
        _note(transition, compute_s=(*fleet.speeds.compute_s[:circle], (), *fleet.speeds.compute_s[circle + 1 :]))
        for each in peers:
            transition.update_worker(each, speed_adjusted_s=None)
    for each, speed in sorted(found.items()):
        transition.update_worker(each, evidence=NO_EVIDENCE, lead=NO_EVIDENCE)
        _note_speed(transition, each, _told(speed), 1 / speed)


def _told(speed: float) -> float:
    """A speed as others are told it."""
    return 1.0 if speed >= _FULL_SPEED else max(_LEAST_SPEED, round(exp(round(log(speed) / _GRID) * _GRID), 3))


def _note_speed(transition: Transition, name: str, speed: float, ratio: float) -> None:
    fleet, known = transition.fleet, transition.fleet.speed_of(name)
    if abs(log(speed / known)) < _NO_NEWS:
        return
    others = {other: straggler for other, straggler in fleet.speeds.slow.items() if other != name}
    where = f"worker {name} on node {fleet.workers[name].node}"
    if speed == 1.0:
        _note(transition, slow=others)
        transition.notice(f"{where} is as fast as its peers again")
        return
    if name in fleet.speeds.slow:
        _note(transition, slow={**others, name: replace(fleet.speeds.slow[name], ratio=ratio, speed=speed)})
        return
    strikes = fleet.speeds.strikes.get(name, 0) + 1
    probation_s = fleet.config.probation_s * 2 ** (strikes - 1)
    straggler = Straggler(ratio, transition.now_s + probation_s, speed)
    _note(transition, slow={**others, name: straggler}, strikes={**fleet.speeds.strikes, name: strikes})
    transition.notice(
        f"{where} is slow: {straggler}. It gets fewer micro-batches, or is left out for {probation_s:.0f} s, "
        "if that makes steps shorter",
        warning=True,
    )


def readmit(transition: Transition) -> None:
    """Forget stragglers that are gone; one whose time is over may be taken in again, like a newcomer.

    One that has its share of the micro-batches is watched all the time: it needs no other chance.
    """
    fleet = transition.fleet
    over = {
        name
        for name, straggler in fleet.speeds.slow.items()
        if name not in fleet.workers or (transition.now_s >= straggler.until_s and not _has_share(fleet, name))
    }
    if over:
        _note(transition, slow={name: straggler for name, straggler in fleet.speeds.slow.items() if name not in over})
        phase = transition.fleet.phase
        if isinstance(phase, Running):
            transition.update(phase=replace(phase, considered=phase.considered - over))
        for name in sorted(over & set(fleet.workers)):
            transition.notice(f"worker {name} was slow and gets another chance")


def _has_share(fleet: Fleet, name: str) -> bool:
    return fleet.workers[name].seated and bool(fleet.history and fleet.record.plan.speeds)
