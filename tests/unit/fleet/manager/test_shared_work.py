"""One worker does what all need: nobody waits for one that is gone, and nobody does it twice without a reason."""

import random

from hypothesis import given
from hypothesis import strategies as st

from varuna.core.messages import WorkFound, WorkOffered, WorkSought, from_worker, to_worker
from varuna.fleet.manager.shared_work import SharedWork

NAMES = ("w0", "w1", "w2")
SOUGHT, DONE = WorkSought(key="k"), WorkOffered(key="k", data=b"\x00graph\xff")


def told(key: str, data: bytes) -> WorkFound:
    return WorkFound(key=key, data=data)


def wait(worker: str, doer: str = "w0") -> list[tuple[str, WorkFound]]:
    return [(worker, WorkFound(key="k", doer=doer))]


def test_the_first_does_it_and_the_others_take_it_over() -> None:
    work = SharedWork()
    assert work.answer_worker("w0", SOUGHT, NAMES, 0.0) == [("w0", told("k", b""))]
    assert work.answer_worker("w1", SOUGHT, NAMES, 1.0) == wait("w1")
    assert work.answer_worker("w2", SOUGHT, NAMES, 1.0) == wait("w2")
    assert work.answer_worker("w1", SOUGHT, NAMES, 3.0) == wait("w1"), "said again"
    assert work.answer_worker("w0", DONE, NAMES, 9.0) == [("w1", told("k", DONE.data)), ("w2", told("k", DONE.data))]
    assert work.answer_worker("w7", SOUGHT, ("w7",), 99.0) == [("w7", told("k", DONE.data))], "a newcomer"
    assert work.answer_worker("w7", WorkSought(key="other"), ("w7",), 99.0) == [("w7", told("other", b""))]


def test_an_answer_that_was_lost_is_given_again() -> None:
    work = SharedWork()
    assert (
        work.answer_worker("w0", SOUGHT, NAMES, 0.0)
        == work.answer_worker("w0", SOUGHT, NAMES, 2.0)
        == [("w0", told("k", b""))]
    )


def test_another_one_does_it_if_the_first_is_gone_or_takes_for_ever() -> None:
    for alive, now_s in ((("w1", "w2"), 2.0), (NAMES, 101.0)):
        work = SharedWork()
        work.answer_worker("w0", SOUGHT, NAMES, 0.0)
        work.answer_worker("w2", SOUGHT, NAMES, 0.5)
        assert work.answer_worker("w1", SOUGHT, alive, now_s) == [("w1", told("k", b""))]
        assert work.answer_worker("w2", SOUGHT, alive, now_s) == wait("w2", "w1"), "the new one has begun now"
        assert work.answer_worker("w1", DONE, alive, now_s) == [("w2", told("k", DONE.data))]


def test_what_cannot_be_taken_over_keeps_nobody_waiting() -> None:
    work = SharedWork()
    work.answer_worker("w0", SOUGHT, NAMES, 0.0)
    work.answer_worker("w1", SOUGHT, NAMES, 0.0)
    assert work.answer_worker("w0", WorkOffered(key="k", data=b""), NAMES, 1.0) == [("w1", told("k", b""))]
    assert work.answer_worker("w2", SOUGHT, NAMES, 2.0) == [("w2", told("k", b""))]
    assert work.answer_worker("w0", DONE, NAMES, 3.0) == [], "it was said already"


def test_strangers_get_nothing_and_leave_nothing() -> None:
    work = SharedWork()
    work.answer_worker("w0", SOUGHT, NAMES, 0.0)
    assert work.answer_worker("x", DONE, NAMES, 0.0) == work.answer_worker("x", SOUGHT, NAMES, 0.0) == []
    assert work.answer_worker("w0", WorkOffered(key="unasked", data=b"1"), NAMES, 0.0) == []
    assert work.answer_worker("w1", WorkSought(key="unasked"), NAMES, 0.0) == [("w1", told("unasked", b""))]


def test_a_manager_keeps_a_bounded_amount() -> None:
    work = SharedWork()
    for number in range(200):
        key = f"k{number}"
        assert work.answer_worker("w0", WorkSought(key=key), NAMES, 0.0) == [("w0", told(key, b""))]
        work.answer_worker("w0", WorkOffered(key=key, data=bytes(2**20)), NAMES, 0.0)
    kept = [work.answer_worker("w1", WorkSought(key=f"k{number}"), NAMES, 0.0)[0][1].data for number in range(200)]
    assert sum(map(bool, kept)) == 64
    assert all(kept[:64])


def test_work_that_nobody_ended_takes_no_room_for_ever() -> None:
    work = SharedWork()
    for number in range(64):
        work.answer_worker("gone", WorkSought(key=f"k{number}"), ("gone",), 0.0)
    assert work.answer_worker("w0", SOUGHT, NAMES, 1.0) == [("w0", told("k", b""))]
    assert work.answer_worker("w1", SOUGHT, NAMES, 1.0) == wait("w1")


@given(st.integers(0, 2**32))
def test_everybody_has_it_in_the_end_whoever_dies_on_the_way(seed: int) -> None:
    dice = random.Random(seed)
    work, alive, now_s = SharedWork(), list(NAMES), 0.0
    has: set[str] = set()
    busy: dict[str, float] = {}  # until when a worker does it itself
    for _ in range(400):
        now_s += 0.5
        if len(alive) > 1 and dice.random() < 0.02:
            gone = alive.pop(dice.randrange(len(alive)))
            busy.pop(gone, None)
        said: list[tuple[str, WorkSought | WorkOffered]] = []
        for name in alive:
            if name in has or (name not in busy and dice.random() < 0.5):  # a question may be late, or lost
                continue
            if name not in busy:
                said.append((name, SOUGHT))
            elif busy[name] <= now_s:
                said.append((name, DONE))
                del busy[name]
                has.add(name)
        for name, message in said:
            heard = from_worker.validate_json(message.model_dump_json())
            assert isinstance(heard, WorkSought | WorkOffered)
            for target, found in work.answer_worker(name, heard, alive, now_s):
                answer = to_worker.validate_json(found.model_dump_json())
                assert isinstance(answer, WorkFound)
                if answer.data:
                    assert answer.data == DONE.data
                    has.add(target)
                elif target not in has and not answer.doer:
                    busy.setdefault(target, now_s + dice.choice([1.0, 5.0, 30.0]))
        if has >= set(alive):
            return
    raise AssertionError(f"after {now_s} s {alive} wait, {has} have it")
