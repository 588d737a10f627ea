"""A worker that measures: ``python -m varuna.calibration.measure OUTPUT SCRIPT [ARGS]``."""

import sys

import varuna

if __name__ == "__main__":
    sys.exit(varuna._load("varuna.calibration.measure.worker").main(sys.argv[1:]))
