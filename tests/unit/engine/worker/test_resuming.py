"""A run that stops and resumes gives the losses of one that never stopped, bit for bit, whatever it resumes with."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.ranks import Dropping, Setup, run_all, single_threaded
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.engine.base.transport import local_store
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.membership.static import StaticMembership, World
from varuna.planner.choose import plan_run
from varuna.store.opening import open_store

Losses = list[tuple[float, float]]


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def setup(directory: str | None = None) -> Setup:
    return Setup(build=Dropping, scheduler=decaying, directory=directory)


def train(job: Setup, stages: int, replicas: int, steps: int, place: str | None = None) -> Losses:
    """Losses and norms of the steps that were run, on one thread per rank, with a checkpoint at the end."""

    def plan(facts: JobFacts, workers: int, micro_batch: int | None) -> Plan:
        return plan_run(facts, workers=workers, stages=stages, micro_batch=micro_batch)

    meeting, size, found = local_store(), stages * replicas, list[Any]()
    sessions = []
    for rank in range(size):
        solo = StaticMembership(World(rank, size, meeting, "127.0.0.1", 0), plan)
        saver = None if place is None else Snapshotter(open_store(place), 100, solo.saved, smallest_part_bytes=256)
        sessions.append(job.session(solo, meeting, steps, saver=saver, rank=rank))
    run_all([partial(_run, sessions[rank], found, rank) for rank in range(size)])
    job.finished = sessions
    return [(each.totals.loss, each.totals.grad_norm) for each in found]


def _run(session: Any, found: list[Any], rank: int) -> None:
    for committed in session.steps():
        if rank == 0:
            found.append(committed)


@pytest.fixture(scope="module")
def undisturbed() -> Losses:
    with single_threaded():
        return train(setup(), 2, 2, 4)


def test_the_same_plan_continues_bit_for_bit(undisturbed: Losses, request: pytest.FixtureRequest) -> None:
    place = f"memory://{request.node.name}"
    with single_threaded():
        first = train(setup(place), 2, 2, 2, place)
        second = train(setup(place), 2, 2, 4, place)
    assert first + second == undisturbed


def test_another_plan_continues_within_rounding(undisturbed: Losses, tmp_path: Path) -> None:
    place = str(tmp_path)
    with single_threaded():
        train(setup(place), 1, 2, 1, place)
        train(setup(place), 3, 1, 2, place)
        last = train(setup(place), 2, 2, 4, place)
    assert [each for step in last for each in step] == pytest.approx(
        [each for step in undisturbed[2:] for each in step], rel=1e-5
    )
