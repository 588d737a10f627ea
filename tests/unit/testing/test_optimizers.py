"""Averages of parameters, and several optimizers: exact against a plain loop, across changes of plan too."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.engine.optimizers import muon_and_adamw
from tests.unit.engine.plain import Curve, train_plainly
from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.testing.test_resuming import train
from varuna.checkpoint.io.export import export_checkpoint
from varuna.checkpoint.manifest import read_manifest
from varuna.core.errors import UsageError
from varuna.core.model import Memory
from varuna.partition.optimizer_needs import try_update
from varuna.partition.optimizers import AVERAGE, AveragingFactory
from varuna.store.opening import open_store
from varuna.testing import fail_at, run
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_captures")

DECAY = 0.8


@cache
def plain_average(steps: int, factory: Any = adamw) -> tuple[nn.Module, Curve]:
    """Return torch's own, of a plain loop, and the losses of that loop."""
    multiply = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)  # type: ignore[no-untyped-call]
    averages: list[torch.optim.swa_utils.AveragedModel] = []

    def observe(model: nn.Module, _loss: float) -> None:
        if not averages:
            averages.append(torch.optim.swa_utils.AveragedModel(SmallLanguage(), multi_avg_fn=multiply))
        averages[0].update_parameters(model)

    curve = train_plainly(Setup(optimizer=factory), steps, observe=observe).curve
    return averages[0].module, curve


def values_of(average: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in average.named_parameters()}


def averages_of(setup: Setup) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for session in setup.finished:
        assert session.current is not None
        stage = session.current.stage
        found.update({name: stage.optimizer.state_of(name)[0][AVERAGE] for name in stage.parameters})
    return found


def test_averages_are_torchs_own_in_every_plan_and_after_another_one(tmp_path: Path) -> None:
    place, optimizer = str(tmp_path), AveragingFactory(adamw, DECAY)
    expected = values_of(plain_average(4)[0])
    for stages, replicas in by_depth((), ((1, 1), (2, 2))):
        setup = Setup(optimizer=optimizer)
        setup.run(stages, replicas, 4)
        torch.testing.assert_close(averages_of(setup), expected)
    train(Setup(optimizer=optimizer, directory=place), 2, 2, 2, place)
    setup = Setup(optimizer=optimizer, directory=place)
    train(setup, 3, 1, 4, place)
    torch.testing.assert_close(averages_of(setup), expected)
    store, exported = open_store(place), tmp_path / "exported"
    export_checkpoint(store, read_manifest(store, 4), exported, average=True)
    found = load_file(exported / "model.safetensors")
    torch.testing.assert_close(found, expected)


def test_an_average_that_begins_with_the_first_weights_is_timms(tmp_path: Path) -> None:
    """``ModelEmaV3``: a copy of the model before step 0, moved by ``lerp`` after each step; here 2x1, then 1x2."""
    setup = Setup(optimizer=AveragingFactory(adamw, 0.8, from_start=True), directory=str(tmp_path))
    weights = [dict(setup.beginning.parameters(setup.model.shapes))]
    with single_threaded():
        for steps in range(1, 5):
            alone = Setup()
            alone.run(1, 1, steps)
            weights.append(alone.parameters())
        expected = {name: value.clone() for name, value in weights[0].items()}
        for newest in weights[1:]:
            for name, value in expected.items():
                value.lerp_(newest[name], 1 - 0.8)
        train(setup, 2, 1, 2, str(tmp_path))
        train(setup, 1, 2, 4, str(tmp_path))
    torch.testing.assert_close(averages_of(setup), expected)


def test_the_trial_of_an_optimizer_with_averages_is_remembered() -> None:
    tried = []

    def factory(named: Any) -> torch.optim.Optimizer:
        tried.append(len(named))
        return adamw(named)

    for decay in (0.8, 0.8, 0.9):  # an average takes as much memory, whatever its decay
        needs = try_update(AveragingFactory(factory, decay), {"w": (4, 4)}, [["w"]], on_cpu=True)
        assert needs.state_bytes["w"] == 3 * 64 + 4
    assert tried == [1]


@pytest.mark.nightly
def test_a_script_evaluates_and_exports_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def trainer(**more: Any) -> Trainer:
        return Trainer(SmallLanguage, Tokens(), adamw, 8, clip_grad_norm=1.0, micro_batch=2, device="cpu", **more)

    for wrong in (1.0, -0.1):
        with pytest.raises(UsageError, match=f"ema={wrong} must be at least 0 and below 1"):
            trainer(ema=wrong)
    with pytest.raises(UsageError, match="leave one out"):
        trainer(ema=DECAY, memory=Memory(shard_optimizer=True))
    with pytest.raises(UsageError, match="ema=True needs an average"):
        trainer().evaluate(Tokens(), ema=True)
    job, data = trainer(ema=DECAY, ema_from="first step"), Tokens(size=6)
    for _ in job.steps(4):
        pass
    job.export(tmp_path / "average.safetensors", ema=True)
    average = plain_average(4)[0].eval()
    torch.testing.assert_close(load_file(tmp_path / "average.safetensors"), values_of(average))
    samples = [data[index] for index in range(6)]
    with torch.no_grad():
        loss = float(average(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}))
    assert job.evaluate(data, ema=True).loss == pytest.approx(loss, rel=1e-6)
    assert job.evaluate(data).loss != pytest.approx(loss, rel=1e-4)


@pytest.mark.nightly
def test_two_optimizers_and_averages_survive_morphs_that_change_p_and_d(tmp_path: Path) -> None:
    """2x2 loses a worker in a backward and one in its update: 3x1, then 1x2, with the state of those who live."""

    def script() -> None:
        options: dict[str, Any] = {"clip_grad_norm": 1.0, "micro_batch": 2, "ema": DECAY, "ema_from": "first step"}
        job = Trainer(SmallLanguage, Tokens(), muon_and_adamw, 8, **options)
        for _ in job.steps(6):
            pass
        job.export(tmp_path / "average.safetensors", ema=True)
        job.export(tmp_path / "newest.safetensors")

    faults = [fail_at(rank=1, step=2, phase="B"), fail_at(rank=2, step=4, phase="apply")]
    lived = run(script, workers=4, stages={4: 2, 3: 3, 2: 1}, faults=faults)
    assert lived.plans == ("2x2", "3x1", "1x2")
    average, curve = plain_average(6, muon_and_adamw)
    assert lived.losses == pytest.approx([loss for loss, _ in curve], rel=1e-5)
    found = load_file(tmp_path / "average.safetensors")
    torch.testing.assert_close(found, values_of(average))
    newest = load_file(tmp_path / "newest.safetensors")
    assert (newest["layers.0.weight"] - found["layers.0.weight"]).abs().max() > 1e-3  # the average lags behind
