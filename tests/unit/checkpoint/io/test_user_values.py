"""The values of a user's state_dict come back from JSON as they were."""

import json
import random
from datetime import date

import numpy as np
import pytest
import torch

from varuna.checkpoint.io.user_values import as_json, from_json
from varuna.core.errors import UsageError


def again(value: object) -> object:
    return from_json(json.loads(json.dumps(as_json(value, "state"))))


def test_plain_values_and_containers_come_back() -> None:
    value = {"a": [1, 2.5, None, True, "ü"], 3: (1, (2,)), "deep": {"varuna:kind": "tensor"}, "raw": b"\x00\xff"}
    assert again(value) == value
    assert again(float("inf")) == float("inf")
    assert again(np.float32(0.5)) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    for value in (torch.arange(6).reshape(2, 3).to(dtype).t(), torch.zeros(0, 3).to(dtype), torch.tensor(1).to(dtype)):
        found = again({"t": value})
        assert isinstance(found, dict)
        assert found["t"].dtype is dtype
        assert torch.equal(found["t"], value)


def test_generators_of_three_libraries_continue_where_they_were() -> None:
    """As people save them: random, NumPy's new and old generators, and torch's."""
    ours, new = random.Random(3), random.Random(4)
    new.setstate(again(ours.getstate()))  # type: ignore[arg-type]
    assert new.random() == ours.random()
    numbers, others = np.random.default_rng(3), np.random.default_rng(4)
    others.bit_generator.state = again(numbers.bit_generator.state)  # type: ignore[assignment]
    assert others.random() == numbers.random()
    old, older = np.random.RandomState(3), np.random.RandomState(4)
    older.set_state(again(old.get_state()))  # type: ignore[arg-type]
    assert older.rand() == old.rand()
    draws, drawn = torch.Generator().manual_seed(3), torch.Generator()
    drawn.set_state(again(draws.get_state()))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(3, generator=draws), torch.rand(3, generator=drawn))


def test_what_has_no_place_is_named() -> None:
    with pytest.raises(UsageError, match=r"state\['begun'\]\[0\] is a date, which checkpoints cannot hold"):
        as_json({"begun": [date(2026, 1, 1)]}, "state")
