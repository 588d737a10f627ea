"""Measure a newcomer's warm-up: from the start of its process until it could run, with and without others' work.

A worker of a machine that the run has not seen imports, captures the model and measures the device before it joins.
With the run's shared work it takes over what another worker has captured and measured. Rounds alternate; every
worker has an empty cache, as a new machine has. All times are from the start of the process.

    python -m benchmarks.newcomer [--rounds 3] [SCRIPT [ARGUMENT ...]]

Without a script the model is a GPT-2 of 2.5 billion parameters: 54 layers, 1,920 wide. Its state is never made: a
newcomer gets that from its peers. The last line is JSON.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from varuna.core.messages import Hello, WorkFound, WorkOffered, WorkSought
from varuna.fleet.manager.shared_work import SharedWork
from varuna.fleet.state.inputs import ConnectionLost, MessageReceived
from varuna.fleet.workers.worker_server import WorkerServer

_TOKEN, _BOUND_S = "a benchmark's", 240.0
_SCRIPT = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import varuna

    config = GPT2Config(n_layer=54, n_embd=1920, n_head=20, use_cache=False)


    class Tokens(torch.utils.data.Dataset):
        def __len__(self):
            return 1 << 20

        def __getitem__(self, index):
            tokens = torch.arange(index, index + 1024) % config.vocab_size
            return {"input_ids": tokens, "labels": tokens}


    def adamw(parameters):
        return torch.optim.AdamW([parameter for _, parameter in parameters], lr=3e-4)


    trainer = varuna.Trainer(lambda: GPT2LMHeadModel(config), Tokens(), adamw, 512)
    for step in trainer.steps(1000):
        pass
"""


class Newcomer(NamedTuple):
    """One worker's way into a run."""

    asked_s: float
    """until it first sought the run's work: after imports, with a model that it has built without data"""
    captured_s: float
    """until it had its graphs"""
    joined_s: float
    """until it could run: with times of its device"""


class Run:
    """The part of a manager that newcomers meet before they join."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[tuple[float, MessageReceived | ConnectionLost]] = queue.SimpleQueue()
        self._server = WorkerServer(port=0, token=_TOKEN, is_ours=lambda name: True, on_event=self._hear)
        self._server.start()
        self.work = SharedWork()
        self._number = 0

    def _hear(self, event: MessageReceived | ConnectionLost) -> None:
        self._heard.put((time.monotonic(), event))

    def newcomer(self, script: list[str], *, shares: bool) -> Newcomer:
        """Start a worker on a machine of its own, and end it when it has joined."""
        self._number += 1
        name = f"w{self._number}"
        with tempfile.TemporaryDirectory() as cache:
            told = {"VARUNA_MANAGER": self._server.worker_url, "VARUNA_TOKEN": _TOKEN, "VARUNA_WORKER": name}
            began_s = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, *script],
                env={**os.environ, **told, "XDG_CACHE_HOME": cache},
                stdout=subprocess.DEVNULL,
            )
            try:
                return self._await(name, began_s, shares=shares)
            finally:
                process.kill()
                process.wait()

    def _await(self, name: str, began_s: float, *, shares: bool) -> Newcomer:
        asked_s = captured_s = 0.0
        while True:
            at_s, event = self._heard.get(timeout=_BOUND_S)
            if event.worker != name or isinstance(event, ConnectionLost):
                continue
            match event.message:
                case WorkSought() | WorkOffered() as message:
                    asked_s = asked_s or at_s - began_s
                    for answer in self._answers(name, message, shares=shares):
                        captured_s = captured_s or (at_s - began_s if answer.data else 0.0)
                        self._server.send(name, answer)
                    if isinstance(message, WorkOffered):
                        captured_s = captured_s or at_s - began_s
                case Hello():
                    return Newcomer(asked_s, captured_s, at_s - began_s)

    def _answers(self, name: str, message: WorkSought | WorkOffered, *, shares: bool) -> list[WorkFound]:
        if not shares:
            return [WorkFound(key=message.key, data=b"")] if isinstance(message, WorkSought) else []
        return [found for _, found in self.work.answer_worker(name, message, {name}, time.monotonic())]

    def stop(self) -> None:
        """Close the door."""
        self._server.stop()


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "train.py"
        own.write_text(textwrap.dedent(_SCRIPT))
        script = args.script or [str(own)]
        run.newcomer(script, shares=True)  # the first of the run does the work
        found: dict[bool, list[Newcomer]] = {False: [], True: []}
        for _ in range(args.rounds):
            for shares in found:
                found[shares].append(run.newcomer(script, shares=shares))
    run.stop()
    table = {
        "with others' work" if shares else "alone": {
            "asks_s": statistics.median(each.asked_s for each in several),
            "has its graphs_s": statistics.median(each.captured_s for each in several),
            "joins_s": statistics.median(each.joined_s for each in several),
        }
        for shares, several in found.items()
    }
    for name, row in table.items():
        told = ", ".join(f"{what.removesuffix('_s')} after {value:.1f} s" for what, value in row.items())
        print(f"{name:>18}: {told}")
    print(json.dumps({"script": args.script, "rounds": args.rounds, **table}))


if __name__ == "__main__":
    main()
