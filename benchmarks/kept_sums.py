"""Simulate, on recorded clusters, the worth of kept sums when a worker is lost: goodput, and the causes of the rest.

For each recording, global batch and length of notice: goodput with all that is kept, without copies of state and sums,
and without sums of gradients at all; the restart policy beside it.

python -m benchmarks.kept_sums RECORDING... --calibration examples/calibrations/gpt2-2.5b-v100.json
"""

import argparse
from pathlib import Path

from varuna.calibration.file import read_calibration
from varuna.extras.replay.costs import MorphCosts
from varuna.extras.replay.recording import read_trace
from varuna.extras.replay.replay import Replay

_SHOWN = 0.002


def main() -> None:
    """Print a row for each replay, and below it what was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--notice", type=float, nargs="+", default=[0.0, 120.0], metavar="SECONDS")
    chosen = parser.parse_args()
    calibration = read_calibration(chosen.calibration)
    print("| recording | M | notice | goodput | without copies | without sums | restart |")
    print("|---|---|---|---|---|---|---|")
    for path in chosen.recordings:
        for batch in chosen.global_batch:
            replay = Replay(read_trace(path), calibration, gpus_per_node=1, global_batch=batch)
            restart = replay.restarting()
            for notice_s in chosen.notice:
                whole, uncopied, plain = (
                    replay.morphing(MorphCosts(keeps_sums=sums, copies=copies), notice_s=notice_s)
                    for sums, copies in ((True, True), (True, False), (False, False))
                )
                figures = [f"{100 * each.goodput:.1f} %" for each in (whole, uncopied, plain, restart)]
                print(f"| {path.stem} | {batch} | {notice_s:g} s | {' | '.join(figures)} |", flush=True)
                causes = sorted(whole.lost.items(), key=lambda each: -each[1])
                lost = [f"{cause} {100 * share:.1f} %" for cause, share in causes if share >= _SHOWN]
                print(f"  lost: {', '.join(lost)}", flush=True)


if __name__ == "__main__":
    main()
