"""Tools that look at a job get it here: they run its script until its Trainer is asked for steps.

So there is no second way to describe a job.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from varuna.core.errors import UsageError, VarunaError, WorkerError
from varuna.job.spec import JobSpec
from varuna.process.scripts import check_script

_active = False


class Intercepted(BaseException):
    """A tool has taken the job from the script; like SystemExit, it passes the script's ``except Exception``."""

    def __init__(self, spec: JobSpec, steps: int) -> None:
        super().__init__()
        self.spec = spec
        self.steps = steps


@contextmanager
def output_as_errors() -> Iterator[None]:
    """Send standard output to standard error, also that of C code, so that a tool's own output stays clean."""
    original = sys.stdout
    with redirect_stdout(sys.stderr):
        try:
            descriptor = original.fileno()
        except (OSError, AttributeError):  # a test's
            yield
            return
        original.flush()
        kept = os.dup(descriptor)
        os.dup2(sys.__stderr__.fileno() if sys.__stderr__ else descriptor, descriptor)
        try:
            yield
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def offer_job(spec: JobSpec, steps: int) -> None:
    """Offer the job of a Trainer that is about to train; does not return if a tool runs the script."""
    if _active:
        raise Intercepted(spec, steps)


def take_job(script: Path, args: Sequence[str]) -> Intercepted:
    """Run a training script until its Trainer is asked for steps.

    Raises:
        UsageError: there is no such script, or it ended without asking.
        WorkerError: it raised an exception.
    """
    global _active
    check_script(script)
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [str(script), *args], [str(script.parent)]
    _active = True
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Intercepted as taken:
        return taken
    except VarunaError:
        raise
    except Exception as error:
        own = "".join(traceback.format_exception(error)[-3:])
        raise WorkerError(f"{script} failed before it asked for steps:\n{own}") from error
    finally:
        _active, sys.argv, sys.path[:] = False, argv, path
    raise UsageError(f"{script} ended without calling trainer.steps(): there is no job to look at.")
