"""Examples per second of Varuna and of what people use instead, on hosts with slow links.

    make bench-peers  # installs DeepSpeed; without it, its rows are left out
    python -m benchmarks.instead [--lines 1000 250 100 20] [--hosts 2 4] [--models 4x128 8x256] [--rounds 5]

Model, samples, first values, global batch and optimizer are the same for all, computed in fp32 by one thread a host:

- Varuna, with the plan that it chooses after `varuna calibrate` on these hosts and links;
- DistributedDataParallel with a static graph, which accumulates gradients locally and reduces them once a step;
- FSDP2, which gathers parameters once a step and keeps them until the last backward;
- DeepSpeed's ZeRO-2 and ZeRO-3 with one micro-batch a step, since they reduce gradients after each;
- torch's pipeline API under 1F1B, split by hand into equal numbers of layers, without recomputation.

Each host is a network namespace with a shaped link in each direction and the kernel's TCP. All hosts share the
processors of this machine, so ``--gflops`` emulates one for each: kernels sleep. At each rate, contenders first choose
their fastest micro-batch size. Then they take turns, so that noise disturbs all alike; those that wait use no
processor. Ratios are medians over the rounds. The losses of the first steps are compared. Bytes are those that all
hosts send in a step. Needs root, ip, tc, unshare and nsenter. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.emulated.hosts import Hosts
from tests.scenarios.network import why_not
from tests.scenarios.warm import Process
from varuna.calibration.file import write_calibration
from varuna.calibration.fit import assemble
from varuna.calibration.format import Calibrations

ROOT = Path(__file__).resolve().parents[1]
RANKS = ROOT / "benchmarks" / "instead_ranks.py"
PEERS = ROOT / ".peers" / "bin" / "python"
PER_HOST = 16
"""Examples of a global batch for each host."""
MEMORY_BYTES = 2 * 10**9
"""Memory of a host, enough to train without recomputing."""
FIRST_STEPS = 3
TURN_S = 2.0
_BOUND_S, _END_S = 900.0, 30.0
OURS = "varuna"
NAMES = {
    OURS: "Varuna",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "pipeline": "pipeline API",
}


class Turn(NamedTuple):
    """Consecutive steps of one contender."""

    step_s: float
    sent_bytes: float
    losses: list[float]
    plan: str


class Contender:
    """A rank on each host."""

    def __init__(self, name: str, hosts: Hosts, count: int, arguments: Sequence[str], **environment: str) -> None:
        """Start the ranks, which wait for their first turn."""
        self.name, self.micro_batch = name, PER_HOST
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the ranks
        python = PEERS if name.startswith("zero") else Path(sys.executable)
        command, port = [str(python), str(RANKS), "--contender", name, *arguments], hosts.free_port()
        self._ranks: list[subprocess.Popen[str]] = [
            (Process if python != PEERS else subprocess.Popen)(
                command if python != PEERS else hosts.command(rank, command),
                env=hosts.environment(rank, count, port) | {"GLOO_SOCKET_IFNAME": "eth0", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                text=True,
            )
            for rank in range(count)
        ]

    def turn(self, micro_batch: int, warm: int, measured: int) -> Turn:
        """Run ``warm`` steps, then ``measured`` ones, on all ranks.

        Raises:
            SystemExit: one failed, or did not end within the bound.
        """
        bound = threading.Timer(_BOUND_S, self.close)
        bound.start()
        try:
            for rank in self._ranks:
                assert rank.stdin is not None
                print(micro_batch, warm, measured, file=rank.stdin, flush=True)
            told = [self._told(rank) for rank in self._ranks]
        except BrokenPipeError:
            raise self._failed() from None
        finally:
            bound.cancel()
        return Turn(
            step_s=max(each["seconds"] for each in told) / measured,
            sent_bytes=sum(each["sent"] for each in told) / measured,
            losses=[sum(parts) for parts in zip(*(each["losses"] for each in told), strict=True)],
            plan=told[0]["plan"],
        )

    def _told(self, rank: "subprocess.Popen[str]") -> dict[str, Any]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("told "):
                told: dict[str, Any] = json.loads(line.removeprefix("told "))
                return told
        raise self._failed()

    def _failed(self) -> SystemExit:
        self._errors.seek(0)
        return SystemExit(f"{self.name} failed, or took longer than {_BOUND_S:.0f} s:\n{self._errors.read()[-3000:]}")

    def close(self) -> None:
        """Kill the ranks."""
        for rank in self._ranks:
            rank.kill()
            rank.wait(_END_S)


def sizes(name: str) -> list[int]:
    """List the micro-batch sizes that a contender tries; more than one where it can choose."""
    if name == "pipeline":
        return [PER_HOST // share for share in (1, 2, 4, 8)]
    return [PER_HOST // share for share in (1, 2, 4)] if name in ("ddp", "fsdp2") else [PER_HOST]


def measured(model: str, count: int, names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a model on ``count`` hosts at each rate, the fastest first."""
    layers, width = model.split("x")
    arguments = ["--layers", layers, "--width", width, "--global-batch", str(PER_HOST * count)]
    arguments += ["--gflops", str(options.gflops)]
    lines: list[int] = options.lines
    rows = []
    with ExitStack() as stack:
        hosts = stack.enter_context(closing(Hosts(count, 1, max(lines) * 1e6)))
        others = [
            stack.enter_context(closing(Contender(name, hosts, count, arguments))) for name in names if name != OURS
        ]
        first = {each.name: each.turn(PER_HOST, 0, FIRST_STEPS).losses for each in others}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for line in sorted(lines, reverse=True):
            hosts.narrow(line * 1e6)
            with closing(_our_own(hosts, count, arguments, folder)) as own:
                first[OURS] = own.turn(PER_HOST, 0, FIRST_STEPS).losses
                row = _cell([own, *others], count, options.rounds)
            apart = max(abs(a / b - 1) for each in first.values() for a, b in zip(each, first[OURS], strict=True))
            rows.append({"model": model, "hosts": count, "line": line, **row, "losses": first[OURS], "apart": apart})
            print(_text(rows[-1]), flush=True)
    return rows


