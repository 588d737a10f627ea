"""Examples per second of a default run at P = D = 1, over those of a plain loop with its best micro-batch size.

Five models in sizes for CPUs. The run begins with an empty cache, so it measures micro-batch sizes itself. The plain
loop accumulates over micro-batches of every power of two up to the global batch, and goes on with its fastest size.
Then both processes take turns of a few seconds each, so that a noisy machine disturbs them alike; one waits while the
other works. The ratio of processor time, of all threads, is disturbed less than that of seconds.

    python benchmarks/default_speed.py [--models gpt2 bert] [--turns 12] [--seconds 1.5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

GLOBAL_BATCH = 32
LENGTH = 64
WORDS = 512
WARM_STEPS = 3
SIZE_S = 0.7
"""For each micro-batch size of the plain loop."""


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


def plain_steps(name: str) -> Iterator[int]:
    """An ordinary loop; yields its micro-batch size after each step."""
    import torch

    torch.manual_seed(0)
    model, data = MODELS[name]().train(), Samples(name)
    optimizer = adamw(model.parameters())

    def step(index: int, m: int) -> None:
        optimizer.zero_grad()
        for first in range(0, GLOBAL_BATCH, m):
            samples = [data[(index * GLOBAL_BATCH + first + i) % len(data)] for i in range(m)]
            batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            (model(**batch).loss * m / GLOBAL_BATCH).backward()
        optimizer.step()

    def seconds(m: int) -> float:
        step(0, m)
        times: list[float] = []
        while len(times) < 2 or sum(times) < SIZE_S:
            begin_s = time.perf_counter()
            step(len(times), m)
            times.append(time.perf_counter() - begin_s)
        return statistics.median(times)

    best = min((2**power for power in range(GLOBAL_BATCH.bit_length())), key=seconds)
    for index in count():
        step(index, best)
        yield best


def our_steps(name: str) -> Iterator[int]:
    """A default run; yields its micro-batch size after each step."""
    import varuna

    trainer = varuna.Trainer(
        MODELS[name], Samples(name), lambda named: adamw(p for _, p in named), global_batch=GLOBAL_BATCH
    )
    for step in trainer.steps(1_000_000):
        yield step.plan.micro_batch


SIDES = {"plain": plain_steps, "ours": our_steps}


def take_turns(side: str, model: str) -> None:
    """Work when told to, for so many seconds; say m, and medians of a step: seconds and processor time."""
    steps = SIDES[side](model)
    m = [next(steps) for _ in range(WARM_STEPS)][-1]
    print("told", m, 0.0, 0.0, flush=True)
    for line in sys.stdin:
        until_s, times, used = time.monotonic() + float(line), list[float](), list[float]()
        next(steps)  # a turn begins with cold caches
        while not times or time.monotonic() < until_s:
            begin_s, used_s = time.perf_counter(), time.process_time()
            next(steps)
            times.append(time.perf_counter() - begin_s)
            used.append(time.process_time() - used_s)
        print("told", m, statistics.median(times), statistics.median(used), flush=True)
    os._exit(0)  # the run would go on for a million steps


class Side:
    """One side in a process of its own."""

    def __init__(self, side: str, model: str, cache: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
        environment.pop("VARUNA_CALIBRATION", None)
        self._command = [sys.executable, str(Path(__file__).resolve()), "--side", side, "--models", model]
        begin_s = time.monotonic()
        self._process = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.micro_batch = int(self._told()[0])
        self.ready_s = time.monotonic() - begin_s

    def turn(self, seconds: float) -> tuple[float, float]:
        """Medians of a step: seconds, and processor time."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return self._told()[1:]

    def _told(self) -> tuple[float, float, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("told "):
                _, m, seconds, used = line.split()
                return float(m), float(seconds), float(used)
        raise SystemExit(f"{' '.join(self._command)} failed")

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def compare(model: str, turns: int, seconds: float) -> dict[str, Any]:
    """Let both sides take turns."""
    with tempfile.TemporaryDirectory() as cache:
        sides = [Side("ours", model, cache), Side("plain", model, cache)]
        times = [[side.turn(seconds) for side in sides] for _ in range(turns)]
        for side in sides:
            side.close()
    ours, plain = sides
    ratios, used = ([plain[kind] / own[kind] for own, plain in times] for kind in (0, 1))
    own, theirs = (GLOBAL_BATCH / statistics.median(turn[0] for turn in column) for column in zip(*times, strict=True))
    print(
        f"{model}: {own:.0f} examples/s with m = {ours.micro_batch}, {ours.ready_s:.0f} s after its start; "
        f"plain {theirs:.0f} with m = {plain.micro_batch}; ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}), of processor time {statistics.median(used):.3f}",
        flush=True,
    )
    return {"ratio": round(statistics.median(ratios), 3), "processor": round(statistics.median(used), 3)}


def main() -> None:
    """Compare model by model and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        take_turns(options.side, options.models[0])
        return
    print(json.dumps({model: compare(model, options.turns, options.seconds) for model in options.models}))


if __name__ == "__main__":
    main()
