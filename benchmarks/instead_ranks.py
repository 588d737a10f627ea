"""One rank of a contender in ``instead.py``: trains on request and reports the time.

    python benchmarks/instead_ranks.py --contender ddp --layers 8 --width 256 --global-batch 32

Reads torchrun's variables. Each line of standard input has a micro-batch size and numbers of steps, to warm up and to
measure; a line of JSON answers it. With ``--untold`` it trains at once: a script that ``varuna calibrate`` measures.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORDS, LENGTH, HEADS = 512, 64, 4
FEW_WORDS = 16
"""With emulated processors: the layers that are computed for real should cost nothing."""
SAMPLES = 4096
RATE = 1e-4
MANY = 1_000_000
Stepper = Callable[[int, int], float]
"""Runs a step, given its number and m, and returns this rank's part of the loss."""


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widened, self.narrowed = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then two products."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.projected(self.first(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).flatten(2))
        widened = nn.functional.gelu(self.widened(self.second(x)), approximate="tanh")
        result: Tensor = x + self.narrowed(widened)
        return result


@torch.library.custom_op("varuna_instead::slept", mutates_args=())
def slept(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """Multiply, sleeping for ``seconds`` per example; both gradients do the same."""
    time.sleep(seconds * x.shape[0])
    return x * weight[: x.shape[-1]]


@torch.library.custom_op("varuna_instead::slept_input", mutates_args=())
def slept_input(gradient: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """Compute the gradient of the input."""
    time.sleep(seconds * gradient.shape[0])
    return gradient * weight[: gradient.shape[-1]]


@torch.library.custom_op("varuna_instead::slept_weight", mutates_args=())
def slept_weight(gradient: Tensor, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """Compute the gradient of the weight, which is mostly zero."""
    time.sleep(seconds * gradient.shape[0])
    whole = torch.zeros_like(weight)
    whole[: x.shape[-1]] = (gradient * x).sum((0, 1))
    return whole


@slept.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@slept_input.register_fake
def _(gradient: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(gradient)


@slept_weight.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, ctx.seconds = inputs
    ctx.save_for_backward(x, weight)


def _back(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    ops = torch.ops.varuna_instead
    return ops.slept_input(gradient, weight, ctx.seconds), ops.slept_weight(gradient, x, weight, ctx.seconds), None


slept.register_autograd(_back, setup_context=_keep)


class Emulated(nn.Module):
    """A layer with the real number of parameters that takes the time of a processor of ``flops`` FLOP/s."""

    def __init__(self, width: int, flops: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12 * width**2))
        self.seconds = 2 * 12 * width**2 * LENGTH / flops

    def forward(self, x: Tensor) -> Tensor:
        """Sleep."""
        result: Tensor = torch.ops.varuna_instead.slept(x, self.weight, self.seconds)
        return result


class First(nn.Module):
    """The embeddings of tokens and positions."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up."""
        result: Tensor = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return result


class Last(nn.Module):
    """The output layer; not tied, so that a hand-made pipeline needs no reduction over stages."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """A score per word."""
        result: Tensor = self.scores(self.norm(x))
        return result


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over tokens."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Gpt(nn.Module):
    """GPT-2 without dropout; or one whose layers are emulated, with ``flops``."""

    def __init__(self, layers: int, width: int, flops: float) -> None:
        super().__init__()
        words = FEW_WORDS if flops else WORDS
        self.first, self.last = First(width, words), Last(width, words)
        self.layers = nn.ModuleList(Emulated(width, flops) if flops else Block(width) for _ in range(layers))
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.first(tokens)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.last(x), targets)


class Job(NamedTuple):
    """The training that all contenders share, and this rank."""

    layers: int
    width: int
    global_batch: int
    flops: float
    rank: int
    hosts: int

    def model(self) -> Gpt:
        """Build the model with the same initial values everywhere."""
        torch.manual_seed(0)
        return Gpt(self.layers, self.width, self.flops)

    def samples(self) -> "Samples":
        """The same everywhere."""
        return Samples(FEW_WORDS if self.flops else WORDS)

    @property
    def local_batch(self) -> int:
        """Examples of a step that each of as many replicas as there are hosts has."""
        return self.global_batch // self.hosts


class Samples:
    """Random tokens in a fixed order; without a length, a dataset is not shuffled."""

    def __init__(self, words: int) -> None:
        self._tokens = torch.randint(0, words, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._tokens[index % SAMPLES]
        return {"tokens": row[:-1], "targets": row[1:]}

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Some in a row."""
        rows = self._tokens[torch.arange(first, first + count) % SAMPLES]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Build the optimizer that all contenders use."""
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def replica(
    job: Job, model: Any, optimizer: torch.optim.Optimizer, part: Callable[[bool], AbstractContextManager[Any]]
) -> Stepper:
    """Return a step that accumulates over micro-batches; ``part(is_last)`` is entered around each."""
    samples = job.samples()

    def step(number: int, micro_batch: int) -> float:
        own, total = number * job.global_batch + job.rank * job.local_batch, 0.0
        for first in range(0, job.local_batch, micro_batch):
            with part(first + micro_batch >= job.local_batch):
                loss = model(*samples.batch(own + first, micro_batch)) * micro_batch / job.local_batch
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total / job.hosts

    return step


def ddp(job: Job) -> Stepper:
    """DistributedDataParallel: gradients cross once a step, while the last backward runs."""
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(job.model(), gradient_as_bucket_view=True, static_graph=True)
    return replica(job, model, adamw(model.parameters()), lambda is_last: nullcontext() if is_last else model.no_sync())


def fsdp2(job: Job) -> Stepper:
    """FSDP2: parameters are gathered once a step, gradients cross once."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (job.hosts,))
    model: Any = job.model()
    for each in (model.first, *model.layers, model.last, model):
        fully_shard(each, mesh=mesh, reshard_after_forward=False)

    def part(is_last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        return nullcontext()

    return replica(job, model, adamw(model.parameters()), part)


def zero(job: Job, stage: int) -> Stepper:
    """DeepSpeed; ZeRO-2 and 3 send gradients at every micro-batch, so one per step is their best."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = job.model()
    config = {
        "train_micro_batch_size_per_gpu": job.local_batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine: Any = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]
    samples = job.samples()

    def step(number: int, micro_batch: int) -> float:
        loss = engine(*samples.batch(number * job.global_batch + job.rank * job.local_batch, job.local_batch))
        engine.backward(loss)
        engine.step()
        result: float = loss.item() / job.hosts
        return result

    return step


def pipeline(job: Job) -> Stepper:
    """Torch's pipeline API under 1F1B, cut by hand into equal numbers of layers; nothing is computed twice."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.distributed.init_process_group("gloo")
    model, each = job.model(), job.layers // job.hosts
    is_first, is_last = job.rank == 0, job.rank == job.hosts - 1
    own = [*model.layers[job.rank * each : (job.rank + 1) * each]]
    module = nn.Sequential(*[model.first][:is_first], *own, *[model.last][:is_last])
    optimizer, samples = adamw(module.parameters()), job.samples()
    schedules: dict[int, Any] = {}

    def step(number: int, micro_batch: int) -> float:
        if micro_batch not in schedules:
            stage = PipelineStage(module, job.rank, job.hosts, torch.device("cpu"))
            schedules[micro_batch] = Schedule1F1B(stage, job.global_batch // micro_batch, loss_fn=loss_of)
        tokens, targets = samples.batch(number * job.global_batch, job.global_batch)
        losses: list[Tensor] = []
        schedules[micro_batch].step(
            *[tokens][:is_first], **({"target": targets, "losses": losses} if is_last else {}), return_outputs=False
        )
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return step


def ours(job: Job) -> Stepper:
    """Train with Varuna, as it plans by itself."""
    import varuna

    trainer = varuna.Trainer(
        job.model, job.samples(), lambda named: adamw([each for _, each in named]), global_batch=job.global_batch
    )
    steps: Iterator[varuna.Step] = iter(trainer.steps(MANY))

    def step(number: int, micro_batch: int) -> float:
        done = next(steps, None)
        if done is None:  # the plan leaves this worker out
            return 0.0
        plans[:] = [f"{done.plan.shape}, m = {done.plan.micro_batch}"]
        return done.loss if done.is_main else 0.0

    return step


plans: list[str] = []
"""Varuna's, once it has one."""
CONTENDERS: dict[str, Callable[[Job], Stepper]] = {
    "varuna": ours,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "zero2": lambda job: zero(job, 2),
    "zero3": lambda job: zero(job, 3),
    "pipeline": pipeline,
}


def sent_bytes() -> int:
    """Return the bytes that this host has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def main() -> None:
    """Take turns until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=tuple(CONTENDERS), required=True)
    for name in ("layers", "width", "global-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gflops", type=float, default=0.0, help="of emulated processors")
    parser.add_argument("--untold", action="store_true", help="train without turns")
    options = parser.parse_args()
    rank, hosts = (int(os.environ.get(name, value)) for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")))
    job = Job(options.layers, options.width, options.global_batch, 1e9 * options.gflops, rank, hosts)
    step = CONTENDERS[options.contender](job)
    number = 0
    while options.untold:
        step(number, options.global_batch)
    for line in sys.stdin:
        micro_batch, warm, measured = map(int, line.split())
        losses = []
        for turn in range(warm + measured):
            if turn == warm:
                begin_s, begin_bytes = time.perf_counter(), sent_bytes()
            losses.append(step(number, micro_batch))
            number += 1
        told = {"seconds": time.perf_counter() - begin_s, "sent": sent_bytes() - begin_bytes, "losses": losses}
        print("told", json.dumps(told | {"plan": "".join(plans)}), flush=True)
    os._exit(0)  # a run of ours would go on


if __name__ == "__main__":
    main()
