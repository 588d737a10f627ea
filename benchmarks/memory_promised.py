"""Peak bytes of every stage: what the plan promised, against what the engine used.

    python benchmarks/memory_promised.py                        # all models, a process per rank
    python benchmarks/memory_promised.py --model gpt2 --case 2x1 --device cuda

On the CPU a rank's bytes are those of its tensors: each storage counts from the op that makes it until it is freed,
on all threads of the rank. On a GPU they are what ``torch.cuda.max_memory_allocated`` says. Both are taken from the
moment that the generation has formed, action by action, so that the model's constructor does not count and the table
can say where the peak was.

A promise is for the worst case: all messages that may wait do wait. So pipelines run twice, undisturbed, and with ranks
that stand still now and then, on links that are late or shut; what counts is the larger peak. The last line is
JSON.
"""

import argparse
import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.emulated.late import be_late
from benchmarks.forked import run_ranks
from varuna.calibration.format import Calibrations
from varuna.core.devices import equal_workers
from varuna.core.precision import Precision

LENGTH, VOCABULARY, MICRO_BATCH, STEPS = 64, 1024, 4, 3
LATE_MICRO_BATCHES, LATE_MICRO_BATCHES_IF_FEW = 320, 960
"""At least so many in a run with late ranks; more where a step has few: all messages meet in a first backward only."""


def gpt2(layers: int = 4) -> Any:
    """GPT-2 with tied embeddings and dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": 128, "n_head": 4, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_positions=LENGTH, bos_token_id=0, eos_token_id=0))


def llama(layers: int = 4) -> Any:
    """Llama with a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0))


def vit() -> Any:
    """A vision transformer of four layers."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, intermediate_size=512, image_size=64, patch_size=8))


def resnet() -> Any:
    """A ResNet of eight blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=32, hidden_sizes=[64, 96, 128, 160], depths=[2, 2, 2, 2])
    )


class Stack(torch.nn.Module):
    """Linears with nothing between them: what waits for W is twice what B keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))
        self.head = torch.nn.Linear(256, 2)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return torch.nn.functional.cross_entropy(self.head(rows.mean(1)), labels)


class Tokens:
    """Random tokens, a function of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Images:
    """Random images, a function of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": pixels, "labels": torch.tensor(index % 2)}


class Rows:
    """Random rows, a function of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = torch.randn(LENGTH, 256, generator=torch.Generator().manual_seed(index))
        return {"rows": rows, "labels": torch.tensor(index % 2)}


def adamw(named: Any) -> torch.optim.Optimizer:
    """Two states per parameter."""
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)


def sgd(named: Any) -> torch.optim.Optimizer:
    """None."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=1e-3)


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "gpt2": (gpt2, Tokens()),
    "llama": (llama, Tokens()),
    "vit": (vit, Images()),
    "resnet": (resnet, Images()),
    "stack": (Stack, Rows()),
}


class Case(NamedTuple):
    """One plan to try."""

    name: str
    stages: int
    micro_batches: int
    memory: float | None = None
    """of a worker, in least needs; None: unlimited, so that nothing is kept"""
    precision: Precision = "fp32"
    optimizer: Any = adamw
    replicas: int = 1
    splits: bool = False
    """all backwards run as I and W; otherwise those that the planner splits"""


CASES = (
    Case("1x1", 1, 4),
    Case("1x1 sgd", 1, 4, optimizer=sgd),
    Case("1x1 bf16", 1, 4, precision="bf16"),
    Case("2x1 few", 2, 3),
    Case("2x1 many", 2, 16),
    Case("2x1 sgd", 2, 16, optimizer=sgd),
    Case("2x1 kept", 2, 16, memory=1.3),
    Case("2x1 all kept", 2, 16, memory=5.0),
    Case("2x1 split", 2, 16, splits=True),
    Case("2x1 all kept, split", 2, 16, memory=5.0, splits=True),
    Case("2x1 bf16", 2, 16, precision="bf16"),
    Case("2x2", 2, 16, replicas=2),
    Case("4x1 few", 4, 5),
    Case("4x1 many", 4, 24),
    Case("4x1 kept", 4, 24, memory=1.3),
    Case("4x1 all kept, split", 4, 24, memory=5.0, splits=True),
)


class Row(NamedTuple):
    """Memory of one stage, promised and measured."""

    stage: int
    promised_bytes: int
    calm_bytes: int
    """measured while everybody is in time"""
    measured_bytes: int
    """at worst"""
    where: str
    """F, R, B, I, W, reduce, share, vote, apply, or between them"""
    depth: int
    kept: str

    @property
    def error(self) -> float:
        """Of the promise."""
        return self.promised_bytes / self.measured_bytes - 1

    def __str__(self) -> str:
        promised, measured, calm = self.promised_bytes / 1e6, self.measured_bytes / 1e6, self.calm_bytes / 1e6
        return (
            f"stage {self.stage}  n_k {self.depth:2}  kept {self.kept:5} promised {promised:8.2f} MB  "
            f"measured {measured:8.2f} MB in {self.where:8} {self.error:+6.1%}  in time {calm:8.2f} MB"
        )


class Meter:
    """Peak bytes by action, on this rank."""

    def __init__(self, device: torch.device) -> None:
        """Start to count; on the CPU also on every thread that is started from now on."""
        from varuna.engine.base import spans
        from varuna.partition.watching.live_bytes import Allocated

        self.on_gpu = device.type == "cuda"
        self.counted = Allocated()
        self.formed = False
        self.peaks: dict[str, int] = {}
        self._bus = spans
        if not self.on_gpu:
            run, counted = threading.Thread.run, self.counted

            def watched(thread: threading.Thread) -> None:
                with counted.watch():
                    run(thread)

            setattr(threading.Thread, "run", watched)  # noqa: B010 - mypy has no word for a method that is replaced
        spans.subscribe(self._hear)

    def _hear(self, mark: Any) -> None:
        name = mark.name if mark.phase == "end" else "between"
        if name == "form":
            gc.collect()
            self.formed = True
        elif self.formed and mark.name != "form":
            self.peaks[name] = max(self.peaks.get(name, 0), self._peak_bytes())
        self._restart()

    def _peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated()) if self.on_gpu else self.counted.peak_bytes

    def _restart(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.counted.restart()


def plan_of(facts: Any, case: Case) -> Any:
    """The planner's plan for a case."""
    from varuna.calibration.nominal import nominal_calibration
    from varuna.planner.asking.request import PlanRequest
    from varuna.planner.build import Builder
    from varuna.planner.choose import best_plan

    request = PlanRequest(
        calibrations=Calibrations.of_one(nominal_calibration(facts)),
        workers=equal_workers(case.stages * case.replicas),
        stages=case.stages,
        global_batch=case.micro_batches * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        tentative=facts.combines,
        leaves_idle=False,
    )
    plan = best_plan(request)
    if case.memory is not None:
        request = request.model_copy(update={"memory_bytes": int(max(plan.first.memory_bytes) * case.memory)})
        plan = best_plan(request)
    if not case.splits:
        return plan
    split = plan.with_each_pipeline(split_last=case.micro_batches)
    return Builder(request, MICRO_BATCH).promised(split)


