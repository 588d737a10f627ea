"""A training script that starts from a saved GPT-2."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import varuna


def build() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=16,
            n_head=2,
            vocab_size=32,
            n_positions=12,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Sentences:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone()}


def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)


def plain(folder: Path, steps: int, global_batch: int) -> list[float]:
    """The same job in plain PyTorch, from ``from_pretrained``."""
    from transformers import GPT2LMHeadModel

    from varuna.data import sample_index

    model = GPT2LMHeadModel.from_pretrained(folder).train()
    adamw, dataset, losses = optimizer(list(model.named_parameters())), Sentences(), []
    for step in range(steps):
        positions = range(step * global_batch, (step + 1) * global_batch)
        samples = [dataset[sample_index(position, size=len(dataset), seed=0)] for position in positions]
        loss = model(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}).loss
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights")
    args = parser.parse_args()
    trainer = varuna.Trainer(
        model=build,
        dataset=Sentences(),
        optimizer=optimizer,
        global_batch=8,
        micro_batch=2,
        weights=args.weights,
    )
    for step in trainer.steps(6):
        if step.is_main:
            print(f"step {step.index} loss {step.loss!r} generation {step.generation}", flush=True)


if __name__ == "__main__":
    main()
