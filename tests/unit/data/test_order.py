"""The order of samples is a pure function of (seed, position)."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.errors import UsageError
from varuna.core.plan import Pipeline, Plan
from varuna.data import sample_index

GOLDEN = [1, 0, 5, 9, 3, 7, 2, 6, 4, 8, 7, 1, 6, 9, 5, 3, 2, 0, 8, 4]
GOLDEN_FAR = 82547


def plan(*, stages: int, replicas: int, micro_batch: int, global_batch: int) -> Plan:
    return Plan(
        micro_batch=micro_batch,
        global_batch=global_batch,
        pipelines=(Pipeline(replicas=replicas, bounds=(*tuple(range(stages)), 4), stash_limits=(1,) * stages),),
    )


@given(size=st.integers(1, 400), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_index_once(size: int, seed: int, epoch: int) -> None:
    first = epoch * size
    assert sorted(sample_index(first + i, size=size, seed=seed) for i in range(size)) == list(range(size))


@given(size=st.integers(1, 2**64), position=st.integers(0, 2**80), seed=st.integers())
def test_any_size_and_position_gives_an_index_in_range(size: int, position: int, seed: int) -> None:
    assert 0 <= sample_index(position, size=size, seed=seed) < size


def test_the_order_never_changes_between_releases() -> None:
    # Changing these numbers breaks the replay of every run that anyone has recorded.
    assert [sample_index(i, size=10, seed=0) for i in range(20)] == GOLDEN
    assert sample_index(123_456_789_012, size=1_000_003, seed=42) == GOLDEN_FAR


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    size = 1000
    orders = [
        [sample_index(epoch * size + i, size=size, seed=seed) for i in range(size)]
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12  # 1 expected by chance


def test_all_small_permutations_are_about_equally_likely() -> None:
    draws = 6000
    seen = Counter(tuple(sample_index(3 * epoch + i, size=3, seed=7) for i in range(3)) for epoch in range(draws))
    assert len(seen) == 6
    chi_square = sum((count - draws / 6) ** 2 / (draws / 6) for count in seen.values())
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_every_place_is_about_equally_likely_for_an_index() -> None:
    size, draws = 20, 4000
    for place in (0, 7, 19):
        seen = Counter(sample_index(epoch * size + place, size=size, seed=3) for epoch in range(draws))
        chi_square = sum((seen[i] - draws / size) ** 2 / (draws / size) for i in range(size))
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_neighbouring_positions_are_not_neighbours_in_the_dataset() -> None:
    size = 100_000
    indices = [sample_index(i, size=size, seed=5) for i in range(2000)]
    gaps = [abs(b - a) for a, b in pairwise(indices)]
    assert abs(sum(gaps) / len(gaps) - size / 3) < size / 30  # the mean distance of two uniform draws


@pytest.mark.parametrize(("position", "size"), [(-1, 5), (0, 0), (3, -2)])
def test_a_position_that_cannot_be_is_refused(position: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"position {position} of {size}"):
        sample_index(position, size=size, seed=0)


@given(global_batch=st.integers(1, 40), micro_batch=st.integers(1, 40), step=st.integers(0, 1000), data=st.data())
def test_every_plan_uses_the_samples_of_a_step_once_and_in_the_same_order(
    global_batch: int, micro_batch: int, step: int, data: st.DataObject
) -> None:
    most = -(-global_batch // micro_batch)
    shape = plan(
        stages=data.draw(st.integers(1, 4)),
        replicas=data.draw(st.integers(1, most)),
        micro_batch=micro_batch,
        global_batch=global_batch,
    )
    numbers = [number for replica in range(shape.replicas) for number in shape.micro_batches_of(replica)]
    positions = [step * global_batch + offset for number in numbers for offset in shape.samples_of(number)]
    assert positions == list(range(step * global_batch, (step + 1) * global_batch))


def test_importing_the_order_does_not_load_torch() -> None:
    code = "import sys, varuna.data; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
