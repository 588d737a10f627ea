"""Tests of training jobs: ranks as threads of one process, faults at a named phase, a store that fails on demand.

In: a function that is a training script, how many workers run it, and what goes wrong. Out: the losses, plans and
warnings of the run. The manager, the plans, the changes of plan, the links and the checkpoints are those of
``varuna run``; only processes are not: each worker is a thread, and an exception that nothing catches kills one.
"""

from varuna.testing.faults import Fault, Killed, fail_at, notice_at
from varuna.testing.ranks import RunResult, run
from varuna.testing.stores import FailingStore

__all__ = ["FailingStore", "Fault", "Killed", "RunResult", "fail_at", "notice_at", "run"]