def measure(model: str, case: Case, device: str | None) -> list[Row]:
    """Promised and measured bytes of each stage of the first replica."""
    from varuna.job.arguments import choose_device
    from varuna.job.spec import JobSpec
    from varuna.job.start import open_session
    from varuna.membership.static import StaticMembership, world_from_environment

    build, dataset = MODELS[model]
    spec = JobSpec(
        build,
        dataset,
        case.optimizer,
        global_batch=case.micro_batches * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        precision=case.precision,
        device=choose_device(device),
    )
    # to capture runs backwards, which start threads where torch sees a GPU: a process that forks must not
    on_gpu = spec.device.type == "cuda"
    plan = (
        run_ranks(1, lambda: plan_of(spec.partitioned.facts, case)) if on_gpu else plan_of(spec.partitioned.facts, case)
    )

    def rank(steps: int, *, is_late: bool) -> Any:
        torch.set_num_threads(1)
        world = world_from_environment()
        meter = Meter(spec.device)
        if is_late:
            be_late(world.rank)
        session = open_session(spec, steps, StaticMembership(world, lambda *_: plan))
        with meter.counted.watch():
            for _ in session.steps():
                pass
        world.store.set(f"peaks/{world.rank}", json.dumps(meter.peaks))
        return [json.loads(world.store.get(f"peaks/{k}")) for k in range(plan.stages)] if world.rank == 0 else None

    calm = run_ranks(plan.workers, partial(rank, STEPS, is_late=False))
    has_few = case.micro_batches < 2 * plan.stages * case.replicas
    least = LATE_MICRO_BATCHES_IF_FEW if has_few else LATE_MICRO_BATCHES
    late_steps = -(-least * case.replicas // case.micro_batches)
    late = run_ranks(plan.workers, partial(rank, late_steps, is_late=True)) if plan.stages > 1 else calm
    rows = []
    for stage, (in_time, peaks) in enumerate(zip(calm, late, strict=True)):
        worst = {name: max(in_time.get(name, 0), peaks.get(name, 0)) for name in in_time | peaks}
        where = max(worst, key=lambda name: worst[name])
        rows.append(
            Row(
                stage=stage,
                promised_bytes=plan.first.memory_bytes[stage],
                calm_bytes=max(in_time.values()),
                measured_bytes=worst[where],
                where=where,
                depth=plan.first.stash_limits[stage],
                kept=f"{plan.first.kept[stage] if plan.first.kept else 0}/{len(plan.first.sections_of(stage))}",
            )
        )
    return rows


def main() -> None:
    """Print a row per stage and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--case", help="only those whose name starts so")
    parser.add_argument("--device", help="default: a GPU if there is one")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # looking for a GPU must not begin to use it: ranks fork; the reserve is for what cuBLAS keeps, 32 MiB on a Hopper
    for name, value in (
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("CUBLASLT_WORKSPACE_SIZE", "0"),
    ):
        os.environ.setdefault(name, value)
    worst: dict[str, float] = {}
    for model in options.model or MODELS:
        for case in CASES:
            if options.case and not case.name.startswith(options.case):
                continue
            key = f"{model} {case.name}"
            for row in measure(model, case, options.device):
                print(f"{key:21} {row}", flush=True)
                worst[key] = max(worst.get(key, 0.0), abs(row.error))
    print(json.dumps({"worst_error": max(worst.values()), "by_case": worst}))


if __name__ == "__main__":
    main()
