"""An adapter of PEFT over a base from disk: trained on two stages, exported, and read back by PEFT."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.models import Tokens, adamw, tiny_llama
from varuna.core.errors import UsageError
from varuna.job.options import Weights
from varuna.trainer import Trainer

peft: Any = pytest.importorskip("peft", reason="make install brings it", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted() -> nn.Module:
    """Adapters in the attention, and a head that is trained whole."""
    settings = {
        "r": 2,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["lm_head"],
        "task_type": "CAUSAL_LM",
    }
    model: nn.Module = peft.get_peft_model(tiny_llama(), peft.LoraConfig(**settings))
    return model


@pytest.mark.nightly
def test_peft_reads_back_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    base, out = tmp_path / "base", tmp_path / "adapter"
    torch.manual_seed(5)
    tiny_llama().save_pretrained(base)  # type: ignore[operator]
    data = Tokens(size=8)
    trainer = Trainer(
        adapted, data, partial(adamw), 8, weights=Weights(base, missing="initialise"), micro_batch=8, device="cpu"
    )
    for _ in trainer.steps(3):
        pass
    with pytest.raises(UsageError, match="Name a folder"):
        trainer.export(tmp_path / "adapter.safetensors")
    trainer.export(out)
    assert sorted(file.name for file in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (out / "adapter_model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size
    model = peft.PeftModel.from_pretrained(type(tiny_llama()).from_pretrained(base), str(out)).eval()  # type: ignore[attr-defined]
    batch = {key: torch.stack([data[index][key] for index in range(8)]) for key in data[0]}
    with torch.no_grad():
        loss = float(model(**batch).loss)
        untrained = float(type(tiny_llama()).from_pretrained(base)(**batch).loss)  # type: ignore[attr-defined]
    assert loss == pytest.approx(trainer.evaluate(data).loss, rel=1e-5)
    assert loss != pytest.approx(untrained, rel=1e-3)


class Layers(nn.Module):
    """The last layer has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return found


def with_frozen_halves(base: nn.Module) -> nn.Module:
    """LoRA-FA, whose down projections stay as they were drawn, and a layer that is frozen whole."""
    model: nn.Module = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["first", "second", "unused"]))
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "first.lora_B" in name:
            parameter.requires_grad_(False).normal_()
    return model


def with_shared_projections(base: nn.Module) -> nn.Module:
    model: nn.Module = peft.get_peft_model(base, peft.VeraConfig(r=2, target_modules=["first", "second"]))
    return model


@pytest.mark.parametrize(
    ("adapt", "is_built"), [(with_frozen_halves, True), (with_frozen_halves, False), (with_shared_projections, True)]
)
def test_what_an_adapter_does_not_train_is_exported_with_it(
    adapt: Callable[[nn.Module], nn.Module], is_built: bool, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            built: nn.Module = adapt(Layers())
        return built

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.5)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        found: torch.Tensor = (output - batch["x"].roll(1, 1)).pow(2).mean()
        return found

    data = [{"x": row} for row in torch.randn(8, 4, generator=torch.Generator().manual_seed(1))]
    model = build()
    trainer = Trainer(model if is_built else build, data, sgd, 8, loss=loss, micro_batch=8, device="cpu")
    for _ in trainer.steps(3):
        pass
    trainer.export(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        base = Layers()
        read = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    batch = {"x": torch.stack([row["x"] for row in data])}
    assert float(loss(read(batch["x"]), batch)) == pytest.approx(trainer.evaluate(data).loss, rel=1e-5)
    if is_built:
        saved, wanted = (peft.get_peft_model_state_dict(each) for each in (read, model))
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
