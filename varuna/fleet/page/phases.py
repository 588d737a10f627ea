"""The activity of a run, in words. Pure."""

from varuna.core.messages import WorkerPhase
from varuna.core.units import counted
from varuna.fleet.machine.standstill import gathered
from varuna.fleet.state.causes import Obstacle
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Finishing, Idle, Running, Stopping
from varuna.fleet.state.worker import WorkerStatus


def phase_of(fleet: Fleet) -> str:
    """Say what a run does that is not training; empty while it trains."""
    text = _phase(fleet)
    return f"training {fleet.training + 1} of the script: {text}" if text and fleet.training else text


def _phase(fleet: Fleet) -> str:
    match fleet.phase:
        case Idle(blocked=blocked) if not fleet.history:
            if blocked is not None and blocked.by is not Obstacle.NO_WORKERS:
                return f"waiting: {blocked.text}"
            if fleet.config.elastic:
                return gathered(fleet)
            ready = fleet.workers.count(WorkerStatus.JOINED)
            if ready < (wanted := fleet.starts.wanted):
                return f"starting {counted(wanted, 'worker')}, {ready} ready: loading torch, capturing the model"
            return "planning"
        case Idle() | Stopping():
            return "morphing"
        case Running() if not fleet.formed:
            return _forming(fleet)
        case Finishing():
            return "finishing: the script runs to its end"
        case _:
            return ""


def _forming(fleet: Fleet) -> str:
    """Say what rank 0 does on the way to its first step."""
    beat = fleet.workers[fleet.members[0]].beat
    match beat.phase if beat is not None and beat.generation == fleet.generation else None:
        case WorkerPhase.CHECKS:
            return "checking the model against plain PyTorch"
        case WorkerPhase.STEPS | WorkerPhase.LOOP:
            return "running the first step"
        case _:
            return "connecting the workers"
