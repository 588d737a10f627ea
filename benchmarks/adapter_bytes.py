"""Bytes that a morph sends and a checkpoint holds: all parameters trained, and adapters over a frozen base.

    python benchmarks/adapter_bytes.py

A Llama of 2.6 million parameters, four workers as threads. A worker is lost, and 2 x 2 becomes 3 x 1: what workers
then send each other is counted where it is handed to the network, and files where they lie.
"""

import shutil
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import varuna
from varuna.engine.worker import state_transfer
from varuna.testing import fail_at, run

_network: Any = state_transfer
LENGTH, WORDS, STEPS = 16, 2048, 4


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def base() -> Any:
    """The model before adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "vocab_size": WORDS, "num_hidden_layers": 4, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0))


def adapted() -> Any:
    """With adapters of rank 8 at queries and values."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def adamw(named: Any) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)


class Sent:
    """Counts what workers hand to the network when a generation begins."""

    def __init__(self) -> None:
        self.size_bytes, self._lock, self._pack = 0, threading.Lock(), _network.to_bytes

    def __enter__(self) -> "Sent":
        _network.to_bytes = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        _network.to_bytes = self._pack

    def _counted(self, state: Any) -> bytes:
        packed: bytes = self._pack(state)
        with self._lock:
            self.size_bytes += len(packed)
        return packed


def measured(job: Any, place: Path, *, frozen: bool) -> tuple[float, float]:
    """MB that the morph sent, and MB of the newest checkpoint."""

    def script() -> None:
        saved = varuna.Checkpoints(place, every=STEPS, keep_last=1, frozen=frozen)
        model, optimizer, options = job()
        made = varuna.Trainer(model, Tokens(), optimizer, 8, micro_batch=2, device="cpu", checkpoints=saved, **options)
        for _ in made.steps(STEPS):
            pass

    with Sent() as sent:
        lived = run(script, workers=4, stages={4: 2, 3: 3}, faults=[fail_at(rank=1, step=2)], bound_s=400)
    assert lived.plans == ("2x2", "3x1"), lived.plans
    size_bytes = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return sent.size_bytes / 1e6, size_bytes / 1e6


def main() -> None:
    """Measure and print."""
    folder = Path(tempfile.mkdtemp(prefix="varuna-adapters-"))
    torch.manual_seed(0)
    base().save_pretrained(folder / "base")
    weights = varuna.Weights(folder / "base", missing="initialise")
    building = threading.Lock()

    def built() -> Any:
        with building:  # torch's generator belongs to all threads
            torch.manual_seed(0)
            model = adapted()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), {}

    jobs = {
        "all parameters": (lambda: (base, adamw, {"weights": folder / "base"}), True),
        "adapters, the base from a constructor": (lambda: (adapted, adamw, {}), True),
        "adapters, `weights=`, `frozen=False`": (lambda: (adapted, adamw, {"weights": weights}), False),
        "adapters, a model that is built, `frozen=False`": (built, False),
    }
    print("| run | a morph sends, MB | a checkpoint holds, MB |\n|---|---|---|")
    for number, (name, (job, frozen)) in enumerate(jobs.items()):
        sent, held = partial(measured, job, folder / str(number), frozen=frozen)()
        print(f"| {name} | {sent:.3f} | {held:.2f} |", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
