"""Captures, weighs and cuts models that no single machine could hold, on fake tensors.

Each model gets a fresh process, whose wall and processor time (imports included) and largest
resident memory are reported; the last line is JSON. On a busy machine the processor time is the one to compare.

    python benchmarks/partition_at_scale.py [--model gpt2-2.5b ...] [--json]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTH = 1024
TIMEOUT_S = 600
SHAPES: dict[str, dict[str, int]] = {
    "gpt2-2.5b": {"layers": 54, "width": 1920, "heads": 20},
    "gpt2-8.3b": {"layers": 72, "width": 3072, "heads": 32},
    "gpt2-20b": {"layers": 96, "width": 4096, "heads": 32},
    "gpt2-200b": {"layers": 100, "width": 12960, "heads": 108},
    "llama3-405b": {"layers": 126, "width": 16384, "heads": 128},
}
"""The paper's GPT-2 models (vocabulary 50,304), and Llama 3 405B (8 key/value heads, feed-forward 53,248)."""


def build(name: str) -> Any:
    """The unmodified Hugging Face model with default flags."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    if name.startswith("gpt2"):
        sizes: dict[str, Any] = {"n_layer": shape["layers"], "n_embd": shape["width"], "n_head": shape["heads"]}
        return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=50304, n_positions=LENGTH, **ends))
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=shape["layers"],
            hidden_size=shape["width"],
            intermediate_size=53248,
            num_attention_heads=shape["heads"],
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            **ends,
        )
    )


def measure(name: str) -> dict[str, Any]:
    """Partition one model in this process."""
    import torch

    from varuna.partition.capture.capture import Recipe
    from varuna.partition.model import partition

    torch.set_num_threads(1)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    begin_s = time.perf_counter()
    model = partition(
        Recipe(lambda: build(name)),
        {"input_ids": tokens, "labels": tokens},
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4),
    )
    costs = [section.forward_s for section in model.facts.sections]
    return {
        "model": name,
        "parameters": sum(torch.Size(shape).numel() for shape in model.shapes.values()),
        "partition_s": round(time.perf_counter() - begin_s, 2),
        "ops": sum(len(section.module.graph.nodes) for section in model.sections),
        "sections": len(costs),
        "heaviest_share": round(max(costs) / sum(costs), 4),
        "most_bytes_per_cut": max(section.boundary_bytes for section in model.facts.sections),
        "tied": [tied.name for tied in model.facts.tied],
        "cpu_s": round(time.process_time(), 2),
        "resident_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }


def measure_apart(name: str) -> dict[str, Any]:
    """Partition one model in a fresh process.

    Raises:
        SystemExit: it failed.
    """
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, str(Path(__file__).resolve()), "--here", name]
    begin_s = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "wall_s": round(time.perf_counter() - begin_s, 2)}


def row(found: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{found['model']:<12} {found['parameters']:>15,} {found['wall_s']:>5.1f} s {found['cpu_s']:>5.1f} s "
        f"{found['resident_gib']:>5.2f} GiB {found['sections']:>8} {found['most_bytes_per_cut'] / 2**20:>7.1f} MiB"
    )


def main() -> None:
    """Measure the wished models, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--here", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.here)))
        return
    results = []
    if not options.json:
        print(
            f"{'model':<12} {'parameters':>15} {'wall':>7} {'cpu':>7} {'resident':>9} "
            f"{'sections':>8} {'widest cut':>11}"
        )
    for name in options.model:
        found = measure_apart(name)
        results.append(found)
        if not options.json:
            print(row(found), flush=True)
    print(json.dumps({"length": LENGTH, "models": results}))


if __name__ == "__main__":
    main()
