"""Stacks of this process's threads, read without stopping or breaking it.

Before Python 3.12, frame objects are made when they are asked for, and that may begin a garbage collection. What it
frees, a tensor for one, lets other threads run in the middle of the look:

- ``sys._current_frames`` holds the interpreter's list of threads then (CPython issue 106883, until 3.11.9). The first
  thread that starts or ends another one, or looks for frames too, waits for the list and lets no other run any more:
  the whole process stands still, its heartbeats and the time-outs of its tests included.
- ``f_back`` makes an object of a frame that is over by then, and the process crashes.
"""

import gc
import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import call
from types import FrameType
from typing import Any


def stacks_of(threads: Iterable[int]) -> list[list[FrameType]]:
    """Return the frames of those threads that there are, by identifier; each stack begins with the innermost one."""
    frames: dict[int, FrameType] = _at_once(sys._current_frames)
    try:
        return [_stack(frames[thread]) for thread in threads if thread in frames]
    finally:
        frames.clear()  # one is this call's own: the cycle would keep every thread's tensors until the next collection


def _stack(innermost: FrameType) -> list[FrameType]:
    stack, frame = list[FrameType](), innermost
    while frame is not None:
        stack.append(frame)
        frame = _at_once(partial(getattr, frame, "f_back"))
    return stack


def _at_once(look: Callable[[], Any]) -> Any:
    """Return what ``look`` finds; no garbage collection interrupts it, and no thread finds collections switched off."""
    if not gc.isenabled():
        return look()
    try:
        _, found, _ = map(call, (gc.disable, look, gc.enable))  # all in C code, which lets no thread run in between
    except BaseException:
        gc.enable()
        raise
    return found
