import pytest

from varuna.core.devices import (
    DeviceFacts,
    class_in,
    device_of,
    is_zone,
    others_bytes,
    region_of,
    region_of_zone,
    reserved_bytes,
    worker_bytes,
)

GIB = 2**30


def gpu(name: str, gib: int = 80, others: int = 0) -> DeviceFacts:
    return DeviceFacts(name=name, memory_bytes=gib * GIB, others_bytes=others * GIB)


def test_a_worker_alone_on_its_gpu_has_all_but_the_reserve() -> None:
    assert reserved_bytes(80 * GIB) == 6 * GIB
    assert worker_bytes([gpu("a"), gpu("b")]) == 74 * GIB


def test_workers_of_one_gpu_share_it_and_each_keeps_a_reserve() -> None:
    assert worker_bytes([gpu("a"), gpu("a"), gpu("b")]) == 40 * GIB - GIB - 40 * GIB // 16


def test_the_smallest_share_counts_for_all() -> None:
    assert worker_bytes([gpu("a"), gpu("small", 16)]) == 14 * GIB


def test_what_other_programs_hold_is_not_shared_out() -> None:
    assert worker_bytes([gpu("a", others=16), gpu("b")]) == 64 * GIB - GIB - 4 * GIB
    assert worker_bytes([gpu("a", others=80)]) is not None


def test_a_later_worker_of_a_gpu_sees_the_memory_of_the_first_which_is_not_others() -> None:
    assert worker_bytes([gpu("a", others=48), gpu("a", others=16)]) == 32 * GIB - GIB - 2 * GIB


def test_memory_in_use_that_is_not_our_own_is_others_but_for_a_context() -> None:
    assert others_bytes(80 * GIB, 60 * GIB, 4 * GIB) == 15 * GIB
    assert others_bytes(80 * GIB, 75 * GIB, 4 * GIB) == 0


def test_a_tiny_share_is_halved_at_most() -> None:
    assert worker_bytes([gpu("a", 1)] * 4) == GIB // 8


@pytest.mark.parametrize("devices", [[], [None], [None, None]])
def test_nobody_knows_without_a_device(devices: list[None]) -> None:
    assert worker_bytes(devices) is None


def test_a_worker_that_has_not_said_takes_nothing_from_the_others() -> None:
    assert worker_bytes([None, gpu("a")]) == 74 * GIB


def test_a_class_in_a_region_says_of_which_device_and_where() -> None:
    name = class_in("Tesla V100-SXM2-16GB", region_of_zone("us-east-1/us-east-1a"))
    assert (device_of(name), region_of(name)) == ("Tesla V100-SXM2-16GB", "us-east-1")
    assert class_in("CPU", "") == "CPU"
    assert class_in("", "east") == "@ east"
    assert (device_of("@ east"), region_of("@ east")) == ("", "east")
    assert (device_of("CPU"), region_of("CPU")) == ("CPU", "")
    assert region_of_zone("office") == "office"


@pytest.mark.parametrize("text", ["", "/", "a/", "/a", "a b", "a\n", "a@b", "x" * 101])
def test_not_everything_is_a_zone(text: str) -> None:
    assert not is_zone(text)
    assert is_zone("rack:1/a.b-c_d+e")
