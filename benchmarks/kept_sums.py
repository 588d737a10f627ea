"""What it is worth on recorded clusters that sums of gradients outlast a loss: each replay with and without.

python -m benchmarks.kept_sums RECORDING... --calibration examples/calibrations/gpt2-2.5b-v100.json
"""

import argparse
from pathlib import Path

from varuna.calibration.file import read_calibration
from varuna.replay.costs import MorphCosts
from varuna.replay.recording import read_trace
from varuna.replay.replay import Replay


def main() -> None:
    """Print a row for each recording and global batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, nargs="+", default=[1024, 8192])
    chosen = parser.parse_args()
    calibration = read_calibration(chosen.calibration)
    print("| recording | M | steps broken off | worth of those steps that was kept | goodput with | without |")
    print("|---|---|---|---|---|---|")
    for path in chosen.recordings:
        for batch in chosen.global_batch:
            replay = Replay(read_trace(path), calibration, gpus_per_node=1, global_batch=batch)
            kept, plain = (replay.morphing(MorphCosts(keeps_sums=keeps)) for keeps in (True, False))
            steps = kept.micro_batches_kept / kept.micro_batches
            print(
                f"| {path.stem} | {batch} | {kept.steps_redone} | {steps:.1f} steps | "
                f"{100 * kept.goodput:.1f} % | {100 * plain.goodput:.1f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
