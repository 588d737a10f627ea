"""Measure Varuna on one GPU in ten minutes: each part is a process with a time limit, the most valuable first.

    python benchmarks/gpu_session.py --out found                      # all parts, in 570 s at most
    python benchmarks/gpu_session.py --out found --parts facts loop
    python benchmarks/gpu_session.py --out found --tiny               # tries itself, on a null GPU or a small one

``make gpu-session`` prepares what a machine without a network needs. Each finding is a line of JSON in
``found/results.jsonl``, written at once; ``log.txt`` has what the parts print, ``kernels.txt`` one step by kernels, and
``tests.xml`` the tests. docs/gpus.md says what each part settles.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 570.0
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Size:
    """Dimensions of the model, and sizes of what is timed."""

    length: int = 1024
    micro_batch: int = 4
    width: int = 2048
    layers: int = 8
    vocabulary: int = 32_000
    copied_bytes: int = 1 << 30
    matmul: int = 8192
    attention: tuple[tuple[int, int], ...] = ((4, 1024), (1, 4096), (1, 8192))
    """samples and tokens"""


FULL = Size()
TINY = Size(64, 2, 128, 2, 1024, 1 << 24, 512, ((2, 64), (1, 128)))
LIMITS_S = {
    "facts": 45.0,
    "tests": 130.0,
    "loop": 110.0,
    "kills": 80.0,
    "pipeline": 70.0,
    "checkpoint": 45.0,
    "offload": 50.0,
    "compile": 120.0,
}
"""Seconds of each part at most, in the order of their value."""


def size() -> Size:
    """Return the size of this session."""
    return TINY if os.environ.get("GPU_SESSION_TINY") else FULL


def note(**found: object) -> None:
    """Write one finding."""
    at_s = time.time() - float(os.environ["GPU_SESSION_BEGUN_S"])
    line = json.dumps({"at_s": round(at_s, 1), **found})
    with (Path(os.environ["GPU_SESSION_OUT"]) / "results.jsonl").open("a") as file:
        file.write(f"{line}\n")
    print(line, flush=True)


# ---- the job


def llama() -> Any:
    """A Llama of 0.5 billion parameters with a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    here = size()
    config = LlamaConfig(
        vocab_size=here.vocabulary,
        hidden_size=here.width,
        intermediate_size=here.width * 11 // 4,
        num_hidden_layers=here.layers,
        num_attention_heads=here.width // 64,
        num_key_value_heads=max(1, here.width // 256),
        max_position_embeddings=here.length,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class Tokens:
    """Rows of random tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tokens = torch.randint(0, 1000, (size().length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def adamw(named: Any) -> Any:
    """Fused AdamW."""
    import torch

    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4, fused=True)


def trainer(**more: Any) -> Any:
    """Return a trainer of the job."""
    import varuna

    batch = size().micro_batch
    given: dict[str, Any] = {
        "global_batch": batch * MICRO_BATCHES,
        "micro_batch": batch,
        "device": "cuda",
        "precision": "bf16",
    }
    return varuna.Trainer(llama, Tokens(), adamw, **{**given, "on_nan": "stop", **more})


def timed(training: Any, steps: int, each: Callable[[Any], None] = lambda step: None) -> tuple[float, list[float]]:
    """Return the median seconds of a step, without the first two, and the losses."""
    times, losses, last_s = list[float](), list[float](), time.perf_counter()
    for step in training.steps(steps):
        losses.append(step.loss)
        times.append(time.perf_counter() - last_s)
        each(step)
        last_s = time.perf_counter()
    return statistics.median(times[2:]), losses


def memory() -> dict[str, int]:
    """Return the most bytes that torch allocated and reserved."""
    import torch

    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


# ---- parts


def facts() -> None:
    """The machine: copies, launches, matmuls, and attention with a mask against causal attention."""
    import torch

    here, device = size(), "cuda"
    found = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    note(part="facts", gpu=found.name, memory_bytes=found.total_memory, **versions)

    def seconds(work: Callable[[], object], times: int = 5) -> float:
        work()
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun_s) / times

    begun_s = time.perf_counter()
    pinned = torch.empty(here.copied_bytes, dtype=torch.uint8, pin_memory=True)
    note(part="facts", what="pin", s_per_gib=(time.perf_counter() - begun_s) * (1 << 30) / here.copied_bytes)
    there, pageable = torch.empty_like(pinned, device=device), torch.ones(here.copied_bytes, dtype=torch.uint8)
    copies: dict[str, Callable[[], object]] = {
        "to the device, pinned": lambda: there.copy_(pinned, non_blocking=True),
        "to the host, pinned": lambda: pinned.copy_(there, non_blocking=True),
        "to the device, pageable": lambda: there.copy_(pageable),
        "to the host, pageable": lambda: pageable.copy_(there),
    }
    for what, work in copies.items():
        note(part="facts", what=what, gb_per_s=here.copied_bytes / seconds(work, 3) / 1e9)
    small = torch.zeros(8, device=device)
    note(part="facts", what="launch", us=seconds(lambda: small.add_(1), 1000) * 1e6)
    note(part="facts", what="item", us=seconds(lambda: small[0].item(), 200) * 1e6)
    square = torch.randn(here.matmul, here.matmul, device=device, dtype=torch.bfloat16)
    note(part="facts", what="matmul", tflops=2 * here.matmul**3 / seconds(lambda: square @ square) / 1e12)
    for samples, length in here.attention:
        shape = (samples, 32, length, 64)
        given = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        triangle = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(samples, 1, -1, -1)
        causal_s = seconds(partial(_attend, given, is_causal=True))
        mask_s = seconds(partial(_attend, given, attn_mask=triangle))
        times = {"causal_ms": causal_s * 1e3, "mask_ms": mask_s * 1e3, "mask_over_causal": mask_s / causal_s}
        note(part="facts", what="attention", tokens=length, **times)


def _attend(given: list[Any], **how: Any) -> None:
    import torch

    query, key, value = given
    torch.autograd.backward(torch.nn.functional.scaled_dot_product_attention(query, key, value, **how), query)


def loop() -> None:
    """One process: a plain loop with fp32 masters, then the same job under Varuna."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    tokens = size().micro_batch * MICRO_BATCHES * size().length
    plain_s, parameters = _plain()
    rates = {"tokens_per_s": tokens / plain_s, "tflops": 6 * parameters * tokens / plain_s / 1e12}
    note(part="loop", what="plain", step_s=plain_s, **rates, **memory())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    watch = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    is_tiny, promised = size() is TINY, list[int]()

    def each(step: Any) -> None:
        promised[:] = step.plan.first.memory_bytes or ()
        if step.index == 3:
            torch.cuda.set_sync_debug_mode("warn")  # each call that blocks the host says where
        if step.index == 4:
            torch.cuda.set_sync_debug_mode("default")
        if step.index == 5 and not is_tiny:
            watch.start()
        if step.index == 6 and not is_tiny:
            watch.stop()

    ours_s, losses = timed(trainer(num_workers=2), 9, each)
    found = {"step_s": ours_s, "plain_over_ours": plain_s / ours_s, "tflops": 6 * parameters * tokens / ours_s / 1e12}
    note(part="loop", what="ours", **found, losses=losses, promised_bytes=promised, **memory())
    if not is_tiny:
        table = watch.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90)
        (Path(os.environ["GPU_SESSION_OUT"]) / "kernels.txt").write_text(table)


def _plain() -> tuple[float, int]:
    """Seconds of a step of a plain loop, and the number of parameters."""
    import torch

    here, data, times = size(), Tokens(), []
    torch.manual_seed(0)
    model = llama().to("cuda", torch.bfloat16).train()
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for step in range(5):
        begun_s = time.perf_counter()
        for master in masters:
            master.grad = torch.zeros_like(master)
        for number in range(MICRO_BATCHES):
            first = (step * MICRO_BATCHES + number) * here.micro_batch
            rows = torch.stack([data[first + place]["input_ids"] for place in range(here.micro_batch)]).to("cuda")
            (model(input_ids=rows, labels=rows).loss / MICRO_BATCHES).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert master.grad is not None
                master.grad += parameter.grad
                parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times[2:]), sum(master.numel() for master in masters)


