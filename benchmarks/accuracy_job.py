"""The jobs of ``simulator_accuracy.py``: real compute, or compute that sleeps; with or without an emulated network.

As a training script it is what ``varuna calibrate`` measures. With ``--plan`` it runs that plan as one rank of many
(torchrun's variables) and prints, as JSON, each step's seconds, and medians: of each kind of action, of waits, of what
lies between two steps; and what heartbeats would have told a manager of the first half of the steps.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import varuna  # noqa: E402
from benchmarks.emulated.chain import Chain, Rows  # noqa: E402
from benchmarks.emulated.network import NETWORKS, delay_sends, run_on_time  # noqa: E402
from benchmarks.engine_overhead import Tokens, build  # noqa: E402
from benchmarks.timed import step_times  # noqa: E402
from varuna.core.devices import WorkerGroups  # noqa: E402
from varuna.core.model import JobFacts  # noqa: E402
from varuna.core.plan import Plan  # noqa: E402
from varuna.core.times import RankTimes  # noqa: E402
from varuna.engine.base.transport import Group  # noqa: E402
from varuna.engine.worker.reporting import WARM_STEPS  # noqa: E402
from varuna.job.spec import JobSpec  # noqa: E402
from varuna.job.start import begin  # noqa: E402
from varuna.membership.static import StaticMembership, world_from_environment  # noqa: E402

UNIT_S = 0.01
"""Seconds of a slept section's forward."""
SLOWER = 2.0
"""The factor of slow ranks, in a mix."""
_slower = [1.0]
"""The factor of this one."""
SECTIONS = 8
WIDTH = 4096


@torch.library.custom_op("varuna_bench::slept", mutates_args=())
def slept(x: Tensor, weight: Tensor) -> Tensor:
    """A product whose forward takes a unit, and its backward two."""
    time.sleep(UNIT_S * _slower[0])
    return x * weight


@torch.library.custom_op("varuna_bench::slept_backward", mutates_args=())
def slept_backward(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    time.sleep(2 * UNIT_S * _slower[0])
    return gradient * weight, (gradient * x).sum(0)


@slept.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@slept_backward.register_fake
def _(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return torch.ops.varuna_bench.slept_backward(x, weight, gradient)


slept.register_autograd(_back, setup_context=_keep)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.varuna_bench.slept(x, self.weight)
        return result


def chain(width: int, *, tied: bool) -> Chain:
    """Sections that sleep; the last one has the first one's parameter, if they are tied."""
    made = Chain(Layer(width) for _ in range(SECTIONS))
    if tied:
        made.layers[-1].weight = made.layers[0].weight
    return made


def options_of(model: str, global_batch: int, micro_batch: int, width: int, *, tied: bool) -> dict[str, Any]:
    """The job: GPT-2 of 6 layers and width 256, or a chain of sections that sleep."""
    if model == "gpt2":
        return {
            "model": build,
            "dataset": Tokens(),
            "optimizer": lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3),
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "clip_grad_norm": 1.0,
        }
    return {
        "model": lambda: chain(width, tied=tied),
        "dataset": Rows(width),
        "optimizer": lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-3),
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "cut": [f"layers.{k}" for k in range(1, SECTIONS)],
    }


def half(steps: int) -> int:
    """Of so many steps: the first ones, of which heartbeats tell."""
    return (steps + WARM_STEPS) // 2


def run(spec: JobSpec, plan: Plan, steps: int) -> None:
    """One rank of a real run of ``plan``."""
    world = world_from_environment()

    def planned(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan

    session = begin(spec, steps, StaticMembership(world, planned))
    times: list[float] = []
    actions: dict[str, list[float]] = {}
    waited: list[float] = []
    rest: list[float] = []
    reported: RankTimes | None = None
    for step_s in step_times(session):
        times.append(step_s)
        assert session.current is not None
        taken = session.current.runtime.times
        assert taken is not None
        waited.append(taken.waited_s)
        rest.append(step_s - (taken.end_s - taken.begin_s))
        for took in taken.actions:
            actions.setdefault(took.kind, []).append(took.seconds)
        if len(times) == half(steps):
            reported = session.heartbeat.reporter.drain()
    assert reported is not None
    told: dict[str, Any] = {"rank": world.rank, "times": times, "waited": median(waited), "rest": median(rest)}
    told |= {"actions": {k: median(v) for k, v in actions.items()}, "reported": reported.model_dump()}
    print("told", json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("gpt2", "slept"), required=True)
    parser.add_argument("--network", choices=tuple(NETWORKS), default="none")
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--width", type=int, default=WIDTH, help="of slept sections")
    parser.add_argument("--tied", action="store_true", help="the first and the last slept section")
    parser.add_argument("--reduction", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of what slept sections take")
    parser.add_argument("--plan", help="a plan as JSON")
    parser.add_argument("--steps", type=int, default=22)
    args = parser.parse_args()
    _slower[0] = args.slower
    if args.model == "slept":
        run_on_time()
    delay_sends(
        Group,
        NETWORKS[args.network],
        NETWORK_UNIT_S[args.model],
        seed=int(os.environ.get("RANK", "0")),
        message_bytes=MESSAGE_BYTES[args.model],
    )
    options = options_of(args.model, args.global_batch, args.micro_batch, args.width, tied=args.tied)
    # Calibrations measure lines without compression, and rows of equal numbers would hardly need any bytes.
    options["network"] = varuna.Network(reduction=args.reduction, compress=False)
    if args.plan:
        run(JobSpec(**options), Plan.model_validate_json(args.plan), args.steps)
    else:
        for _ in varuna.Trainer(**options).steps(args.steps):
            pass


NETWORK_UNIT_S = {"gpt2": 0.02, "slept": 2 * UNIT_S}
"""The unit of the emulated networks: about a stage's forward."""
MESSAGE_BYTES = {"gpt2": 2 * 128 * 256 * 4, "slept": 2 * WIDTH * 4}
"""Bytes of a message for a micro-batch of two; networks are emulated by the time that these take."""


if __name__ == "__main__":
    main()
