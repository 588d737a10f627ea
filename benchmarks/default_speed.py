"""Examples per second of a default run at P = D = 1, over those of a plain loop with its best micro-batch size.

Five models in sizes for CPUs. Rounds alternate, each in fresh processes, so that a noisy machine disturbs both alike. A
first run, which measures micro-batch sizes, does not count; what it remembers is used by those that do. The plain loop
accumulates over micro-batches of every power of two up to the global batch, and its fastest size counts.

    python benchmarks/default_speed.py [--models gpt2 bert] [--rounds 3] [--seconds 10]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

GLOBAL_BATCH = 32
LENGTH = 64
WORDS = 512
WARM_STEPS = 3


def transformer(width: int, heads: int, inner: int) -> dict[str, Any]:
    """Sizes of 4 layers."""
    return {"hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": heads, "intermediate_size": inner}


def gpt2() -> Any:
    """4 layers of width 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=4, n_embd=256, n_head=4, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
        )
    )


def bert() -> Any:
    """4 layers of width 256."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **transformer(256, 4, 1024)))


def vit() -> Any:
    """4 layers of width 192, images of 32 x 32."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, **transformer(192, 3, 768)))


def resnet() -> Any:
    """Four stages of basic blocks; normalised over channels in groups, so that any micro-batch size will do."""
    from torch import nn
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], layer_type="basic")
    )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(8, child.num_features))
    return model


def lora_llama() -> Any:
    """4 layers of width 256, frozen, with trained pairs of low rank beside the projections of queries and values."""
    from torch import Tensor, nn
    from transformers import LlamaConfig, LlamaForCausalLM

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, rank = base, 8
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            added: Tensor = self.base(x) + self.up(self.down(x))
            return added

    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **transformer(256, 4, 688)))
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = map(Lora, (layer.self_attn.q_proj, layer.self_attn.v_proj))
    return model


MODELS = {"gpt2": gpt2, "bert": bert, "vit": vit, "resnet": resnet, "lora_llama": lora_llama}


class Samples:
    """Random tokens or pixels, a function of the index; kept, so that reading costs neither side anything."""

    def __init__(self, model: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        if model in ("vit", "resnet"):
            size = 32 if model == "vit" else 64
            self.columns = {
                "pixel_values": torch.randn(256, 3, size, size, generator=generator),
                "labels": torch.randint(0, 2, (256,), generator=generator),
            }
        else:
            tokens = torch.randint(0, WORDS, (256, LENGTH), generator=generator)
            self.columns = {"input_ids": tokens, "labels": tokens}

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def adamw(parameters: Any) -> Any:
    """The same on both sides."""
    import torch

    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-4)


def plain(name: str, seconds: float) -> dict[str, float]:
    """Examples per second of an ordinary loop, by micro-batch size."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data, found = MODELS[name]().train(), Samples(name), {}
    optimizer = adamw(model.parameters())
    sizes = [2**power for power in range(GLOBAL_BATCH.bit_length())]
    for m in sizes:
        times: list[float] = []
        until_s = time.monotonic() + seconds / len(sizes)
        while len(times) <= WARM_STEPS or time.monotonic() < until_s:
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            for first in range(0, GLOBAL_BATCH, m):
                samples = [data[(len(times) * GLOBAL_BATCH + first + i) % len(data)] for i in range(m)]
                batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
                (model(**batch).loss * m / GLOBAL_BATCH).backward()
            optimizer.step()
            times.append(time.perf_counter() - begin_s)
        found[str(m)] = GLOBAL_BATCH / statistics.median(times[1:])
    return found


def ours(name: str, seconds: float) -> dict[str, float]:
    """Examples per second of a default run, by the micro-batch size that it chose."""
    import varuna

    trainer = varuna.Trainer(
        MODELS[name], Samples(name), lambda named: adamw(p for _, p in named), global_batch=GLOBAL_BATCH
    )
    times, last_s, until_s, m = [], 0.0, 0.0, 0
    for step in trainer.steps(100_000):
        if step.index == 0:
            until_s = time.monotonic() + seconds
        else:
            times.append(time.perf_counter() - last_s)
        last_s, m = time.perf_counter(), step.plan.micro_batch
        if len(times) > WARM_STEPS and time.monotonic() > until_s:
            break
    return {str(m): GLOBAL_BATCH / statistics.median(times[1:])}


SIDES = {"plain": plain, "ours": ours}


def measure(side: str, model: str, seconds: float, cache: str) -> tuple[int, float]:
    """Run one side in a fresh process: its best micro-batch size, and examples per second with it."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--side",
        side,
        "--models",
        model,
        "--seconds",
        str(seconds),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
    environment.pop("VARUNA_CALIBRATION", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    if not lines:
        raise SystemExit(f"{side} of {model} failed:\n{done.stderr[-2000:]}")
    told: dict[str, float] = json.loads(lines[-1].removeprefix("told "))
    m = max(told, key=lambda size: told[size])
    return int(m), told[m]


def main() -> None:
    """Alternate the sides and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print("told", json.dumps(SIDES[options.side](options.models[0], options.seconds)), flush=True)
        return
    result = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as cache:
            measure("ours", model, 0.0, cache)
            ratios = []
            for _ in range(options.rounds):
                (own_m, own), (best_m, best) = (
                    measure(side, model, options.seconds, cache) for side in ("ours", "plain")
                )
                ratios.append(own / best)
                print(f"{model}: {own:.0f} examples/s with m = {own_m}; plain {best:.0f} with m = {best_m}", flush=True)
        result[model] = {"ratio": round(statistics.median(ratios), 3), "rounds": [round(each, 3) for each in ratios]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
