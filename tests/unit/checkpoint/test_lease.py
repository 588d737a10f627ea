"""One run at a time in a directory, whatever the clocks say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.store.flaky import Time
from tests.waiting import wait_for
from varuna.checkpoint.lease import EXPIRY_S, Lease, LeaseOwner, claim, has_ended, process_scope, process_started
from varuna.core.errors import CheckpointError
from varuna.store.base import Entry, Store
from varuna.store.opening import open_store
from varuna.testing.stores import HookedStore


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.nodeid}")


def take(store: Store, time: Time | None = None, said: list[str] | None = None) -> Lease:
    time = time or Time()
    return claim(store, "me", say=(said if said is not None else []).append, clock=time.clock, sleep=time.sleep)


def elsewhere(**changes: object) -> LeaseOwner:
    owner = LeaseOwner(writer="other", host="vm-7", machine="another boot", pid=1, started="")
    return owner.model_copy(update=changes)


def write(store: Store, owner: LeaseOwner, epoch: int = 4) -> None:
    store.put(f"lease/{epoch:06d}.json", owner.model_dump_json().encode())


def test_a_free_directory_is_taken_and_given_back(store: Store) -> None:
    lease = take(store)
    assert lease.is_held()
    lease.beat()
    lease.release()
    assert not lease.is_held()
    time = Time()
    assert take(store, time).is_held()
    assert time.now_s == 0  # nobody is waited for


def test_a_run_on_another_machine_that_beats_is_left_alone(store: Store) -> None:
    write(store, elsewhere())
    time, said = Time(), list[str]()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if time.now_s > EXPIRY_S / 2:
            write(store, elsewhere(beats=1))

    with pytest.raises(CheckpointError, match=r"another run, process 1 on vm-7, saves its checkpoints in memory://"):
        claim(store, "me", say=said.append, clock=time.clock, sleep=sleep)
    assert "waiting 20 s" in said[0]


def test_a_run_on_another_machine_that_stands_still_is_replaced(store: Store) -> None:
    write(store, elsewhere(beats=10**6))
    time = Time()
    lease = take(store, time)
    assert time.now_s >= EXPIRY_S
    assert lease.is_held()
    assert [entry.name for entry in store.entries()] == ["lease/000005.json"]


def test_a_dead_process_of_this_machine_is_replaced_at_once_and_a_live_one_never(store: Store) -> None:
    here = process_scope()
    parent = elsewhere(machine=here, pid=os.getppid(), started=process_started(str(os.getppid())))
    write(store, parent)
    with pytest.raises(CheckpointError, match="another run"):
        take(store)
    write(store, parent.model_copy(update={"started": "1"}))  # its number was given to another process
    time = Time()
    take(store, time)
    write(store, elsewhere(machine=here, pid=2**22 + 1), epoch=9)
    take(store, time)
    assert time.now_s == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel does not say")
def test_a_process_that_has_ended_and_that_nobody_has_waited_for_is_dead(store: Store) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as child:
        started = process_started(str(child.pid))
        wait_for(lambda: has_ended(child.pid))
        write(store, elsewhere(machine=process_scope(), pid=child.pid, started=started))
        assert take(store).is_held()


def test_an_earlier_run_of_the_same_process_is_over(store: Store) -> None:
    first = take(store)
    second = take(store)
    assert (first.is_held(), second.is_held()) == (False, True)
    first.beat()  # does not come back
    assert (first.is_held(), second.is_held()) == (False, True)


def test_who_was_frozen_for_two_other_runs_never_takes_the_last_ones_lease_for_its_own(store: Store) -> None:
    """Hibernation and SIGSTOP: numbers must not begin again, or both commit and retain."""
    frozen = claim(store, "a", say=lambda text: None)
    second = claim(store, "b", say=lambda text: None)
    second.release()
    third = claim(store, "c", say=lambda text: None)
    frozen.beat()
    assert (frozen.is_held(), second.is_held(), third.is_held()) == (False, False, True)
    for entry in store.entries():
        store.remove(entry.name)
    assert third.renew()  # somebody removed it by hand: the number is another's now
    assert claim(store, "d", say=lambda text: None).is_held()
    assert not third.is_held()


def test_of_two_first_ones_that_a_store_took_both_one_is_held(store: Store) -> None:
    """Some look-alikes of S3 ignore the condition of a create-only put."""
    first = take(store)
    store.put("lease/000001.json", elsewhere(writer="second").model_dump_json().encode())
    second = Lease(store, 1, elsewhere(writer="second"))
    assert (first.is_held(), second.is_held()) == (False, True)
    first.beat()
    assert second.is_held()


def test_of_two_claimants_one_gets_it(store: Store) -> None:
    write(store, elsewhere())
    time, other = Time(), list[Lease]()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if time.now_s >= EXPIRY_S and not other:  # both have waited, the other is a moment earlier
            store.create("lease/000005.json", elsewhere(pid=2, host="vm-8").model_dump_json().encode())
            other.append(Lease(store, 5, elsewhere(pid=2, host="vm-8")))
        for lease in other:
            lease.beat()

    with pytest.raises(CheckpointError, match="process 2 on vm-8"):
        claim(store, "me", say=lambda text: None, clock=time.clock, sleep=sleep)
    assert other[0].is_held()


class LateStore(HookedStore):
    """Its listings show no lease."""

    def entries(self, folder: str = "") -> list[Entry]:
        return []


def test_a_lease_that_no_listing_shows_yet_is_held(store: Store) -> None:
    late = LateStore(store)
    lease = take(late)
    lease.beat()
    assert lease.is_held()
    assert not lease.is_missing()
    take(store).release()  # another run has taken it over, and removed it
    assert not lease.is_held()


def test_a_claimant_waits_between_looks_at_listings_that_lag(store: Store) -> None:
    write(store, elsewhere(machine=process_scope(), pid=os.getppid()), epoch=1)
    late, time = LateStore(store), Time()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if time.now_s > 5:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        claim(late, "me", say=lambda text: None, clock=time.clock, sleep=sleep)
    assert time.now_s <= 10


def test_a_torn_lease_is_nobodys(store: Store) -> None:
    store.put("lease/000001.json", b"{")
    store.put("lease/junk", b"")
    assert take(store).is_held()
