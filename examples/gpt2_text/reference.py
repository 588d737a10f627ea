"""The same training as a plain eager PyTorch loop: what train.py has to reproduce, number by number.

It imports nothing of Varuna. ``--order`` is a JSON list of steps, each the list of its sample numbers.
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import torch
from model import add_arguments, build_model
from text import TextDataset


def train(
    model: torch.nn.Module, dataset: TextDataset, order: list[list[int]], learning_rate: float, chunk: int
) -> Iterator[float]:
    """Make an AdamW step per entry of ``order``; yield each step's loss over all its target tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model.train()
    for samples in order:
        batch = torch.stack([dataset[sample]["input_ids"] for sample in samples])
        targets = batch[:, 1:].numel()
        step_loss = 0.0
        for part in torch.split(batch, chunk):  # accumulate: the whole batch need not fit in memory
            loss = model(input_ids=part, labels=part).loss * (part[:, 1:].numel() / targets)
            loss.backward()
            step_loss += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        yield step_loss


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--order", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON list of losses")
    parser.add_argument("--chunk", type=int, default=8, help="examples per forward")
    add_arguments(parser)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = build_model(args)
    order = json.loads(args.order.read_text())
    losses = []
    for loss in train(model, TextDataset(args.length), order, args.learning_rate, args.chunk):
        losses.append(loss)
        print(f"step {len(losses) - 1} loss {loss:.6f}", flush=True)
    args.out.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
