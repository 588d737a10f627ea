"""Varuna with slept compute: the whole engine, but a stage sleeps instead of multiplying.

    python -m benchmarks.emulated.ours POLICY STAGES MICRO_BATCHES NETWORK UNIT_S STEPS [FOLDER]

Prints the seconds of each step; each rank's times of the last one go to FOLDER. Captured sections of a tiny model
really run (a multiplication), and real messages, gradients, votes and optimizer steps pass; only the time of compute is
made up, so that 8 ranks fit on 2 cores.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.emulated import wires
from benchmarks.emulated.chain import Chain, Rows
from benchmarks.emulated.network import NETWORKS, delay_sends, run_on_time
from benchmarks.emulated.work import LENGTHS, lengths_of, work
from benchmarks.forked import run_ranks
from benchmarks.schedules import costs_of, planned
from benchmarks.timed import step_times
from varuna.core.model import Network
from varuna.engine.base.transport import Group
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import DeferredWeightGrad, Results, Stage
from varuna.engine.stage.tape import Tape
from varuna.engine.worker import generation
from varuna.job.options import Collate
from varuna.job.spec import JobSpec
from varuna.job.start import open_session
from varuna.membership.static import StaticMembership, world_from_environment

MICRO_BATCH = 2
BACKWARD, INPUT = 2.0, 1.2
"""Units of B, and of I: 0.6 of B, as deferred linears were measured to take; W takes the rest."""


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Texts:
    """Rows as long as the work of their micro-batch says."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"x": torch.ones(self._lengths[position // MICRO_BATCH % len(self._lengths)])}


class Slept(Stage):
    """A stage of one section that sleeps."""

    unit_s = 0.02

    def _sleep(self, units: float, micro_batch: int, kind: str) -> None:
        time.sleep(work().units(units, self.index, micro_batch, kind) * self.unit_s)

    def forward(
        self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int, **given: Any
    ) -> tuple[dict[str, Tensor], Results, list[Tape], dict[str, Tensor]]:
        self._sleep(1.0, micro_batch, "F")
        return super().forward(values, examples, step, micro_batch, **given)

    def record(
        self, values: Mapping[str, Tensor], examples: Examples, step: int, micro_batch: int, **given: Any
    ) -> list[Tape]:
        self._sleep(1.0, micro_batch, "R")
        return super().record(values, examples, step, micro_batch, **given)

    def backward(
        self, tapes: list[Tape], gradients: dict[str, Tensor], section_done: Callable[[int], None]
    ) -> dict[str, Tensor]:
        self._sleep(BACKWARD, tapes[0].micro_batch, "B")
        return super().backward(tapes, gradients, section_done)

    def input_backward(
        self, tapes: list[Tape], gradients: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[DeferredWeightGrad]]:
        self._sleep(INPUT, tapes[0].micro_batch, "B")
        return super().input_backward(tapes, gradients)

    def weight_backward(self, left: list[DeferredWeightGrad], section_done: Callable[[int], None]) -> None:
        self._sleep(BACKWARD - INPUT, left[0][1], "W")
        super().weight_backward(left, section_done)


def main() -> None:
    policy, stages, micro_batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    network, unit_s, steps = NETWORKS[sys.argv[4]], float(sys.argv[5]), int(sys.argv[6])
    folder = Path(sys.argv[7]) if sys.argv[7:] else None
    Slept.unit_s = unit_s
    setattr(generation, "Stage", Slept)  # noqa: B010 - every stage of this process sleeps
    costs = costs_of(stages, network, input_share=INPUT / BACKWARD, weight_share=1 - INPUT / BACKWARD)
    plan, differs = planned(costs, policy, micro_batches, MICRO_BATCH), work().spread > 0
    spec = JobSpec(
        lambda: Chain(Scale() for _ in range(stages)),
        Texts(lengths_of(work().shares)) if differs else Rows(wires.width()),
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.0),
        global_batch=plan.global_batch,
        micro_batch=MICRO_BATCH,
        cut=[f"layers.{k}" for k in range(1, stages)],
        collate=Collate(lengths=LENGTHS if differs else None),
        network=Network(compress=False),  # peers send as many bytes, and rows of equal numbers would hardly need any
    )
    torch.set_num_threads(1)
    assert len(spec.partitioned.sections) == stages

    def rank() -> list[float]:
        run_on_time()
        wires.enter(int(os.environ["RANK"]))
        world = world_from_environment()
        delay_sends(Group, network, unit_s, seed=world.rank)
        session = open_session(spec, steps, StaticMembership(world, lambda *_: plan))
        times = list(step_times(session))
        if folder is not None:
            assert session.current is not None
            (folder / f"{world.rank}.json").write_text(json.dumps(session.current.runtime.times))
        return times

    print("times", json.dumps(run_ranks(stages, rank)), flush=True)


if __name__ == "__main__":
    main()