def _variant(name: str, steps: int = 6, **more: Any) -> None:
    seconds, losses = timed(trainer(**more), steps)
    note(part=name, step_s=seconds, losses=losses, **memory())


def offload() -> None:
    """Optimizer state in host memory: what it costs to stream it."""
    import varuna

    _variant("offload", memory=varuna.Memory(offload_optimizer=True))


def compile() -> None:
    """Inductor on sections: whether, for how long, and how fast afterwards."""
    _variant("compile", compile=True)


def checkpoint() -> None:
    """A checkpoint after every step, against the same without."""
    import varuna

    folder = Path("/dev/shm/varuna-gpu-session")
    shutil.rmtree(folder, ignore_errors=True)
    _variant("without checkpoints")
    _variant("checkpoint", checkpoints=varuna.Checkpoints(folder, every=1, keep_last=1))
    shutil.rmtree(folder, ignore_errors=True)


def pipeline() -> None:
    """Two processes that share the GPU, against one: losses, and each stage's peak against its promise."""
    for ranks in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        world |= {"VARUNA_CALIBRATION": "none"}
        command = [sys.executable, __file__, "--run", "rank"]
        at = [{**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        for process in [subprocess.Popen(command, env=each) for each in at]:
            process.wait()


def rank() -> None:
    """One of them."""
    plans: list[Any] = []
    seconds, losses = timed(trainer(), 5, lambda step: plans.append(step.plan))
    place = plans[-1].place_of(int(os.environ["RANK"]))
    where = {"stages": plans[-1].stages, "stage": place.stage}
    note(part="pipeline", **where, step_s=seconds, losses=losses, promised_bytes=plans[-1].memory_bytes, **memory())


def kills() -> None:
    """Three workers on the GPU, two of them killed: losses against one process, and the seconds of a morph."""
    folder = Path(tempfile.mkdtemp())
    job = ["tests/scenarios/job.py", "--steps", "20", "--folder", str(folder), "--slow", "0.05"]
    alone, _, _ = _losses(job)
    run = ["-m", "varuna.cli.main", "run", "--workers", "3", "--stages", "2", "--run-dir", str(folder / "run"), *job]
    found, took_s, said = _losses([*run, "--misbehave", "F:end:6:0,B:end:12:1"])
    worst = max((abs(found[step] / alone[step] - 1) for step in alone if step in found), default=None)
    note(part="kills", steps=len(found), worst_difference=worst, took_s=took_s, said=said[-1500:])


def _losses(command: list[str]) -> tuple[dict[int, float], float, str]:
    begun_s = time.monotonic()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        note(part="kills", failed=done.stderr[-1500:])
    found = re.findall(r"^step (\d+) loss (\S+)", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}, time.monotonic() - begun_s, done.stderr


PARTS: dict[str, Callable[[], None]] = {
    "facts": facts,
    "loop": loop,
    "kills": kills,
    "pipeline": pipeline,
    "rank": rank,
    "checkpoint": checkpoint,
    "offload": offload,
    "compile": compile,
}

# ---- parts as processes


def _run(part: str) -> None:
    if size() is TINY:
        import torch

        torch.backends.cuda.enable_cudnn_sdp(False)  # a null GPU has no cuDNN
    PARTS[part]()
    sys.stdout.flush()
    os._exit(0)  # it is done: threads of torch that still wait must not fail it


def _command(part: str) -> list[str]:
    if part != "tests":
        return [sys.executable, __file__, "--run", part]
    report = f"--junitxml={os.environ['GPU_SESSION_OUT']}/tests.xml"
    pytest = (sys.executable, "-m", "pytest", "-m", "gpu", "tests/unit/engine/test_gpu.py", "-q", "-n", "4")
    return [*pytest, "-W", "default", "--timeout", "60", "-p", "no:cacheprovider", "--tb=short", report]


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a group of its own, whose processes all end with the block."""
    with log.open("a") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    """Run parts one after the other; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-session"), help="folder for what is found")
    parser.add_argument("--parts", nargs="+", choices=list(LIMITS_S), default=list(LIMITS_S))
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for all of them")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all limits, on a machine with few cores")
    parser.add_argument("--tiny", action="store_true", help="a small model: tries the script, not the GPU")
    parser.add_argument("--run", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        _run(options.run)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(
        GPU_SESSION_OUT=str(options.out.resolve()),
        GPU_SESSION_BEGUN_S=str(time.time()),
        PYTHONPATH=paths,
        PYTHONUNBUFFERED="1",
        TRANSFORMERS_VERBOSITY="error",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="4",
        **({"GPU_SESSION_TINY": "1"} if options.tiny else {}),
    )
    begun_s, failed = time.monotonic(), 0
    for part in options.parts:
        left_s = options.total - (time.monotonic() - begun_s)
        if left_s < 15:
            note(part=part, skipped="no time left")
            continue
        part_s, limit_s = time.monotonic(), min(options.patience * LIMITS_S[part], left_s - 5)
        with _running(_command(part), options.out / "log.txt") as process:
            try:
                status: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit_s:.0f} s"
        failed |= status != 0
        note(part=part, exit=status, took_s=round(time.monotonic() - part_s, 1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
