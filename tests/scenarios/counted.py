"""A script whose workers write down what they do in one slow step of 64 micro-batches; one of them dies in it."""

import argparse
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import torch

import varuna
from tests.scenarios.job import LAYERS, Language, Sentences
from varuna.engine.base.spans import Span, subscribe

STEPS, SLOW_STEP, MICRO_BATCHES = 3, 1, 64
COPIED_AFTER_S = 5.0
"""A round of copies of sums begins so long after the step does, or after the state's copy: ``schedule.copy_pace``."""
NOTED = {("form", "begin"), ("F", "begin"), ("B", "end"), ("send-kept", "end"), ("copy-sum", "end")}
BEFORE = SLOW_STEP - 1, "apply", "begin"


class Diary:
    """Lines of a file: seconds, name, generation, rank, stage, index."""

    def __init__(self, folder: Path, victim: int, micro_batch_s: float) -> None:
        self._folder, self._victim, self._micro_batch_s = folder, victim, micro_batch_s
        self._file = (folder / f"diary-{os.getpid()}").open("w", buffering=1)
        self._lock, self._generation, self._backwards = threading.Lock(), -1, 0
        self._copied = set[int]()
        self.sections: range | None = None
        """that must have been copied before this worker dies; None: a step is too short for copies"""

    def hear(self, span: Span) -> None:
        """Note it; die, if it is time."""
        is_noted = span.step == SLOW_STEP and (span.name, span.phase) in NOTED
        if not is_noted and (span.step, span.name, span.phase) != BEFORE:
            return
        if span.name == "F":
            time.sleep(self._micro_batch_s)
        with self._lock:
            if span.name == "form":
                self._generation = span.index
            print(time.monotonic(), span.name, self._generation, span.rank, span.stage, span.index, file=self._file)
            self._backwards += span.name == "B"
            if span.name == "copy-sum":
                self._copied.add(span.index)
            if span.name == "B" and span.rank == self._victim and self._generation <= 0:
                self._die_in_time()

    def _die_in_time(self) -> None:
        is_copied = self.sections is None or self._copied >= set(self.sections)
        if self._backwards >= 8 and is_copied and not (self._folder / "dead").exists():
            (self._folder / "dead").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--victim", type=int, default=0, help="rank")
    parser.add_argument("--micro-batch-s", type=float, default=0.0)
    args = parser.parse_args()
    diary = Diary(args.folder, args.victim, args.micro_batch_s) if args.folder else None
    if diary is not None:
        subscribe(diary.hear)
    trainer = varuna.Trainer(
        partial(Language, LAYERS, 0.1),
        Sentences(unstable=False),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2),
        MICRO_BATCHES,
        micro_batch=1,
        cut=LAYERS + 1,
        clip_grad_norm=1.0,
    )
    for step in trainer.steps(STEPS):
        if diary is not None and step.plan.stages > 1:
            diary.sections = step.plan.sections_at(args.victim)
        if step.is_main:
            print(f"step {step.index} loss {step.loss!r} generation {step.generation}", flush=True)


if __name__ == "__main__":
    main()
