"""A small training script that misbehaves on demand; plain torch, so that workers start fast."""

import argparse
import atexit
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varuna
from varuna.engine.base.spans import Span, subscribe
from varuna.engine.links.traffic import traffic_over

VOCABULARY, LENGTH, WIDTH, LAYERS = 32, 12, 16, 2


class Block(nn.Module):
    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.norm(x).cumsum(1) / LENGTH
        made: torch.Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(mixed))))
        return made


class Language(nn.Module):
    """A causal toy language model with tied embeddings."""

    def __init__(self, layers: int, dropout: float, batch_norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, batch_norm) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Normed(torch.optim.SGD):
    """SGD on gradients divided by their global norm: a value over all stages, kept in momentum before it is used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()  # something that must be undone if the next line never answers
        parameters = [p for group in self.param_groups for p in group["params"]]
        squares = sum((p.grad.double().pow(2).sum() for p in parameters if varuna.owned(p)), torch.zeros(()).double())
        norm = varuna.all_reduce_shared(squares).sqrt()
        for p in parameters:
            p.add_(p.grad / norm.float(), alpha=-0.05)


class Sentences:
    """Padded random sentences; ``unstable`` breaks the rule that dataset[i] is a function of i."""

    def __init__(self, unstable: bool) -> None:
        self.unstable = unstable

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[LENGTH - index % 7 :] = -100
        if self.unstable and index % 5 == 0:
            labels[0] = os.getpid() % VOCABULARY
        return {"tokens": tokens[:-1], "labels": labels}


def misbehave(plan: str, folder: Path, patient: bool, seen: list[varuna.Step]) -> None:
    """``plan``: entries ``name:phase:step:stage[:signal]``, in order; whoever gets there does the next one, once.

    A patient one waits until what the entry before has done is mended: a newer generation with two holders of each
    section, or the one that forms to that end. ``seen`` ends with this worker's newest step. The file ``done-N`` has
    the generation of that step, then the span's index.
    """
    entries = [entry.split(":") for entry in plan.split(",") if entry]

    def is_mended(generation: int, forms: bool) -> bool:
        return not patient or bool(seen and seen[-1].generation > generation and (forms or seen[-1].plan.replicas > 1))

    def listener(span: Span) -> None:
        number = len(list(folder.glob("done-*")))
        if number == len(entries):
            return
        name, phase, step, stage, *rest = entries[number]
        before = int(((folder / f"done-{number - 1}").read_text().split() or ["999999999"])[0]) if number else -1
        if (span.name, span.phase, span.stage) != (name, phase, int(stage)) or span.step < int(step):
            return
        if not is_mended(before, name == "form"):
            return
        try:
            mark = (folder / f"done-{number}").open("x")
        except FileExistsError:
            return
        mark.write(f"{seen[-1].generation if seen else -1} {span.index}")
        mark.close()
        os.kill(os.getpid(), getattr(signal, rest[0] if rest else "SIGKILL"))

    subscribe(listener)


def wired(folder: Path, **arguments: Any) -> varuna.Trainer:
    """Workers have late devices and reach each other by a stand-in for NCCL; their files say how often."""
    sys.path.append(str(Path(__file__).parents[2]))
    late, wire = import_module("tests.unit.engine.late"), import_module("tests.unit.engine.wire")
    start, fabric = import_module("varuna.job.start"), wire.Wire()
    streams = late.LateStreams()
    streams.device = wire.own_gpu()
    vars(start)["traffic_of"] = lambda *_, **__: traffic_over(streams, fabric)
    atexit.register(lambda: (folder / f"wired-{os.getpid()}").write_text(str(len(fabric.made))))
    return varuna.Trainer(**arguments)


def show_text(trainer: varuna.Trainer, step: varuna.Step, every: int) -> None:
    if every and (step.index + 1) % every == 0:
        texts = trainer.generate([[1, 2], [3]], 6)
        if step.is_main:
            print(f"text {step.index} {texts}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=12)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--checkpoint-every", type=int, default=timedelta(minutes=10))
    parser.add_argument("--checkpoint-seconds", type=float, help="in place of steps")
    parser.add_argument("--misbehave", default="", help="see misbehave()")
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each step takes in addition")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds that each forward takes in addition")
    parser.add_argument("--slow-workers", help="those whose forwards take twice as long, such as w0,w3")
    parser.add_argument("--slow-class", help="those of a class of devices whose forwards take twice as long")
    parser.add_argument("--spare-state", action="store_true", help="misbehave, and be fast, only while D >= 2")
    parser.add_argument("--raise-at", type=int, help="step at which the worker of stage 1 raises")
    parser.add_argument("--break-at", type=int, help="step after which rank 0 leaves the loop")
    parser.add_argument("--unstable", action="store_true")
    parser.add_argument("--export")
    parser.add_argument("--publish", help="folder; after every step")
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--normed", action="store_true", help="an optimizer that needs a global norm")
    parser.add_argument("--share", action="store_true", help="optimizer state shared out among replicas")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--offload", action="store_true", help="optimizer state in host memory")
    parser.add_argument("--links", default="host", help="also wire: see wired()")
    parser.add_argument("--generate", type=int, default=0, help="after every so many steps")
    parser.add_argument("--notes", action="store_true", help="state of the user's own, printed at the end")
    return parser.parse_args()


def main() -> None:
    args = parse()
    seen: list[varuna.Step] = []
    notes = {"turns": 0, "losses": 0.0}  # the user's own state
    misbehave(args.misbehave, args.folder, args.spare_state, seen)
    name = os.environ.get("VARUNA_WORKER")
    slow_one, slow_class = (name in (names or "").split(",") for names in (args.slow_workers, args.slow_class))
    factor = (2.0 if slow_one else 1.0) * (2.0 if slow_class else 1.0)
    if args.slow_class:
        os.environ["VARUNA_DEVICE_CLASS"] = "slow" if slow_class else "fast"
    if args.compute:
        subscribe(lambda span: time.sleep(factor * args.compute) if (span.name, span.phase) == ("F", "begin") else None)
    stage: list[int] = []
    subscribe(lambda span: stage.append(span.stage) if span.name == "form" else None)

    def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = [parameter for _, parameter in named]
        return Normed(parameters, lr=1e-2, momentum=0.5) if args.normed else torch.optim.AdamW(parameters, lr=1e-2)

    make = (
        partial(wired, args.folder)
        if args.links == "wire"
        else partial(varuna.Trainer, network=varuna.Network(links=args.links))
    )
    every = timedelta(seconds=args.checkpoint_seconds) if args.checkpoint_seconds else args.checkpoint_every
    trainer = make(
        model=lambda: Language(args.layers, args.dropout, args.batch_norm),
        dataset=Sentences(args.unstable),
        optimizer=optimizer,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        cut=args.layers + 1,  # more would cost each step more than the small model itself
        clip_grad_norm=1.0,
        checkpoints=args.checkpoint_dir and varuna.Checkpoints(args.checkpoint_dir, every=every),
        publish=varuna.Publish(args.publish, every=1, keep=1000) if args.publish else None,
        memory=varuna.Memory(offload_optimizer=args.offload, shard_optimizer=args.share),
        precision=args.precision,
        state={"notes": notes} if args.notes else None,
    )
    for step in trainer.steps(args.steps):
        notes.update(turns=notes["turns"] + 1, losses=notes["losses"] + step.loss)
        if step.is_main:
            print(f"step {step.index} loss {step.loss!r} generation {step.generation}", flush=True)
        if args.raise_at == step.index and stage[-1] == step.plan.stages - 1:
            raise ValueError(f"a bug of the user at step {step.index}")
        if args.break_at == step.index and step.is_main:
            break
        seen.append(step)
        show_text(trainer, step, args.generate)
        if not args.spare_state or step.plan.replicas < 2:
            time.sleep(args.slow)
    if args.export:
        trainer.export(args.export)
    if args.notes:
        print(f"notes {notes['turns']} {notes['losses']!r}", flush=True)
    print("after the loop", file=sys.stderr)


if __name__ == "__main__":
    main()
