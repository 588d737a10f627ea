"""Python, NumPy and torch randomness, seeded for a moment and put back; and the keys that seed it."""

import hashlib
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import numpy as np
import torch

# torch's default generator is one per process: the loader seeds it before dataset[i] and the engine before a
# section, each on its own thread. A thread that seeds it holds this lock for as long as the draws must be its own.
generator_lock = threading.RLock()


def derive_key(*parts: int | str) -> int:
    """Hash ``parts`` to an unsigned 64-bit key; different sequences of parts give independent keys.

    A key is the same in every process, on every machine, and in every version of Python.

    Each part goes in with its type and length, so that ``("ab", "c")``, ``("a", "bc")`` and ``("a", "b", "c")``
    differ, and so do ``1`` and ``"1"``.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = (part if isinstance(part, str) else str(int(part))).encode()
        digest.update(b"%c%d:%b" % (b"s" if isinstance(part, str) else b"i", len(text), text))
    return int.from_bytes(digest.digest(), "little")


class Draws:
    """Record of the generators, which tells whether numbers were drawn since, inside a block of ``seeded``."""

    def __init__(self) -> None:
        self._before = _states()

    @property
    def were_made(self) -> bool:
        """True if numbers were drawn from Python's, NumPy's or torch's generator."""
        return _states() != self._before


def _states() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state()
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), kind, np.asarray(words).tobytes(), rest, of_torch


def _taken() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _put_back(states: tuple[Any, Any, torch.Tensor]) -> None:
    python, numpy, torch_ = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(torch_)


@contextmanager
def seeded(seed: int, *keys: int | str) -> Iterator[None]:
    """Run a block with all three generators seeded from ``(seed, *keys)``; their states come back afterwards.

    Holds ``generator_lock``. Only CPU generators are seeded: a dataset that draws on a GPU is not repeatable.
    """
    with generator_lock:
        before = _taken()
        try:
            with reseeded(seed, *keys):
                yield
        finally:
            _put_back(before)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators back after a block in which other threads may seed them, and the block's own code draws."""
    global _outside
    with generator_lock:
        states = _outside if _blocks else _taken()
    try:
        yield
    finally:
        if not sys.is_finalizing():
            with generator_lock:
                if _blocks:
                    _outside = states
                else:
                    _put_back(states)


@contextmanager
def states_kept() -> Iterator[None]:
    """Put the states of all three generators back after a block, which may seed them many times by ``reseeded``.

    Reading and writing the states takes five times as long as seeding. The lock is free between two seedings, so blocks
    of several threads may overlap: the first takes the states, and the last puts them back.
    """
    global _blocks, _outside
    with generator_lock:
        if not _blocks:
            _outside = _taken()
        _blocks += 1
    try:
        yield
    finally:
        with generator_lock:
            _blocks -= 1
            if not _blocks:
                _put_back(_outside)


_blocks, _outside = 0, _taken()
"""Number of open blocks of ``states_kept`` in all threads, and the states from before the first of them."""


@contextmanager
def reseeded(seed: int, *keys: int | str) -> Iterator[None]:
    """Run a block as ``seeded`` does, within one of ``states_kept``."""
    with generator_lock:
        _seed(derive_key(seed, *keys))
        yield


def _seed(key: int) -> None:
    random.seed(key)
    np.random.seed((key & 0xFFFFFFFF, key >> 32))  # the legacy seed takes 32-bit words
    torch.default_generator.manual_seed(key)  # torch.manual_seed also visits every device: 100x the cost


class SeededTurn(AbstractContextManager["SeededTurn"]):
    """A block whose draws are its own: all three generators are seeded, and put back afterwards.

    Holds ``generator_lock``, but for pauses in which it waits for others, who may need the generators meanwhile.
    """

    def __init__(self, seed: int, *keys: int | str) -> None:
        """Seed from ``(seed, *keys)``."""
        self.key = derive_key(seed, *keys)

    def __enter__(self) -> Self:
        generator_lock.acquire()
        self._outside = _taken()
        _turns.newest, self._before = self, _turns.newest
        _seed(self.key)
        _seed_device(self.key)
        return self

    def __exit__(self, *_: object) -> None:
        _turns.newest = self._before
        _put_back(self._outside)
        generator_lock.release()

    def seed(self, key: int) -> None:
        """Let torch draw otherwise from here on: by this turn's key and ``key``."""
        # Multiplied by an odd constant (2^64 over the golden ratio): keys that differ in few bits give unlike seeds.
        both = (self.key ^ key) * 0x9E3779B97F4A7C15 % 2**64
        torch.default_generator.manual_seed(both)
        _seed_device(both)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let others use the generators in this block."""
        own = _taken()
        _put_back(self._outside)
        generator_lock.release()
        try:
            yield
        finally:
            generator_lock.acquire()
            self._outside = _taken()
            _put_back(own)


def next_in_turn(number: int) -> None:
    """Begin a numbered part of this thread's turn: what it draws does not depend on the parts before; else nothing."""
    if (turn := _turns.newest) is not None:
        _seed(derive_key(turn.key, number))
        _seed_device(derive_key(turn.key, number))


def _seed_device(key: int) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # this process computes on a GPU, its current one
        torch.cuda.manual_seed(key)


class _Turns(threading.local):
    newest: SeededTurn | None = None


_turns = _Turns()


def present_turn() -> SeededTurn | None:
    """Return the turn that this thread is in, if any."""
    return _turns.newest


class Keyed(list[Any]):
    """A list that a turn draws for one by one: a loop over it draws for an item what depends on its key alone.

    So what is drawn for a parameter does not depend on which others are on its stage.
    """

    def __init__(self, items: Iterable[Any], keys: Iterable[str], what: str) -> None:
        """List ``items``; the keys are of the same number, and mean another draw in another list (``what``)."""
        super().__init__(items)
        self._keys = [derive_key(0, what, key) for key in keys]

    def __iter__(self) -> Iterator[Any]:
        turn = present_turn()
        if turn is None:
            yield from super().__iter__()
            return
        for item, key in zip(super().__iter__(), self._keys, strict=False):
            turn.seed(key)
            yield item
