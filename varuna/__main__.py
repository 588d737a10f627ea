"""``python -m varuna`` is the command ``varuna``."""

import sys

from varuna.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
