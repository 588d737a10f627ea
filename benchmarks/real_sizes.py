"""Throughput of real model sizes against a plain PyTorch loop of the same precision, with the utilisation (MFU).

    python benchmarks/real_sizes.py --model gpt2-1.5b --modes plain 1 plain-recompute 1-recompute 1-offload
    python benchmarks/real_sizes.py --model llama-1b --modes plain 1 2 4            # processes that share one GPU
    python benchmarks/real_sizes.py --model tiny --device cpu --rounds 1            # checks the command itself

A mode is `plain`, an ordinary loop, or a number of stages: 1 is one process under Varuna, more are pipelines of so many
processes, which share the device (or have one each, where there are as many) through staged links. `-recompute` runs
every forward twice: the plain loop with its layers' checkpointing, ours with all F's of a step before the first B.
`-offload` keeps optimizer state in host memory. Rounds of all modes are interleaved, each in fresh processes; losses
must agree. FLOPs of a token are 6 x parameters, as in the paper's TFlops column (its 200B row: 0.022 examples/s/GPU are
27.3 TFlops); recomputation is not counted. Peak bytes are those of torch's allocator on the first rank, on a GPU.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

LENGTH = {"tiny": 64}
GPT2 = {"tiny": (2, 64, 2), "gpt2-1.5b": (48, 1600, 25), "gpt2-2.5b": (54, 1920, 20)}
"""Layers, width, heads: the paper's shapes."""
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "V100": 125.0}
"""Dense bf16 (V100: fp16), from the vendor's data sheets."""


def build(name: str) -> Any:
    """The model with random weights, no dropout."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    length = LENGTH.get(name, 1024)
    if name == "llama-1b":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32000,
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=22,
                num_attention_heads=32,
                num_key_value_heads=4,
                max_position_embeddings=length,
            )
        )
    layers, width, heads = GPT2[name]
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            n_positions=length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


class Tokens:
    """Random tokens, a function of the index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tokens = torch.randint(0, 30000, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def adamw(parameters: Any, device: str) -> Any:
    """The same kernel on both sides."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, fused=device == "cuda")


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """An ordinary loop: a model in the precision over fp32 parameters, gradients summed in fp32."""
    import torch

    from varuna.data import sample_index
    from varuna.engine.stage.precision import DTYPES

    torch.manual_seed(0)
    dtype = DTYPES[options.precision]
    data = Tokens(LENGTH.get(options.model, 1024))
    model = build(options.model).to(options.device).train()
    if options.mode.endswith("-recompute"):
        model.gradient_checkpointing_enable()
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(dtype)
    optimizer = adamw(masters, options.device)
    times, losses = [], []
    for step in range(options.steps):
        begin_s = time.perf_counter()
        total = torch.zeros((), device=options.device)
        for master in masters:
            master.grad = torch.zeros_like(master)
        for micro_batch in range(options.micro_batches):
            first = (step * options.micro_batches + micro_batch) * options.micro_batch
            positions = range(first, first + options.micro_batch)
            samples = [data[sample_index(position, size=len(data), seed=0)] for position in positions]
            batch = {key: torch.stack([s[key] for s in samples]).to(options.device) for key in samples[0]}
            loss = model(**batch).loss / options.micro_batches
            loss.backward()
            total += loss.detach()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    master.grad += parameter.grad
                    parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(float(total))  # waits for the device
        times.append(time.perf_counter() - begin_s)
    return {
        "step_s": statistics.median(times[1:]),
        "losses": losses,
        "parameters": sum(m.numel() for m in masters),
        "peak_bytes": _peak_bytes(options.device),
    }


def ours(options: argparse.Namespace) -> dict[str, Any] | None:
    """The same job under Varuna; None on all ranks but the main one."""
    from varuna.core.model import Memory
    from varuna.job.arguments import choose_device
    from varuna.job.spec import JobSpec
    from varuna.job.start import open_session
    from varuna.membership.static import StaticMembership, world_from_environment
    from varuna.planner.choose import plan_run

    stages, _, variant = options.mode.partition("-")
    policy = "gpipe" if variant == "recompute" else "adaptive"  # one stage has B right after F otherwise, and no R
    spec = JobSpec(
        lambda: build(options.model),
        Tokens(LENGTH.get(options.model, 1024)),
        lambda named: adamw([parameter for _, parameter in named], options.device),
        global_batch=options.micro_batches * options.micro_batch,
        micro_batch=options.micro_batch,
        precision=options.precision,
        device=choose_device(options.device),
        memory=Memory(offload_optimizer=variant == "offload"),
    )
    solo = StaticMembership(
        world_from_environment(),
        lambda job, workers, m: plan_run(job, workers=workers, stages=int(stages), micro_batch=m, policy=policy),
    )
    session = open_session(spec, options.steps, solo)
    times, losses, last_s, is_main = [], [], time.perf_counter(), False
    with closing(session):
        for step in session.steps():
            losses.append(step.totals.loss)
            times.append(time.perf_counter() - last_s)
            last_s, is_main = time.perf_counter(), step.is_main
    if not is_main:
        return None
    return {"step_s": statistics.median(times[1:]), "losses": losses, "peak_bytes": _peak_bytes(options.device)}


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one mode in fresh processes."""
    script = str(Path(__file__).resolve())
    same = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in _PASSED]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, f"--mode={mode}", *same]
    stages = mode.partition("-")[0]
    if stages not in ("plain", "1"):
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", stages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{mode} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


