"""Stragglers: found by their heartbeats, left out of the next plan, and let back in on probation."""

from dataclasses import replace

from varuna.core.messages import Beat
from varuna.fleet.state import Fleet, Running, Straggler
from varuna.fleet.stutter import Evidence, slowness
from varuna.fleet.turn import Turn


def note_beat(turn: Turn, name: str, beat: Beat) -> None:
    """Compare a worker's new compute times with those of its peers."""
    fleet, phase, slow_ratio = turn.fleet, turn.fleet.phase, turn.fleet.config.slow_ratio
    if slow_ratio is None or not isinstance(phase, Running) or not fleet.formed or fleet.job is None:
        return
    if beat.generation != fleet.generation or name not in fleet.record.grid or name in fleet.slow:
        return
    if not fleet.is_joined(name):  # who leaves says so on another thread than its heart beats on
        return
    if beat.forward_s is None or beat.backward_s is None:
        return
    turn.update_worker(name, compute_s=(beat.generation, beat.forward_s + beat.backward_s))
    plan = fleet.record.plan
    expected_s = turn.advice.expected_s(fleet.job, plan)
    ratio = slowness(fleet.record.grid.index(name), plan, _compute_s(turn.fleet), expected_s)
    if ratio is None:
        return
    evidence = phase.evidence.get(name, Evidence()).updated(ratio, slow_ratio)
    turn.update(phase=replace(phase, evidence={**phase.evidence, name: evidence}))
    if evidence.is_conclusive:
        _condemn(turn, name, evidence.ratio)


def _compute_s(fleet: Fleet) -> dict[int, float]:
    """By rank: the newest compute times of this generation."""
    found = {}
    for rank, name in enumerate(fleet.record.grid):
        known = fleet.workers[name].compute_s if fleet.is_joined(name) else None
        if known is not None and known[0] == fleet.generation:
            found[rank] = known[1]
    return found


def _condemn(turn: Turn, name: str, ratio: float) -> None:
    """Leave a worker out for a while; it stays warm, and its state can be copied."""
    fleet = turn.fleet
    strikes = fleet.strikes.get(name, 0) + 1
    probation_s = fleet.config.probation_s * 2 ** (strikes - 1)
    straggler = Straggler(ratio, turn.now_s + probation_s)
    turn.update(slow={**fleet.slow, name: straggler}, strikes={**fleet.strikes, name: strikes})
    where = f"worker {name} on node {fleet.workers[name].node}"
    turn.notice(f"{where} is slow: {straggler}. Leaving it out for {probation_s:.0f} s", warning=True)


def readmit(turn: Turn) -> None:
    """Forget those who are gone; who has served its time may be taken in again, as a newcomer is."""
    fleet = turn.fleet
    over = {
        name for name, straggler in fleet.slow.items() if name not in fleet.workers or turn.now_s >= straggler.until_s
    }
    if over:
        turn.update(slow={name: straggler for name, straggler in fleet.slow.items() if name not in over})
        phase = turn.fleet.phase
        if isinstance(phase, Running):
            turn.update(phase=replace(phase, considered=phase.considered - over))
        for name in sorted(over & set(fleet.workers)):
            turn.notice(f"worker {name} was slow and gets another chance")
