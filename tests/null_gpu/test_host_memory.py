"""What a worker with a GPU takes of host memory, in bytes that torch's CUDA build pins over the null GPU."""

import pytest

from tests.null_gpu.measuring import is_there, measured
from tests.other_torch import NEWEST

pytestmark = pytest.mark.skipif(
    not is_there(), reason=f"needs torch {NEWEST} for CUDA: .venv/bin/python -m tests.other_torch {NEWEST} --prepare"
)

MOST = 1.1
"""Pinned for each byte that is copied."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_pins_what_it_copies(precision: str) -> None:
    """Also before the first step, when the optimizer has no state yet."""
    found = measured("saves", precision)
    assert found["copied"] <= found["reserved"] <= found["pinned"] <= MOST * found["copied"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_state_is_pinned_once_and_given_back(precision: str) -> None:
    found = measured("offload", precision)
    assert found["held"] <= found["pinned"] <= MOST * found["held"]
    assert found["held"] <= found["taken_over"] <= MOST * found["held"]
    assert found["left"] == 0


def test_state_leaves_a_gpu_through_little_pinned_memory_and_no_other() -> None:
    found = measured("moves")
    assert found == {"pinned": 2 * 4 * 2**20, "pageable reads": 0}
