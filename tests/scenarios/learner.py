"""The example of a learner, whose workers misbehave: ``learner.py FOLDER PLAN [ARGUMENT...]``, as in ``job.py``."""

import sys
from pathlib import Path

from tests.scenarios.job import misbehave

if __name__ == "__main__":
    folder, plan, *rest = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "rollouts"))
    from learn import main

    misbehave(plan, Path(folder), False, [])
    main([folder, *rest])
