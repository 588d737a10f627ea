"""Times at which an agent starts workers."""

from itertools import pairwise

from varuna.fleet.agent.slots import Slots


def test_each_slot_gets_a_worker_and_a_killed_one_is_followed_at_once() -> None:
    slots = Slots(2)
    for number, slot in enumerate(slots.due(0.0)):
        slots.started(slot, f"n0.{number}", 0.0)
    assert slots.workers == ["n0.0", "n0.1"]
    assert slots.ended("n0.1", -9, 100.0)
    assert [slot.index for slot in slots.due(100.0)] == [1]


def test_one_that_dies_again_and_again_is_followed_ever_more_slowly() -> None:
    starts: list[float] = []
    slots, now_s = Slots(1), 0.0
    while now_s < 200:
        for slot in slots.due(now_s):
            slots.started(slot, f"n0.{len(starts)}", now_s)
            starts.append(now_s)
        if slots.workers:
            slots.ended(slots.workers[0], -9, now_s)
        now_s += 0.5
    pauses = [b - a for a, b in pairwise(starts)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30
    slots.started(slots.due(300.0)[0], "n0.99", 300.0)
    slots.ended("n0.99", -9, 500.0)  # it lived long enough
    assert slots.due(500.0)


def test_one_that_ended_by_itself_is_not_followed_until_another_run() -> None:
    slots = Slots(1)
    slots.started(slots.due(0.0)[0], "n0.0", 0.0)
    assert not slots.all_done
    slots.ended("n0.0", 0, 5.0)
    assert slots.all_done
    assert not slots.due(1000.0)
    slots.begin_anew()
    assert slots.due(1000.0)
    assert not slots.ended("n0.7", 0, 5.0)


def test_a_gpu_that_broke_rests_ever_longer_however_its_worker_ends() -> None:
    slots, now_s, rests = Slots(1), 0.0, []
    for number, code in enumerate((1, -9, 1)):
        slots.started(slots.due(now_s)[0], f"n0.{number}", now_s)
        slots.failed(f"n0.{number}", is_memory=False)
        slots.ended(f"n0.{number}", code, now_s)
        begin_s = now_s
        while not slots.due(now_s):
            now_s += 1.0
        rests.append(now_s - begin_s)
    assert rests == [60, 120, 240]
    assert not slots.all_done


def test_a_gpu_that_was_too_small_gets_the_next_worker_at_once() -> None:
    slots = Slots(1)
    slots.started(slots.due(0.0)[0], "n0.0", 0.0)
    slots.failed("n0.0", is_memory=True)
    slots.ended("n0.0", 1, 5.0)
    assert slots.due(5.0)
    slots.started(slots.due(5.0)[0], "n0.1", 5.0)
    slots.ended("n0.1", 1, 9.0)  # of its own
    assert slots.all_done


def test_a_machine_that_was_well_for_long_rests_as_for_the_first_time() -> None:
    slots = Slots(1)
    for begun_s, ended_s in ((0.0, 1.0), (100.0, 101.0), (1000.0, 1601.0)):
        slots.started(slots.due(begun_s)[0], f"n0.{begun_s}", begun_s)
        slots.failed(f"n0.{begun_s}")
        slots.ended(f"n0.{begun_s}", 1, ended_s)
    assert not slots.due(1660.0)
    assert slots.due(1661.0)


def test_a_machine_that_only_relays_is_never_done() -> None:
    assert not Slots(0).all_done
