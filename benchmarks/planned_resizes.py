"""Goodput of a day with 47 planned resizes, as in LiveR's test: machines come, and leave with a notice.

A cluster of 16 nodes loses 2, gets them back, and so on, every half an hour, 47 times in 24 hours. The day is
replayed in virtual time, with the real state machine and planner.

python -m benchmarks.planned_resizes --calibration examples/calibrations/gpt2-2.5b-v100.json
"""

import argparse
from pathlib import Path

from varuna.calibration.file import read_calibration
from varuna.extras.replay.lost import LostBy
from varuna.extras.replay.replay import Replay
from varuna.extras.replay.trace import Change, Trace

RESIZES = 47
DAY_S = 24 * 3600.0
_NODES, _LEAVE = 16, 2
_FIRST_S = 120.0
"""The cluster is there from the beginning; warming up is no resize, and takes less."""


def resizes() -> Trace:
    """The day."""
    nodes = [f"node{number}" for number in range(_NODES)]
    changes, every_s = [Change(0.0, tuple(nodes))], DAY_S / (RESIZES + 1)
    for number in range(RESIZES):
        at_s = _FIRST_S + every_s * (number + 1)
        if number % 2 == 0:
            gone, nodes = nodes[:_LEAVE], nodes[_LEAVE:]
            changes.append(Change(at_s, removed=tuple(gone)))
        else:
            fresh = [f"node{_NODES + number * _LEAVE + each}" for each in range(_LEAVE)]
            nodes = [*nodes, *fresh]
            changes.append(Change(at_s, added=tuple(fresh)))
    return Trace(tuple(changes), DAY_S)


def main() -> None:
    """Print goodput and what was lost for each global batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--notice", type=float, default=120.0, metavar="SECONDS")
    chosen = parser.parse_args()
    calibration = read_calibration(chosen.calibration)
    for batch in chosen.global_batch:
        replay = Replay(resizes(), calibration, gpus_per_node=1, global_batch=batch)
        outcome = replay.morphing(notice_s=chosen.notice)
        causes = sorted(outcome.lost.items(), key=lambda each: -each[1])
        lost = ", ".join(f"{cause} {100 * share:.2f} %" for cause, share in causes if share >= 0.0005)
        whole = outcome.goodput + outcome.lost.get(LostBy.UNFINISHED, 0.0)
        cut = f"{100 * whole:.2f} % with the step that the end of the day cuts off"
        print(
            f"M = {batch}: goodput {100 * outcome.goodput:.2f} % over {RESIZES} resizes, {cut}; lost: {lost}",
            flush=True,
        )


if __name__ == "__main__":
    main()
