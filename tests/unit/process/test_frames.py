"""Looking where threads are neither stops the process nor crashes it, whatever is collected meanwhile."""

import gc
import subprocess
import sys
import threading

import pytest

from varuna.process.frames import stacks_of

_BEGIN = """
import gc, sys, threading, time
from varuna.process.frames import stacks_of

looks, moves, ends = threading.Event(), threading.Event(), threading.Event()


class Freed:
    def __init__(self):
        self.itself = self

    def __del__(self):  # as a tensor: others run meanwhile
        looks.set()
        moves.wait(0.5)


def few_until_collection():
    gc.collect()
    Freed()
    gc.set_threshold(20)
"""
_STARTS_A_THREAD = """
def start_another():
    looks.wait()
    threading.Thread(target=ends.wait, daemon=True).start()
    moves.set()

for _ in range(60):
    threading.Thread(target=lambda: ends.wait(), daemon=True).start()
threading.Thread(target=start_another, daemon=True).start()
few_until_collection()
[stack] = stacks_of([threading.get_ident()])
"""
_RETURNS = """
def deep(more):
    deep(more - 1) if more else (ready.set(), looks.wait())

ready = threading.Event()
thread = threading.Thread(target=lambda: (deep(80), moves.set()), daemon=True)
thread.start()
ready.wait()
few_until_collection()
[stack] = stacks_of([thread.ident])
assert sum(frame.f_code.co_name == "deep" for frame in stack) > 80, stack
"""


@pytest.mark.parametrize("meanwhile", [_STARTS_A_THREAD, _RETURNS], ids=["a thread starts", "the frames return"])
def test_a_garbage_collection_meanwhile_does_no_harm(meanwhile: str) -> None:
    outcome = subprocess.run([sys.executable, "-c", _BEGIN + meanwhile], capture_output=True, text=True, timeout=60)
    assert (outcome.returncode, outcome.stderr) == (0, "")


@pytest.mark.parametrize("enabled", [False, True])
def test_collections_are_as_they_were(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        [stack] = stacks_of([threading.get_ident(), -1])
        assert gc.isenabled() == enabled
        assert sys._getframe() in stack
    finally:
        (gc.enable if was_enabled else gc.disable)()
