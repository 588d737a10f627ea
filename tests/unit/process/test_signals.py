"""Processes that end at SIGTERM."""

import subprocess
import sys

_SCRIPT = """
import os, signal, time
from varuna.process.signals import leave_termination_to_parent
leave_termination_to_parent()
os.kill(os.getpid(), signal.SIGTERM)
ready, say = os.pipe()
child = os.fork()
if child == 0:
    os.write(say, b"x")
    time.sleep(60)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print("alive, and its child ended by", os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_an_agents_worker_outlives_sigterm_and_its_children_do_not() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "alive, and its child ended by 15"), done.stderr
