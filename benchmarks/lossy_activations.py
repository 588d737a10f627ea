"""Messages of eight bits a number in place of sixteen: how much smaller they are, and what that does to the loss.

    python -m benchmarks.lossy_activations [--steps 300] [--seeds 2]

GPT-2 (6 layers of width 128) learns Python's standard library, byte by byte, in fp32. A plan may cut anywhere, and no
loss may depend on where: so what passes between any two layers is rounded, to bf16, or to int8 with one scale for each
token, either activations alone or gradients as well. Held-out losses, means over seeds; all variants see the same
samples and first values. Then how much smaller int8 becomes by the engine's lossless codec. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt2_text"))

from model import build_model  # noqa: E402
from text import TextDataset  # noqa: E402

from varuna.engine.base.codec import PART_BYTES, Codec  # noqa: E402
from varuna.engine.base.coding import best_fit  # noqa: E402
from varuna.engine.base.connection import bytes_of  # noqa: E402

BATCH, HELD_OUT, RATE = 8, 64, 1e-3
SHAPE = argparse.Namespace(layers=6, width=128, heads=4, length=128, dropout=0.0)
PLAIN = "plain"
VARIANTS = {PLAIN: ("", ""), "bf16": ("bf16", "bf16"), "int8 activations": ("int8", "bf16"), "int8": ("int8", "int8")}


def as_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scale of each token."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (values / scale).round().to(torch.int8), scale


def rounded(values: Tensor, kind: str) -> Tensor:
    """Return the values that the receiver gets."""
    if kind == "int8":
        whole, scale = as_int8(values)
        return whole * scale
    return values.bfloat16().float() if kind == "bf16" else values


class Crossing(torch.autograd.Function):
    """A message, and the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kinds: tuple[str, str]) -> Tensor:
        """Round what is sent."""
        ctx.kinds = kinds
        return rounded(values, kinds[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Round what comes back."""
        return rounded(gradients[0], ctx.kinds[1]), None


def trained(kinds: tuple[str, str], seed: int, steps: int, samples: TextDataset) -> tuple[list[float], Tensor]:
    """Held-out losses at thirds of the training; and the activations between the middle layers at its end."""
    torch.manual_seed(seed)
    model: Any = build_model(SHAPE)
    seen = list[Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def cross(_: Any, __: Any, came: Any) -> Any:
        seen[:] = [*seen, came[0] if isinstance(came, tuple) else came][-SHAPE.layers :]
        crossed = Crossing.apply(seen[-1], kinds)  # type: ignore[no-untyped-call]
        return (crossed, *came[1:]) if isinstance(came, tuple) else crossed

    for block in model.transformer.h[:-1]:
        block.register_forward_hook(cross)

    def loss_of(rows: Tensor) -> Any:
        tokens = torch.stack([samples[int(row)]["input_ids"] for row in rows])
        return model(input_ids=tokens, labels=tokens).loss

    chance = torch.Generator().manual_seed(seed)
    held_out = torch.arange(HELD_OUT) * (len(samples) // HELD_OUT)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 30)
        loss_of(torch.randint(0, len(samples), (BATCH,), generator=chance)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % (steps // 3) == 0:
            with torch.no_grad():
                losses.append(fmean(float(loss_of(rows)) for rows in held_out.view(-1, BATCH)))
    return losses, seen[len(seen) // 2].detach()


def smaller(values: Tensor) -> dict[str, float]:
    """Return the bytes of bf16 over those of int8, before and after the codec; scales in fp32."""
    whole, scale = as_int8(values)
    flat = {"bf16": values.bfloat16().flatten(), "int8": whole.flatten()}
    found = dict[str, float]()
    for name, each in flat.items():
        ratio = best_fit(bytes_of(each)[:PART_BYTES], Codec()).ratio
        more = scale.nbytes if name == "int8" else 0
        found |= {name: flat["bf16"].nbytes / (each.nbytes + more)}
        found |= {f"{name} and codec": flat["bf16"].nbytes / (each.nbytes / ratio + more)}
    return {name: round(ratio, 2) for name, ratio in found.items()}


def main() -> None:
    """Print a row for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples, losses, last = TextDataset(SHAPE.length), dict[str, list[list[float]]](), torch.empty(0)
    for name, kinds in VARIANTS.items():
        for seed in range(options.seeds):
            found, last = trained(kinds, seed, options.steps, samples)
            losses.setdefault(name, []).append(found)
        apart = [[a - b for a, b in zip(*each, strict=True)] for each in zip(losses[name], losses[PLAIN], strict=True)]
        means = [f"{fmean(each):.4f}" for each in zip(*losses[name], strict=True)]
        print(f"{name:18} {means}  above plain, by seed: {[[round(d, 4) for d in each] for each in apart]}", flush=True)
    ratios = smaller(last)
    print(ratios)
    print(json.dumps({"losses": losses, "smaller": ratios}))


if __name__ == "__main__":
    main()
