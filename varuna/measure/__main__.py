"""A worker that measures: ``python -m varuna.measure OUTPUT SCRIPT [ARGS]``."""

import sys

import varuna

if __name__ == "__main__":
    sys.exit(varuna._load("varuna.measure.worker").main(sys.argv[1:]))
