"""Host memory that a GPU's worker pins, and device memory that it sees, by torch's CUDA build over the null GPU."""

import pytest

from tests.null_gpu.measuring import measured

MOST = 1.1
"""Pinned for each byte that is copied."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_pins_what_it_copies(precision: str) -> None:
    """Also before the first step, when the optimizer has no state yet."""
    found = measured("saves", precision)
    assert found["copied"] <= found["reserved"] <= found["pinned"] <= MOST * found["copied"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_checkpoints_pin_the_newest_and_the_one_before(precision: str) -> None:
    found = measured("keeps", precision)
    assert 2 * found["copied"] <= found["pinned"] <= 2 * MOST * found["copied"]
    assert found["pageable reads"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_state_is_pinned_once_and_given_back(precision: str) -> None:
    found = measured("offload", precision)
    assert found["held"] <= found["pinned"] <= MOST * found["held"]
    assert found["held"] <= found["taken_over"] <= MOST * found["held"]
    assert found["left"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_are_pinned_once_and_given_back(precision: str) -> None:
    """A section has a twentieth of them."""
    found = measured("streams", precision)
    assert found["held"] <= found["pinned"] <= MOST * found["held"]
    assert found["device"] < found["held"] / 4
    assert found["left"] == 0


def test_state_leaves_a_gpu_through_little_pinned_memory_and_no_other() -> None:
    found = measured("moves")
    assert (found["pinned"], found["pageable reads"]) == (2 * 4 * 2**20, 0)


def test_segments_grow_where_the_driver_has_them() -> None:
    found = measured("segments", NULL_GPU_EXPANDS="1")
    assert found["grow"]
    assert all(found["grow"])
    assert "fragment" not in found["said"]


@pytest.mark.parametrize("before", [(), ("cuda:0",)])
def test_a_driver_without_such_segments_is_found_out_and_said_once(before: tuple[str, ...]) -> None:
    """Also if the script has used the device, so that some memory of it is cached."""
    found = measured("segments", *before)
    assert not any(found["grow"])
    assert found["said"].count("the memory of cuda:0 may fragment, as its driver has no expandable segments\n") == 1


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(variable: str) -> None:
    found = measured("segments", NULL_GPU_EXPANDS="1", **{variable: "max_split_size_mb:512"})
    assert not any(found["grow"])
    assert "fragment" not in found["said"]


@pytest.mark.parametrize("gib", [0, 100])
def test_memory_of_other_programs_is_seen_and_our_own_is_not_theirs(gib: int) -> None:
    found = measured("others", NULL_GPU_OTHERS_GIB=str(gib))
    context_bytes = 500 << 20  # is within what is reserved
    assert found["others"] == [max(0, (gib << 30) + context_bytes - (1 << 30))] * 2
