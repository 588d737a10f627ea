"""The answer to ``GET /status``, as far as the fleet knows it: plain JSON values."""

from varuna.core.plan import Plan
from varuna.fleet.machine.standstill import stillness
from varuna.fleet.page.conditions import condition, slowness
from varuna.fleet.page.phases import phase_of
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Ended, Finishing, Idle, Running, Stopping
from varuna.fleet.state.worker import Worker


def describe(fleet: Fleet, now_s: float) -> dict[str, object]:
    """The fleet for people and tools; read-only. ``now_s`` by the manager's clock."""
    return {**glance(fleet, now_s), "generations": _generations(fleet)}


def glance(fleet: Fleet, now_s: float) -> dict[str, object]:
    """The same without generations before the newest."""
    # Silence is measured on a clock that stands still while nobody could be heard: people ask for all of it.
    deaf_s = now_s - fleet.contacts.heard_s if fleet.contacts.is_alone else 0.0
    slow, classes = slowness(fleet), fleet.device_classes(fleet.workers)
    still = stillness(fleet, now_s)
    return {
        "state": _state(fleet),
        "still_s": None if still is None else round(still.for_s, 1),
        "waits_for": None if still is None else still.why,
        "wanted": fleet.config.workers,
        "doing": phase_of(fleet),
        "training": fleet.training + 1,
        "steps": fleet.job.steps if fleet.job else 0,
        "checkpoint_dir": fleet.job.checkpoint_dir if fleet.job else None,
        "rescues": fleet.job is not None and fleet.job.rescues,
        "durable_step": fleet.recorded.saved_step,
        "lease_s": fleet.config.lease_s,
        "generation": fleet.generation,
        "plan": shown_plan(fleet.record.plan) if fleet.history else None,
        "members": list(fleet.members),
        "nodes": list(fleet.workers.nodes),
        "step_s": fleet.recorded.wall_s or None,
        "departing": list(fleet.machines.departing),
        "workers": [
            _worker(fleet, worker, deaf_s, slow.get(worker.name), classes[worker.name])
            for worker in fleet.workers.values()
        ],
    }


def shown_plan(plan: Plan) -> dict[str, object]:
    """A plan, with the number of stages of each replica, which may differ."""
    classes = plan.classes if plan.is_by_class else {}
    names = ("stages", "replicas", "sections", "shape", "depths")
    return {**plan.model_dump(), **{name: getattr(plan, name) for name in names}, "classes": classes}


def _worker(fleet: Fleet, worker: Worker, deaf_s: float, slow: float | None, device_class: str) -> dict[str, object]:
    silent_s = round(deaf_s + fleet.listened_s - fleet.seen_s(worker), 1) if worker.beat else None
    kind, words = condition(fleet, worker, silent_s, slow)
    return {
        "name": worker.name,
        "node": worker.node,
        "state": worker.standing.value,
        "condition": kind,
        "words": words,
        "rank": fleet.rank_of(worker.name),
        "pid": worker.pid,
        "activity": worker.beat.activity if worker.beat else "",
        "silent_s": silent_s,
        "device": worker.device.name if worker.device else None,
        "device_class": device_class,
        "zone": fleet.machines.zones.get(worker.node),
        "compute_s": worker.compute_s,
        "slow": fleet.speeds.slow[worker.name].ratio if worker.name in fleet.speeds.slow else None,
    }


def _generations(fleet: Fleet) -> list[dict[str, object]]:
    return [
        {
            "generation": record.generation,
            "plan": {"stages": record.plan.stages, "replicas": record.plan.replicas, "shape": record.plan.shape},
            "first_step": record.first_step,
            "recovery_s": record.recovery_seconds,
            "steps_redone": record.steps_redone,
            "kept_micro_batches": record.kept_micro_batches,
            "moved_sections": record.moved_sections,
            "losses_per_hour": record.losses_per_hour,
            "cause": record.cause,
        }
        for record in fleet.history
    ]


def _state(fleet: Fleet) -> str:
    """The phase in words."""
    match fleet.phase:
        case Idle(blocked=blocked):
            state = "morphing" if fleet.history else "starting"
            return f"{state}: {blocked.text}" if blocked is not None and fleet.workers else state
        case Running():
            return "training" if fleet.formed else "forming"
        case Stopping():
            return "morphing"
        case Finishing():
            return "finishing"
        case Ended(exit_code=exit_code):
            return f"ended with exit code {exit_code}"
