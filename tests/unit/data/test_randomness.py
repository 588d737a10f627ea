"""Seeded blocks repeat, and leave no trace."""

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.data.randomness import derive_key, generator_lock, reseeded, seeded, states_kept

Draws = tuple[float, float, float, float]


def draws() -> Draws:
    return random.random(), float(np.random.rand()), float(np.random.normal()), float(torch.rand(()))


def seeded_draws(seed: int, *keys: int | str) -> Draws:
    with seeded(seed, *keys):
        return draws()


def test_the_same_keys_give_the_same_draws_of_all_three_libraries() -> None:
    assert seeded_draws(1, "sample", 0, 5) == seeded_draws(1, "sample", 0, 5)


def test_other_keys_give_other_draws_of_all_three_libraries() -> None:
    one, other = seeded_draws(1, "sample", 0, 5), seeded_draws(1, "sample", 0, 6)
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_seeded_block_leaves_no_trace_even_when_it_fails() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = draws(), draws()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    first = draws()  # an odd number of normal draws: NumPy holds one back
    with pytest.raises(ZeroDivisionError), seeded(9):
        assert draws()[0] / 0
    assert (first, draws()) == expected


def test_seeded_blocks_nest() -> None:
    with seeded(1, "outer"):
        before = draws()
        with seeded(1, "inner"):
            draws()
        after = draws()
    with seeded(1, "outer"):
        assert (before, after) == (draws(), draws())


def test_blocks_of_two_threads_that_overlap_leave_no_trace() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    one, other = states_kept(), states_kept()  # as two loaders enter and leave them
    one.__enter__()
    with reseeded(1, "sample"):
        draws()
    other.__enter__()
    one.__exit__(None, None, None)
    with reseeded(1, "another"):
        draws()
    other.__exit__(None, None, None)
    left = draws()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert left == draws()


def test_another_thread_waits_for_the_generator() -> None:
    got_it: list[bool] = []
    with seeded(1):
        thread = threading.Thread(target=lambda: got_it.append(generator_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
    assert got_it == [False]


def test_keys_are_the_same_in_every_process_and_release() -> None:
    assert (derive_key(0, "sample", 1, 2), derive_key()) == (10402247223166555329, 13020603013274838756)


def test_parts_are_kept_apart() -> None:
    groups: list[tuple[int | str, ...]] = [
        ("ab", "c"), ("a", "bc"), ("a", "b", "c"), ("abc",), (1,), ("1",), (1, 1), (11,), (-1,), (), ("",), ("i1:1",)
    ]  # fmt: skip
    assert len({derive_key(*group) for group in groups}) == len(groups)


@given(st.lists(st.one_of(st.integers(), st.text())))
def test_every_key_can_seed_all_generators(parts: list[int | str]) -> None:
    assert 0 <= derive_key(*parts) < 2**64
    with seeded(0, *parts):
        pass


@pytest.mark.parametrize("key", [0, 2**63, 2**64 - 1])
def test_extreme_keys_seed_too(key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.randomness.derive_key", lambda *_: key)
    assert seeded_draws(1) == seeded_draws(2)
