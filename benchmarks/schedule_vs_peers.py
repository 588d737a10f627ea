"""Step time of Varuna's engine and its peers': real messages, slept compute, an emulated network or real wires.

    make bench-peers                                                 # once: installs the peers
    python benchmarks/schedule_vs_peers.py --stages 8 --micro-batches 32 --network mid [--json]
    python benchmarks/schedule_vs_peers.py --stages 4 --micro-batches 16 --line 250
    python benchmarks/schedule_vs_peers.py --stages 8 --micro-batches 32 --spread 0.6 --rounds 5

Every engine runs as it is installed, with the same tensors over the same links, recomputes every stage and holds
one set of activations. Compute is slept (one unit a forward, one a recompute, two a backward), so that 8 ranks fit
on 2 cores. Each round starts every engine afresh; the figure is the median over all steps but each start's first
ones. Networks are those of ``benchmarks/emulated/network.py``. With ``--line`` every rank has a host of its own, a
network namespace whose line ``tc`` makes so narrow in both directions, and messages of 256 KiB. With ``--spread``
micro-batches differ in length, anew in each round, with ``--slow`` or ``--stall`` the middle stage is slow, always or
now and then; ratios are means over rounds then, and without a network the simulator's figure for ours is shown, too.
The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.emulated.network import NETWORKS  # noqa: E402
from benchmarks.emulated.wires import described  # noqa: E402
from benchmarks.emulated.work import Work, lengths_of  # noqa: E402
from benchmarks.schedules import costs_of, planned  # noqa: E402
from tests.scenarios.network import Network, why_not  # noqa: E402
from varuna.schedule.work_order import by_work  # noqa: E402
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts  # noqa: E402
from varuna.simulator.step import simulate  # noqa: E402

PEERS = ROOT / ".peers/bin/python"
OURS = ("adaptive", "varuna")
THEIRS = ("torch-interleaved1f1b", "torch-gpipe", "torch-1f1b", "megatron", "deepspeed")
WARM_UP_STEPS = {True: 2, False: 1}
"""Ours needs one more: the first step of a run is applied on copies, to learn whether its code talks to others."""
LIMIT_S = 300


def bound(stages: int, micro_batches: int) -> float:
    """Units that no schedule with R = F = 1, B = 2 and whole backwards can beat."""
    return 4 * micro_batches + 3 * (stages - 2)


def run(engine: str, options: argparse.Namespace, wires: Network | None, work: Work) -> list[float]:
    """Step times in units, warm-up left out."""
    ours = engine in OURS
    steps = options.iterations + WARM_UP_STEPS[ours]
    given = [engine, *map(str, (options.stages, options.micro_batches, options.network, options.unit_s, steps))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **work.described()}
    if wires is not None:
        environment |= described(wires)
    command = (
        [sys.executable, "-m", "benchmarks.emulated.ours"] if ours else [str(PEERS), "-m", "benchmarks.emulated.peers"]
    )
    try:
        done = subprocess.run(
            [*command, *given], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it did not finish within {LIMIT_S} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("times ")]
    if not lines:
        raise RuntimeError(f"it failed:\n{done.stderr[-2000:]}")
    return [seconds / options.unit_s for seconds in json.loads(lines[0].removeprefix("times "))[WARM_UP_STEPS[ours] :]]


def figure(found: list[list[float]], *, varies: bool) -> float:
    """Of an engine: the median of all steps; where each round has other work, the mean of the rounds' medians."""
    return statistics.mean(map(statistics.median, found)) if varies else statistics.median(chain(*found))


