"""Outages in virtual time, creates in doubt, and bandwidth."""

import threading

import pytest

from tests.unit.store.flaky import Time, down
from varuna.core.errors import ObjectExists, StoreUnavailable
from varuna.store.opening import open_store
from varuna.store.retry import RetryingStore, impatient
from varuna.store.throttle import Throttle
from varuna.testing.stores import HookedStore


@pytest.fixture
def hooked(request: pytest.FixtureRequest) -> HookedStore:
    return HookedStore(open_store(f"memory://{request.node.nodeid}"))


def _fine(verb: str, name: str) -> None:
    pass


def patient(hooked: HookedStore, time: Time, patience_s: float = 900.0) -> RetryingStore:
    return RetryingStore(hooked, patience_s=patience_s, clock=time.clock, sleep=time.sleep)


def test_a_store_that_is_down_for_minutes_delays_a_write(
    hooked: HookedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    time = Time()

    def for_five_minutes(verb: str, name: str) -> None:
        if time.now_s < 300:
            down(verb, name)

    hooked.before = for_five_minutes
    patient(hooked, time).write("x", lambda: [b"whole"])
    assert hooked.inner.get("x") == b"whole"
    assert 300 <= time.now_s < 340  # pauses grow, but not beyond 30 s
    assert capsys.readouterr().err.count("connection refused; trying for up to 900 s") == 1


def test_patience_ends_and_says_how_long_it_was(hooked: HookedStore) -> None:
    time = Time()
    hooked.before = down
    with pytest.raises(StoreUnavailable, match=r"connection refused \(tried \d+ times in \d+ s\)"):
        patient(hooked, time, 60).get("x")
    assert time.now_s <= 60


def test_who_cannot_wait_is_told_that_a_store_says_nothing(hooked: HookedStore) -> None:
    goes_on = threading.Event()

    def hang(verb: str, name: str) -> None:
        goes_on.wait(30)

    hooked.before = hang
    store = impatient(hooked, 0.01, 0.01)
    with pytest.raises(StoreUnavailable, match=r"has not answered for 0 s \(tried 1 times"):
        store.folders()
    goes_on.set()
    assert impatient(store, 0.01, 30.0).folders() == []
    assert impatient(hooked, 0.01) is hooked


def test_a_create_that_timed_out_after_it_succeeded_is_a_success(hooked: HookedStore) -> None:
    time, answers = Time(), iter((down, _fine))

    def lost(verb: str, name: str) -> None:
        if verb == "create":
            next(answers)(verb, name)

    hooked.after = lost
    patient(hooked, time).create("x", b"mine")
    assert hooked.inner.get("x") == b"mine"


def test_a_create_that_timed_out_before_another_writer_succeeded_is_a_failure(hooked: HookedStore) -> None:
    time, first = Time(), [True]

    def overtaken(verb: str, name: str) -> None:
        if verb == "create" and first:
            first.clear()
            hooked.inner.create("x", b"theirs")
            down(verb, name)

    hooked.before = overtaken
    with pytest.raises(ObjectExists):
        patient(hooked, time).create("x", b"mine")
    assert hooked.inner.get("x") == b"theirs"


def test_an_object_that_exists_is_not_taken_for_ours_without_a_doubt(hooked: HookedStore) -> None:
    hooked.inner.create("x", b"same")
    with pytest.raises(ObjectExists):
        patient(hooked, Time()).create("x", b"same")


def test_a_pace_holds_whatever_the_sizes() -> None:
    time = Time()
    pace = Throttle(100.0, clock=time.clock, sleep=time.sleep)
    for size_bytes in (50, 150, 100):
        pace.wait(size_bytes)
    assert time.now_s == pytest.approx(2.0)  # the last is let through once those before it have passed
    time.now_s = 100.0
    pace.wait(500)
    assert time.now_s == 100.0
    pace.wait(1)
    assert time.now_s == pytest.approx(105.0)
