"""A small language model that trains until it is stopped, and says when each micro-batch was done.

Run by benchmarks/recovery.py and benchmarks/chaos.py under `varuna run`'s machinery, by itself, or (``--stock``) by
stock torchrun with DistributedDataParallel and a checkpoint each 10 steps.
"""

import argparse
import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH, LAYERS = 64, 32, 64, 6
GLOBAL_BATCH, MICRO_BATCH = 16, 2


class Block(nn.Module):
    """Mixes a position with what came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x).cumsum(1) / LENGTH)))
        return made


class Language(nn.Module):
    """A causal toy language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Sentences:
    """Random walks over the vocabulary, a function of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        meet_faults(index)
        steps = torch.randint(0, 3, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        tokens = (steps.cumsum(0) + index) % VOCABULARY
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def meet_faults(index: int) -> None:
    """Do what a file in the folder STORM_FAULTS of this machine asks for, as long as it is there."""
    folder = Path(os.environ.get("STORM_FAULTS", "/nowhere"))
    if (folder / "disk").exists():
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"sample {index}")
    if (folder / "driver").exists():
        raise ValueError("math domain error")
    if (folder / "noise").exists():
        sys.stderr.write(f"{'noise ' * 100}\n" * 300)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same in all ways of running."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class Marks:
    """Appends lines ``what step seconds`` (``time.monotonic``: one clock for all processes of a machine)."""

    def __init__(self, folder: Path | None) -> None:
        name = f"{os.environ.get('VARUNA_WORKER', 'rank' + os.environ.get('RANK', '0'))}-{os.getpid()}.marks"
        self._file = (folder / name).open("a", buffering=1) if folder is not None else None

    def say(self, what: str, step: int) -> None:
        """One line, written at once."""
        if self._file is not None:
            self._file.write(f"{what} {step} {time.monotonic():.6f}\n")


def elastic(steps: int, marks: Marks, pause_s: float, checkpoints: str | None) -> None:
    """Varuna, in whatever way this process was started."""
    import varuna
    from varuna.engine.base.spans import Span, subscribe

    def listen(span: Span) -> None:
        if span.phase == "end" and span.name in ("B", "form"):
            marks.say(span.name, span.step)

    subscribe(listen)
    trainer = varuna.Trainer(
        model=Language,
        dataset=Sentences(),
        optimizer=lambda named: optimizer([parameter for _, parameter in named]),
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        checkpoints=varuna.Checkpoints(checkpoints, every=10) if checkpoints else None,
    )
    for step in trainer.steps(steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss!r}", flush=True)
        time.sleep(pause_s)


def stock(steps: int, marks: Marks, checkpoint: Path) -> None:
    """DistributedDataParallel with a checkpoint each 10 steps, as torchrun's own examples do it."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Language())
    update = optimizer(model.parameters())
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        update.load_state_dict(saved["optimizer"])
        first = saved["step"]
    data, share = Sentences(), GLOBAL_BATCH // world
    for step in range(first, steps):
        begin = step * GLOBAL_BATCH + rank * share
        for at in range(begin, begin + share, MICRO_BATCH):
            samples = [data[index % len(data)] for index in range(at, at + MICRO_BATCH)]
            batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            model(**batch).backward()
            marks.say("B", step)
        update.step()
        update.zero_grad()
        if step % 10 == 9 and rank == 0:
            fresh = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": update.state_dict(), "step": step + 1}, fresh)
            fresh.rename(checkpoint)


def main() -> None:
    """Parse and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--marks", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--checkpoints")
    parser.add_argument("--stock", type=Path, help="DistributedDataParallel, with this checkpoint file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    marks = Marks(args.marks)
    if args.stock:
        stock(args.steps, marks, args.stock)
    else:
        elastic(args.steps, marks, args.pause, args.checkpoints)


if __name__ == "__main__":
    main()
