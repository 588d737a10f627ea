"""Optimizers and averages that people use, exact against a plain loop in every plan and across a change of plan."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.engine.ranks import Setup, SmallLanguage, Tokens, adamw, reference, single_threaded, worst
from tests.unit.engine.worker.test_resuming import train
from varuna.checkpoint.io.export import export_checkpoint
from varuna.checkpoint.manifest import read_manifest
from varuna.core.errors import UsageError
from varuna.core.model import Memory
from varuna.data import sample_index
from varuna.partition.optimizer_needs import try_update
from varuna.partition.optimizers import AVERAGE, AveragingFactory
from varuna.store.opening import open_store
from varuna.testing import fail_at, run
from varuna.trainer import Trainer


def split(named: Any) -> tuple[list[Any], list[Any]]:
    """Matrices of the layers, and all the rest: on a stage either may be empty."""
    matrices = [p for name, p in named if "layers" in name and p.dim() == 2]
    return matrices, [p for name, p in named if not ("layers" in name and p.dim() == 2)]


def muon_and_adamw(named: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = split(named)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=1e-2))
    if rest:
        found.append(torch.optim.AdamW(rest, lr=1e-3))
    return found


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for _, p in named], lr=1e-2)


def hugging_faces_adafactor(named: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    found: torch.optim.Optimizer = Adafactor(  # type: ignore[no-untyped-call]
        [p for _, p in named], lr=1e-2, relative_step=False, scale_parameter=True
    )
    return found


@pytest.mark.parametrize("optimizer", [muon_and_adamw, adafactor, hugging_faces_adafactor])
def test_every_plan_trains_as_a_plain_loop(optimizer: Callable[[Any], Any], tmp_path: Path) -> None:
    place = str(tmp_path)
    with single_threaded():
        expected = reference(Setup(optimizer=optimizer), 4)
        for stages, replicas in ((1, 1), (2, 1), (2, 2)):
            assert worst(Setup(optimizer=optimizer).losses(stages, replicas, 4), expected) < 1e-5
        first = train(Setup(optimizer=optimizer, directory=place), 2, 2, 2, place)
        assert worst([*first, *train(Setup(optimizer=optimizer, directory=place), 3, 1, 4, place)], expected) < 1e-5


def plain_average(steps: int, decay: float, factory: Any = adamw) -> torch.optim.swa_utils.AveragedModel:
    """torch's own, in a plain loop."""
    setup = Setup()
    torch.manual_seed(setup.seed)
    model = SmallLanguage()
    built = factory(list(model.named_parameters()))
    optimizers = built if isinstance(built, list) else [built]
    multiply = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multiply)
    for step in range(steps):
        places = range(step * setup.global_batch, (step + 1) * setup.global_batch)
        samples = [setup.dataset[sample_index(place, size=len(setup.dataset), seed=setup.seed)] for place in places]
        model.zero_grad()
        model(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average.update_parameters(model)
    return average


def averages_of(setup: Setup) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for session in setup.finished:
        assert session.current is not None
        stage = session.current.stage
        found.update({name: stage.optimizer.state_of(name)[0][AVERAGE] for name in stage.parameters})
    return found


def test_averages_are_torchs_own_in_every_plan_and_after_another_one(tmp_path: Path) -> None:
    place, optimizer = str(tmp_path), AveragingFactory(adamw, 0.8)
    with single_threaded():
        expected = dict(plain_average(4, 0.8).module.named_parameters())
        for stages, replicas in ((1, 1), (2, 2)):
            setup = Setup(optimizer=optimizer)
            setup.run(stages, replicas, 4)
            torch.testing.assert_close(averages_of(setup), {name: value.detach() for name, value in expected.items()})
        train(Setup(optimizer=optimizer, directory=place), 2, 2, 2, place)
        setup = Setup(optimizer=optimizer, directory=place)
        train(setup, 3, 1, 4, place)
        torch.testing.assert_close(averages_of(setup), {name: value.detach() for name, value in expected.items()})
    store, exported = open_store(place), tmp_path / "exported"
    export_checkpoint(store, read_manifest(store, 4), exported, average=True)
    found = load_file(exported / "model.safetensors")
    torch.testing.assert_close(found, {name: value.detach() for name, value in expected.items()})


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


def test_a_script_evaluates_and_exports_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def trainer(**more: Any) -> Trainer:
        return Trainer(SmallLanguage, Tokens(), adamw, 8, clip_grad_norm=1.0, micro_batch=2, device="cpu", **more)

    for wrong in (1.0, -0.1):
        with pytest.raises(UsageError, match=f"ema={wrong} must be at least 0 and below 1"):
            trainer(ema=wrong)
    with pytest.raises(UsageError, match="leave one out"):
        trainer(ema=0.8, memory=Memory(shard_optimizer=True))
    with pytest.raises(UsageError, match="ema=True needs an average"):
        trainer().evaluate(Tokens(), ema=True)
    job, data = trainer(ema=0.8), Tokens(size=6)
    for _ in job.steps(4):
        pass
    job.export(tmp_path / "average.safetensors", ema=True)
    average = plain_average(4, 0.8).module.eval()
    found = load_file(tmp_path / "average.safetensors")
    torch.testing.assert_close(found, {name: value.detach() for name, value in average.named_parameters()})
    samples = [data[index] for index in range(6)]
    with torch.no_grad():
        loss = float(average(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}))
    assert job.evaluate(data, ema=True).loss == pytest.approx(loss, rel=1e-6)
    assert job.evaluate(data).loss != pytest.approx(loss, rel=1e-4)


def test_two_optimizers_and_averages_survive_morphs_that_change_p_and_d(tmp_path: Path) -> None:
    """2x2 loses a worker in a backward and one in its update: 3x1, then 1x2, with the state of those who live."""

    def script() -> None:
        job = Trainer(SmallLanguage, Tokens(), muon_and_adamw, 8, clip_grad_norm=1.0, micro_batch=2, ema=0.8)
        for _ in job.steps(6):
            pass
        job.export(tmp_path / "average.safetensors", ema=True)
        job.export(tmp_path / "newest.safetensors")

    faults = [fail_at(rank=1, step=2, phase="B"), fail_at(rank=2, step=4, phase="apply")]
    lived = run(script, workers=4, stages={4: 2, 3: 3, 2: 1}, faults=faults)
    assert lived.plans == ("2x2", "3x1", "1x2")
    with single_threaded():
        expected = [loss for loss, _ in reference(Setup(optimizer=muon_and_adamw), 6)]
        average = plain_average(6, 0.8, muon_and_adamw).module
    assert lived.losses == pytest.approx(expected, rel=1e-5)
    found = load_file(tmp_path / "average.safetensors")
    torch.testing.assert_close(found, {name: value.detach() for name, value in average.named_parameters()})
    newest = load_file(tmp_path / "newest.safetensors")
    assert (newest["layers.0.weight"] - found["layers.0.weight"]).abs().max() > 1e-3  # the average lags behind
