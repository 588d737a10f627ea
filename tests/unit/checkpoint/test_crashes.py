"""A process may die at any operation of a save: a checkpoint is always left that reads back bit for bit.

Once at every operation of the store, as an object store would see it, and once at every system call that changes
a directory. A dead process does nothing more: no clean-up runs either.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.depth import by_depth
from tests.unit.checkpoint.saves import assemble, make_plan, make_states, same_states, save, save_parts
from varuna.checkpoint.io.restore import everything, read_states
from varuna.checkpoint.manifest import commit, newest_intact
from varuna.checkpoint.retention import Kept, retain
from varuna.store.base import Store
from varuna.store.opening import open_store
from varuna.testing import Killed
from varuna.testing.stores import HookedStore

CALLS = ("write", "fsync", "replace", "link", "mkdir", "unlink", "rmdir", "rename")
PLAN = make_plan(1, 2)


def save_and_retain(store: Store) -> None:
    """Save all shards of a step, commit its manifest, and remove the checkpoint before: tests interrupt this."""
    commit(store, assemble(6, PLAN, save_parts(store, 6, PLAN)))
    retain(store, 6, Kept(last=1))


def check(store: Store) -> None:
    """A checkpoint is there, and a run that comes to the same step again saves it."""
    found = newest_intact(store)
    assert found is not None
    assert found[0].step in (4, 6)
    assert found[1] == []
    assert same_states(read_states(store, found[0], dict.fromkeys(range(5), everything)), make_states(found[0].step))
    save_and_retain(store)
    again = newest_intact(store)
    assert again is not None
    assert again[0].step == 6


@pytest.mark.parametrize("kind", ["before", "after"])
def test_at_every_operation_of_the_store(request: pytest.FixtureRequest, kind: str) -> None:
    fatal = -1
    while True:
        fatal += 1
        store = open_store(f"memory://{request.node.nodeid}/{fatal}")
        save(store, 4, 2, 2)
        hooked, done = HookedStore(store), 0

        def die(verb: str, name: str, fatal: int = fatal) -> None:
            nonlocal done
            done += 1
            if done > fatal:
                raise Killed

        setattr(hooked, kind, die)
        try:
            save_and_retain(hooked)
        except Killed:
            check(store)
        else:
            break
    assert fatal > 20


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, fatal: int) -> Iterator[None]:
    """The process dies in the system call number ``fatal``; a write gets half-way."""
    done = 0

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > fatal:
                if done == fatal + 1 and name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            return call(*args, **options) if name != "fsync" else None

        return run

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield


@pytest.mark.parametrize("share", range(by_depth(1, 4)))
def test_at_every_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what a crash of the machine loses is not tested here
    fatal = share
    while True:
        store = open_store(tmp_path / str(fatal))
        save(store, 4, 1, 2)
        try:
            with dying(monkeypatch, fatal):
                save_and_retain(store)
        except Killed:
            check(store)
        else:
            break
        fatal += 4
    assert fatal > 60
