"""A run that stops and resumes gives the losses of one that never stopped, bit for bit, whatever it resumes with."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, adamw
from tests.unit.engine.ranks import Setup
from tests.unit.engine.test_adapters import Adapted
from varuna.checkpoint.io.export import export_checkpoint
from varuna.checkpoint.io.frozen import FrozenParameters
from varuna.checkpoint.manifest import read_manifest
from varuna.core.devices import WorkerGroups
from varuna.core.errors import CheckpointError, UsageError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.engine.base.transport import local_store
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.job.options import Checkpoints
from varuna.membership.static import StaticMembership, World
from varuna.planner.choose import plan_run
from varuna.store.opening import open_store
from varuna.testing.threads import run_all
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_captures")

Losses = list[tuple[float, float]]


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def setup(directory: str | None = None) -> Setup:
    return Setup(build=Dropping, scheduler=decaying, directory=directory)


def train(
    job: Setup,
    stages: int,
    replicas: int,
    steps: int,
    place: str | None = None,
    left_out: FrozenParameters | None = None,
) -> Losses:
    """Losses and norms of the steps that were run, on one thread per rank, with a checkpoint at the end."""

    def plan(facts: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(facts, workers=workers, stages=stages, micro_batch=micro_batch)

    meeting, size, found = local_store(), stages * replicas, list[Any]()
    sessions = []
    for rank in range(size):
        solo = StaticMembership(World(rank, size, meeting, "127.0.0.1", 0), plan)
        if place is None:
            saver = None
        else:
            saver = Snapshotter(open_store(place), 100, solo.saved, smallest_part_bytes=256, left_out=left_out)
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
    return train(setup(), 2, 2, 4)


def test_the_same_plan_continues_bit_for_bit(undisturbed: Losses, request: pytest.FixtureRequest) -> None:
    place = f"memory://{request.node.name}"
    first = train(setup(place), 2, 2, 2, place)
    second = train(setup(place), 2, 2, 4, place)
    assert first + second == undisturbed


def test_another_plan_continues_within_rounding(undisturbed: Losses, tmp_path: Path) -> None:
    place = str(tmp_path)
    train(setup(place), 1, 2, 1, place)
    train(setup(place), 3, 1, 2, place)
    last = train(setup(place), 2, 2, 4, place)
    assert [each for step in last for each in step] == pytest.approx(
        [each for step in undisturbed[2:] for each in step], rel=1e-5
    )


@pytest.mark.nightly
def test_frozen_parameters_are_left_out_and_come_from_where_the_run_began(tmp_path: Path) -> None:
    """Embedding and head are tied, frozen and in bf16; the first section trains nothing."""
    place = str(tmp_path / "saved")

    def adapted(directory: str | None = None, seed: int = 0) -> Setup:
        return Setup(build=Adapted, directory=directory, seed=seed)

    job = adapted(place)
    left_out = FrozenParameters(job.model.trainable)
    undisturbed = train(adapted(), 2, 2, 4)
    first = train(job, 2, 2, 2, place, left_out)
    second = train(adapted(place), 2, 2, 3, place, left_out)
    third = train(adapted(place), 1, 1, 4, place)
    assert first + second == undisturbed[:3]
    assert third[0] == pytest.approx(undisturbed[3], rel=1e-5)
    saved = {name: _saved(place, step) for step, name in ((2, "adapters"), (4, "all"))}
    assert saved["adapters"] & job.model.shapes.keys() == job.model.trainable
    assert saved["all"] >= job.model.shapes.keys()
    with pytest.raises(CheckpointError, match=r"leaves out frozen parameters, .* trainer\.export\(folder\)"):
        export_checkpoint(open_store(place), read_manifest(open_store(place), 3), tmp_path / "exported")


def _saved(place: str, step: int) -> set[str]:
    manifest = read_manifest(open_store(place), step)
    names = {piece.name for shard in manifest.shards for piece in shard.pieces}
    return {name.removeprefix("parameters/") for name in names if name.startswith("parameters/")}


@pytest.mark.nightly
def test_another_base_is_refused_by_name(tmp_path: Path) -> None:
    class Rescaled(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.embed.weight.data *= 2

    place = str(tmp_path)
    job = Setup(build=Adapted, directory=place)
    train(job, 1, 1, 1, place, FrozenParameters(job.model.trainable))
    with pytest.raises(CheckpointError, match=r"the frozen ones .* are others .*: embed\.weight\. Begin from"):
        train(Setup(build=Rescaled, directory=place), 1, 1, 2, place)


def test_a_script_asks_for_a_checkpoint_and_for_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def trainer(**more: Any) -> Trainer:
        return Trainer(SmallLanguage, Tokens(size=10), adamw, 4, device="cpu", **more)

    with pytest.raises(UsageError, match="needs a place"):
        trainer().checkpoint()
    job = trainer(checkpoints=Checkpoints(tmp_path, every=100, keep_last=10))
    with pytest.raises(UsageError, match="inside the loop"):
        job.checkpoint()
    for wrong in ({}, {"n": 1, "epochs": 1}):
        with pytest.raises(UsageError, match=r"one of the two: trainer\.steps\(1000\) or"):
            next(job.steps(**wrong))
    epochs = []
    for step in job.steps(epochs=1.5):
        epochs.append(step.epoch)
        if step.index == 0:
            job.checkpoint()
    assert epochs == [0.4, 0.8, 1.2, 1.6]
    assert sorted(folder.name for folder in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]