def _our_own(hosts: Hosts, count: int, arguments: Sequence[str], folder: Path) -> Contender:
    """Start Varuna with a calibration of these hosts and links."""
    known = assemble(hosts.collect(RANKS, ["--contender", OURS, "--untold", *arguments], count), name="gpt")
    hardware = known.hardware.model_copy(update={"memory_bytes": MEMORY_BYTES})
    file = folder / "calibration.json"
    write_calibration(Calibrations.of_one(known.model_copy(update={"hardware": hardware})), file)
    return Contender(OURS, hosts, count, arguments, VARUNA_CALIBRATION=str(file))


def _cell(contenders: Sequence[Contender], count: int, rounds: int) -> dict[str, Any]:
    """Measure all contenders at one rate, by turns."""
    steps = {}
    for each in contenders:
        tried = {size: each.turn(size, 0, 1).step_s for size in sizes(each.name)}
        each.micro_batch = min(tried, key=tried.__getitem__)
        steps[each] = max(1, min(20, round(TURN_S / tried[each.micro_batch])))
    turns: dict[str, list[Turn]] = {each.name: [] for each in contenders}
    for _ in range(rounds):
        for each in contenders:
            # The first step after a wait has cold caches and a slow start; where a step is long, neither matters.
            turns[each.name].append(each.turn(each.micro_batch, int(steps[each] > 1), steps[each]))
    seconds = {name: median(turn.step_s for turn in taken) for name, taken in turns.items()}
    best = min((name for name in seconds if name != OURS), key=seconds.__getitem__)
    ratios = [own.step_s / other.step_s for own, other in zip(turns[OURS], turns[best], strict=True)]
    return {
        "examples_per_s": {name: round(PER_HOST * count / value, 1) for name, value in seconds.items()},
        "megabytes": {name: round(median(t.sent_bytes for t in taken) / 1e6, 2) for name, taken in turns.items()},
        "micro_batch": {each.name: each.micro_batch for each in contenders if len(sizes(each.name)) > 1},
        "plan": turns[OURS][-1].plan,
        "best": best,
        "step_over_best": round(median(ratios), 3),
        "from_to": [round(min(ratios), 3), round(max(ratios), 3)],
        "load": round(os.getloadavg()[0], 1),
    }


def _text(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    low, high = row["from_to"]
    cells = [f"{row['examples_per_s'][name]} ({sent})" for name, sent in row["megabytes"].items()]
    ratio = f"{row['step_over_best']} ({low} to {high}) of {NAMES[row['best']]}"
    return _line(
        row["model"], row["hosts"], row["line"], row["plan"], *cells, ratio, f"{row['apart']:.0e}", row["load"]
    )


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure all cells and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, nargs="+", default=[1000, 250, 100, 20], help="Mb/s")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["4x128", "8x256"], help="layers x width")
    parser.add_argument("--gflops", type=float, default=0.0, help="emulate a processor of this rate for each host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="+", default=[], choices=[name for name in NAMES if name != OURS])
    options = parser.parse_args()
    if reason := why_not("tc"):
        raise SystemExit(f"skipped: {reason}")
    names = [name for name in NAMES if name not in options.without]
    if not PEERS.exists() and any(name.startswith("zero") for name in names):
        print("DeepSpeed is skipped: it is not installed here; `make bench-peers` installs it")
        names = [name for name in names if not name.startswith("zero")]
    print("examples per second (megabytes per step); Varuna's step over that of the best; losses apart; load average")
    print(
        "| " + " | ".join(["model", "hosts", "Mb/s", "plan", *NAMES.values(), "Varuna / best", "apart", "load"]) + " |"
    )
    rows = []
    for model in options.models:
        for count in options.hosts:
            rows += measured(model, count, names, options)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
