"""Run as a script, before a worker's: ``tether.py PARENT PROGRAM ARGS...`` becomes PROGRAM, which dies with PARENT.

Linux sends a process the signal that it asked for when the thread that started it ends, also after ``exec``. Code of
Python's between ``fork`` and ``exec`` is not safe in a process with threads, so a program of its own asks. Nothing of
varuna is imported here: it runs isolated, in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Hear all signals, ask for this one, see that the parent still lives, and become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # processes of Ray's block SIGINT, and what they start would too
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:  # else it died before we asked
        os.execv(program[0], program)


if __name__ == "__main__":
    main()
