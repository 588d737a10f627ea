"""Modules that a micro-batch, or a recovery, enters: ``python -m tests.walks step`` or ``recovery``.

Runs four workers as 2x2, threads of this process, and notes each function of ``varuna`` that is called while a later
step runs, or from a worker's death to the end of the next step. ``docs/walks.md`` shows the ones that matter.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import varuna
from varuna.engine.base.spans import Span
from varuna.testing import Fault, Killed, run

STEPS, WATCHED = 6, 4
"""of the run, and the step that is watched: everything that happens once is over by then"""
_ROOT = Path(varuna.__file__).parent


class Entered:
    """Functions that were called, by module; counts while ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.functions = defaultdict[str, set[str]](set)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this block, watch this thread and all that begin."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # as Python's own documentation says

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(str(_ROOT)):
            path = Path(frame.f_code.co_filename).relative_to(_ROOT).with_suffix("")
            if path.parts[0] != "testing":
                self.functions[".".join(path.parts)].add(frame.f_code.co_qualname)


class _Death(Fault):
    """The death of rank 3 in B of the step before the watched one, from which on functions count."""

    def __init__(self, entered: Entered) -> None:
        super().__init__(3, WATCHED - 1, "B", Killed("a walk"))
        self._entered = entered

    def on_span(self, span: Span) -> None:
        """Die, if this is the place."""
        try:
            super().on_span(span)
        except Killed:
            self._entered.on = True
            raise


class _Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {"input": torch.randn(8, generator=drawn), "goal": torch.randn(8, generator=drawn)}


def walk(*, recovery: bool) -> dict[str, set[str]]:
    """Return the functions that a step enters, or a recovery with the step after it, by module below ``varuna``."""
    entered = Entered()

    def script() -> None:
        torch.manual_seed(0)
        trainer = varuna.Trainer(
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
            _Samples(),
            loss=lambda output, batch: (output - batch["goal"]).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            global_batch=16,
            micro_batch=4,
        )
        for step in trainer.steps(STEPS):
            if recovery:
                entered.on = entered.on and step.index < WATCHED - 1
            else:
                entered.on = step.index == WATCHED - 1

    with entered.watching():
        run(script, workers=4, stages={4: 2, 3: 3}, faults=[_Death(entered)] if recovery else [])
    return dict(entered.functions)


if __name__ == "__main__":
    for module, functions in sorted(walk(recovery=sys.argv[1:] == ["recovery"]).items()):
        print(f"{module}: {', '.join(sorted(functions))}")
