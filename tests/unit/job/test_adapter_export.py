"""An adapter of PEFT over a base from disk: trained on two stages, exported, and read back by PEFT."""

import sys
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