def simulated(work: Work) -> float:
    """Units that the simulator predicts for ``adaptive``."""
    paces = [work.slow if stage == work.stages // 2 else 1.0 for stage in range(work.stages)]
    stages = tuple(
        StageCosts(forward_s=pace, recompute_s=pace, backward_s=2 * pace, input_s=1.2 * pace, weight_s=0.8 * pace)
        for pace in paces
    )
    even = costs_of(work.stages, NETWORKS["none"], input_share=0.6, weight_share=0.4)
    pipeline = planned(even, "adaptive", work.micro_batches).first
    return simulate(
        PipelineCosts(stages=stages, links=(LinkCosts(),) * (work.stages - 1)),
        micro_batches=work.micro_batches,
        policy="adaptive",
        stash_limits=pipeline.stash_limits,
        split_last=pipeline.split_last,
        empties=pipeline.empties,
        work=in_order(work) if work.spread else None,
    ).step_s


def in_order(work: Work) -> list[float]:
    """Work of micro-batches as the engine orders them, which knows their lengths."""
    shares = work.shares
    return [shares[number] for number in by_work(lengths_of(shares), work.stages)]


def parse() -> argparse.Namespace:
    """The options, where they do not contradict each other or this machine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--network", choices=("none", "good", "mid", "bad"), default="none")
    parser.add_argument("--line", type=float, metavar="MBIT", help="real lines of so many Mb/s; needs root, ip and tc")
    parser.add_argument("--spread", type=float, default=0.0, metavar="CV", help="of micro-batches' lengths")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times as long the middle stage takes")
    parser.add_argument("--stall", type=float, default=0.0, metavar="UNITS", help="of one in 20 of its actions")
    parser.add_argument("--unit-s", type=float, default=0.02, help="seconds of one forward")
    parser.add_argument("--iterations", type=int, default=3, help="measured steps of each start")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each engine")
    parser.add_argument("--engines", nargs="+", choices=(*OURS, *THEIRS), default=[*OURS, *THEIRS])
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    if not PEERS.exists() and any(engine in THEIRS for engine in options.engines):
        raise SystemExit("the peers are not installed: run make bench-peers once, or name --engines adaptive varuna")
    if options.line is not None and options.network != "none":
        raise SystemExit("--network emulates a network, --line needs none: give one of them")
    if options.line is not None and (reason := why_not("tc")):
        raise SystemExit(reason)
    return options


def measure(options: argparse.Namespace, works: list[Work]) -> dict[str, list[list[float]]]:
    """By engine and round: the units of its steps."""
    samples: dict[str, list[list[float]]] = {engine: [] for engine in options.engines}
    with ExitStack() as stack:
        wires = None
        if options.line is not None:
            wires = stack.enter_context(closing(Network(*(f"h{rank}" for rank in range(options.stages)))))
            wires.shape(options.line * 1e6)
        for work in works:
            for engine in options.engines:
                try:
                    samples[engine].append(run(engine, options, wires, work))
                except RuntimeError as error:
                    print(f"{engine} is left out: {error}", file=sys.stderr, flush=True)
                    continue
                if not options.json:
                    print(f"{engine:24}", " ".join(f"{units:7.1f}" for units in samples[engine][-1]), flush=True)
    return samples


def main() -> None:
    """Run every engine in turn and print units, ratios and the bound."""
    options = parse()
    stages, micro_batches = options.stages, options.micro_batches
    varied = options.spread, options.slow, options.stall
    works = [Work(stages, micro_batches, *varied, seed) for seed in range(options.rounds)]
    samples, varies = measure(options, works), works[0].varies
    units = {engine: round(figure(found, varies=varies), 1) for engine, found in samples.items() if found}
    theirs = {engine: found for engine, found in units.items() if engine in THEIRS}
    if theirs and not options.json:
        best = min(theirs, key=lambda engine: theirs[engine])
        for engine in units.keys() - theirs.keys():
            print(f"{engine} takes {units[engine] / theirs[best]:.3f} of the time of {best}")
        if not varies:
            print(f"bound for whole backwards without a network: {bound(stages, micro_batches):.0f} units")
    result = {"stages": stages, "micro_batches": micro_batches, "network": options.network}
    if options.line is not None:
        result["line_mbit"] = options.line
    if varies:
        result |= dict(zip(("spread", "slow", "stall"), varied, strict=True))
        if options.network == "none" and options.line is None and not options.stall:
            result["simulated"] = round(statistics.mean(map(simulated, works)), 1)
    print(json.dumps({**result, "units": units}))


if __name__ == "__main__":
    main()