_PASSED = ("model", "device", "precision", "steps", "micro_batch", "micro_batches")


def main() -> None:
    """Interleave rounds of all modes and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*GPT2, "llama-1b"), default="gpt2-1.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=["plain", "1"], type=_mode, help="plain, and numbers of stages")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        outcome = plain(options) if options.mode.startswith("plain") else ours(options)
        if outcome is not None:
            print(json.dumps(outcome), flush=True)
        return
    modes = list(dict.fromkeys(["plain", *options.modes]))
    rounds = [{mode: measure(mode, options) for mode in modes} for _ in range(options.rounds)]
    tokens = options.micro_batch * options.micro_batches * LENGTH.get(options.model, 1024)
    flops = 6 * rounds[0]["plain"]["parameters"] * tokens
    result: dict[str, Any] = {"model": options.model, "device": _device(options.device), "precision": options.precision}
    for mode in modes:
        step_s = statistics.median(each[mode]["step_s"] for each in rounds)
        ratio = statistics.median(each["plain"]["step_s"] / each[mode]["step_s"] for each in rounds)
        losses = zip(rounds[0][mode]["losses"], rounds[0]["plain"]["losses"], strict=True)
        result[mode] = {
            "tokens_per_s": round(tokens / step_s),
            "tflops": round(flops / step_s / 1e12, 2),
            "mfu": _utilisation(flops / step_s / 1e12, result["device"]),
            "speed_over_plain": round(ratio, 4),
            "peak_bytes": rounds[0][mode]["peak_bytes"],
            "largest_loss_difference": max(abs(a - b) / abs(b) for a, b in losses),
        }
        print(mode, result[mode])
    print(json.dumps(result))


def _mode(text: str) -> str:
    if not re.fullmatch(r"plain(-recompute)?|[1-9]\d*(-recompute|-offload)?", text):
        raise argparse.ArgumentTypeError(f"{text} is none of plain, plain-recompute, 1, 1-recompute, 1-offload, 2, ...")
    return text


def _peak_bytes(device: str) -> int | None:
    import torch

    return int(torch.cuda.max_memory_allocated()) if device == "cuda" else None


def _device(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def _utilisation(tflops: float, device: str) -> float | None:
    peak = next((value for name, value in PEAK_TFLOPS.items() if name in device), None)
    return round(tflops / peak, 3) if peak else None


if __name__ == "__main__":
    main()
