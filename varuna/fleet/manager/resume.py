"""The fleet as a manager must see it that starts again: what its journal says, until the agents say more. Pure.

The newest generation is taken to run, and all its members to live: nobody expires before one lease has passed. Agents
reconnect within it and repeat what counts (see ``reconcile``). If a verdict was on its way, or nobody was told of the
newest generation yet, that shows in what they repeat, and the state machine goes on from there. Numbers of
generations go on from the last one that was written down, and each is written down before anyone hears of it.
"""

from dataclasses import replace
from typing import NamedTuple

from varuna.fleet.manager.reconcile import node_of
from varuna.fleet.run_folder.journal import Past
from varuna.fleet.state.causes import EndCause, Ending
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.contacts import Contacts, NodeContact
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.generations import Generations
from varuna.fleet.state.loss_rate import LossRate
from varuna.fleet.state.machines import Departure, Machines
from varuna.fleet.state.persistent import PersistentMap
from varuna.fleet.state.phases import Running
from varuna.fleet.state.recorded import RecordedSteps
from varuna.fleet.state.requests import MORPH_REQUESTED, Requests
from varuna.fleet.state.run_events import (
    Answered,
    Asked,
    CheckpointCommitted,
    GenerationRecord,
    GenerationStarted,
    Morphed,
    StepRecorded,
    TrainingEnded,
    WorkerLost,
)
from varuna.fleet.state.script import Script
from varuna.fleet.state.speeds import Speeds
from varuna.fleet.state.stutter import Straggler
from varuna.fleet.state.worker import Worker, WorkerStatus
from varuna.fleet.state.workers import Workers


def lost_workers(past: Past) -> set[str]:
    """Workers that the run has given up; they may not come back."""
    return {event.worker for event in past.events if isinstance(event, WorkerLost)}


class KnownCheckpoint(NamedTuple):
    """The newest checkpoint that a run has committed."""

    directory: str
    step: int


def known_checkpoint(past: Past) -> KnownCheckpoint | None:
    """Return the checkpoint that a run which did not end must find again; None: there is none."""
    step: int | None = None
    for event in past.events:
        match event:
            case CheckpointCommitted():
                step = event.step
            case TrainingEnded():
                step = None
            case _:
                pass
    directory = past.job.checkpoint_dir if past.job is not None else None
    return None if step is None or directory is None else KnownCheckpoint(directory, step)


def resume(past: Past, config: FleetConfig, now_s: float) -> Fleet:
    """The fleet of a run that did not end."""
    fleet = _with_promises(Fleet.empty(config, now_s), past)
    history: list[GenerationRecord] = []
    trainings: list[TrainingEnded] = []
    began, recorded_step, saved_step = 0, -1, 0
    for event in past.events:
        match event:
            case GenerationStarted(record=record):
                history.append(record)
                recorded_step = record.first_step - 1
            case Morphed(record=record):
                history[record.generation - began] = record
            case CheckpointCommitted(step=step):
                saved_step = step
            case StepRecorded(step=step, generation=generation):
                recorded_step = step
                if history[generation - began].recovery_seconds is None:
                    history[generation - began] = history[generation - began].model_copy(
                        update={"recovery_seconds": 0.0}
                    )
            case TrainingEnded():
                trainings.append(event)
                began, recorded_step, saved_step = began + len(history), -1, 0
                history.clear()
            case _:
                pass
    recorded = RecordedSteps(lineage=began)
    script = Script(version=past.version, trainings=tuple(trainings))
    fleet = replace(fleet, script=script, generations=Generations(began=began), recorded=recorded)
    if not history or past.job is None:
        return fleet
    lineage = max((record.generation for record in history if record.rollback), default=began)
    newest = past.vote
    counts = newest is not None and newest.step == recorded_step and newest.generation >= lineage
    lost, seen_per_hour = lost_workers(past), history[-1].losses_per_hour
    workers = [_member(name, now_s, history[-1]) for name in history[-1].members if name not in lost]
    nodes = {worker.node: NodeContact(heard_s=now_s) for worker in workers}
    speeds = _speeds(history[-1])
    return replace(
        fleet,
        speeds=Speeds(
            slow={name: Straggler(1 / speed, now_s + fleet.config.probation_s, speed) for name, speed in speeds.items()}
        ),
        phase=Running(began_s=now_s),
        workers=Workers(workers),
        contacts=Contacts(ticked_s=now_s, heard_s=now_s, listened_s=now_s, nodes=PersistentMap(nodes)),
        script=replace(script, job=past.job),
        generations=Generations(
            began=began,
            history=tuple(history),
            micro_batch=history[-1].plan.micro_batch,
            planned_for=history[-1].plan.classes,  # others may have been left out as slow, or about to leave
            # A member that was lost before its generation ended: the morph is still to come.
            causes=tuple(EndCause(Ending.LOST, f"worker {name} was lost") for name in history[-1].grid if name in lost),
            broke_s=now_s,
        ),
        loss_rate=LossRate(began_s=now_s, prior_per_hour=seen_per_hour, planned_per_hour=seen_per_hour),
        recorded=RecordedSteps(
            step=recorded_step,
            at_s=now_s,
            saved_step=saved_step,
            lineage=lineage,
            votes={newest.step: newest} if newest is not None and counts else {},
        ),
    )


def _speeds(record: GenerationRecord) -> dict[str, float]:
    """Speeds of workers that were slow when a generation began, as far as its plan says."""
    plan = record.plan
    found = {name: plan.speed_of(plan.place_of(rank).replica) for rank, name in enumerate(record.grid)}
    return {name: speed for name, speed in found.items() if speed < 1}


def _with_promises(fleet: Fleet, past: Past) -> Fleet:
    """Add promises to people that are not kept yet."""
    finish: str | None = None
    morph: str | None = None
    drained = dict[str, Departure]()
    for event in past.events:
        match event:
            case Asked(what="stop", reason=reason):
                finish = reason
            case Asked(what="morph"):
                morph = MORPH_REQUESTED
            case Asked(what="drain", node=node):
                drained[node] = Departure(deadline_s=float("inf"), reason="drained")
            case Answered(what="drain", node=node):
                drained.pop(node, None)
            case Answered(what="morph") | GenerationStarted():
                morph = None
            case _:
                pass
    return replace(fleet, requests=Requests(morph=morph, finish=finish), machines=Machines(departing=drained))


def _member(name: str, now_s: float, record: GenerationRecord) -> Worker:
    return Worker(
        name=name,
        node=node_of(name),
        replacement=False,
        standing=WorkerStatus.JOINED,
        joined_s=now_s,
        seen_s=now_s,
        seated=record.has_seat(name),
    )
