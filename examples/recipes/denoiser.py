"""LoRA of an image denoiser, Flux, on cached latents of several sizes.

varuna run -n 3 examples/recipes/denoiser.py --model FLUX.1-dev/transformer --data latents
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn

import varuna
from varuna.integrations.pretrained import adapted, config_of, weights_of


class Latents:
    """Files with ``latents`` (channels, height, width), ``encoder_hidden_states`` and ``pooled_projections``."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.safetensors"))
        self.lengths = sorted({self[at]["img_ids"].shape[0] for at in range(len(self))})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = load_file(self.files[index])
        patches = nn.functional.pixel_unshuffle(found.pop("latents"), 2)
        places = torch.cartesian_prod(torch.arange(1), *map(torch.arange, patches.shape[1:])).float()
        clean, share = patches.flatten(1).T, torch.randn(()).sigmoid()  # seeded for each sample, as is the noise
        noise = torch.randn_like(clean)
        row = {"hidden_states": (1 - share) * clean + share * noise, "img_ids": places, "target": noise - clean}
        text = {"txt_ids": torch.zeros(len(found["encoder_hidden_states"]), 3), "guidance": torch.ones(())}
        return found | row | text | {"timestep": share}


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(description="LoRA of Flux on cached latents.")
    parser.add_argument("--model", required=True, help="the transformer's folder of safetensors")
    parser.add_argument("--data", required=True, help="a folder of cached latents and texts")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--adapter", default="adapter", help="the folder for the trained adapter")
    args = parser.parse_args(arguments)

    config, latents = config_of(args.model, FluxTransformer2DModel), Latents(args.data)
    lora = LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"])

    def base() -> Any:
        return FluxTransformer2DModel.from_config(config)

    trainer = varuna.Trainer(
        lambda: adapted(base(), lora),
        latents,
        lambda named: torch.optim.AdamW([each for _, each in named if each.requires_grad], lr=args.lr),
        args.global_batch,
        micro_batch=1,  # Flux takes the places of one picture for all
        loss=varuna.Loss(lambda output, batch: (output.sample - batch["target"]).pow(2).mean(), per_micro_batch=True),
        collate=varuna.Collate(lengths=latents.lengths),
        weights=weights_of(args.model, base),  # each worker reads what its stage needs
        checkpoints=varuna.Checkpoints(f"{args.adapter}-checkpoints", frozen=False),
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    trainer.export(args.adapter)


if __name__ == "__main__":
    main()
