"""Stragglers: found by their heartbeats, left out of the next plan, and let back in on probation."""

from bisect import bisect_left, insort
from dataclasses import replace

from varuna.core.messages import Beat
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet, Running, Straggler
from varuna.fleet.state.stutter import slower_than_peers, slower_than_predicted


def note_beat(transition: Transition, name: str, beat: Beat) -> None:
    """Compare a worker's new compute times with those of its peers."""
    fleet, phase, slow_ratio = transition.fleet, transition.fleet.phase, transition.fleet.config.slow_ratio
    if slow_ratio is None or not isinstance(phase, Running) or not fleet.formed or fleet.job is None:
        return
    worker = fleet.workers[name]
    if beat.generation != fleet.generation or not worker.seated or name in fleet.slow:
        return
    if not worker.is_joined:  # who leaves says so on another thread than its heart beats on
        return
    if beat.forward_s is None or beat.backward_s is None:
        return
    plan, rank, compute_s = fleet.record.plan, fleet.record.ranks[name], beat.forward_s + beat.backward_s
    if plan.replicas > 1:
        ratio = slower_than_peers(
            compute_s, _exchange(transition, plan.place_of(rank).stage, worker.compute_s, compute_s)
        )
        transition.update_worker(name, compute_s=compute_s)
    else:
        transition.update_worker(name, compute_s=compute_s)
        ratio = slower_than_predicted(rank, _compute_s(transition.fleet), fleet.expected_s)
    if ratio is None:
        return
    evidence = worker.evidence.updated(ratio, slow_ratio)
    if evidence != worker.evidence:
        transition.update_worker(name, evidence=evidence)
    if evidence.is_conclusive:
        _condemn(transition, name, evidence.ratio)


def _exchange(transition: Transition, stage: int, old_s: float | None, new_s: float) -> list[float]:
    """Put a rank's new compute time in the place of its old one; returns those of its peers, ascending."""
    stages = transition.fleet.compute_s or ((),) * transition.fleet.record.plan.stages
    peers_s = list(stages[stage])
    if old_s is not None:
        del peers_s[bisect_left(peers_s, old_s)]
    all_s = peers_s.copy()
    insort(all_s, new_s)
    transition.update(compute_s=(*stages[:stage], tuple(all_s), *stages[stage + 1 :]))
    return peers_s


def _compute_s(fleet: Fleet) -> dict[int, float]:
    """The newest compute time of each stage of the one pipeline, in this generation."""
    found = {}
    for stage, name in enumerate(fleet.record.grid):
        worker = fleet.workers.get(name)
        if worker is not None and worker.is_joined and worker.compute_s is not None:
            found[stage] = worker.compute_s
    return found


def _condemn(transition: Transition, name: str, ratio: float) -> None:
    """Leave a worker out for a while; it stays warm, and its state can be copied."""
    fleet = transition.fleet
    strikes = fleet.strikes.get(name, 0) + 1
    probation_s = fleet.config.probation_s * 2 ** (strikes - 1)
    straggler = Straggler(ratio, transition.now_s + probation_s)
    transition.update(slow={**fleet.slow, name: straggler}, strikes={**fleet.strikes, name: strikes})
    where = f"worker {name} on node {fleet.workers[name].node}"
    transition.notice(f"{where} is slow: {straggler}. Leaving it out for {probation_s:.0f} s", warning=True)


def readmit(transition: Transition) -> None:
    """Forget stragglers that are gone; one whose time is over may be taken in again, like a newcomer."""
    fleet = transition.fleet
    over = {
        name
        for name, straggler in fleet.slow.items()
        if name not in fleet.workers or transition.now_s >= straggler.until_s
    }
    if over:
        transition.update(slow={name: straggler for name, straggler in fleet.slow.items() if name not in over})
        phase = transition.fleet.phase
        if isinstance(phase, Running):
            transition.update(phase=replace(phase, considered=phase.considered - over))
        for name in sorted(over & set(fleet.workers)):
            transition.notice(f"worker {name} was slow and gets another chance")
