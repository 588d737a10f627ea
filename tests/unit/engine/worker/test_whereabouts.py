"""The place of a thread, seen from another."""

import gc
import threading
import weakref

import torch

from varuna.engine.worker.heartbeat import whereabouts

_BOUND_S = 10.0


def test_looking_at_a_thread_keeps_nothing_of_it_alive() -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    holds, looked = threading.Event(), threading.Event()

    def work() -> None:
        activation = torch.zeros(3)
        held.append(weakref.ref(activation))
        holds.set()
        looked.wait(_BOUND_S)

    thread = threading.Thread(target=work)
    was_enabled = gc.isenabled()
    gc.disable()  # a cycle would last until a collection
    try:
        thread.start()
        assert holds.wait(_BOUND_S)
        assert __file__ in whereabouts(thread.ident or 0, reads=False).place
        looked.set()
        thread.join(_BOUND_S)
        assert held[0]() is None
    finally:
        if was_enabled:
            gc.enable()
