"""Collections leave out what is old, for a while, or are rare for good."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from varuna.process.garbage import collect_rarely, old_left_out


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _not_frozen() -> Iterator[None]:
    """As in a process of a user's; tests begin with what is imported frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.nightly
def test_old_garbage_is_collected_after_the_block_and_new_garbage_within_it() -> None:
    gc.collect()
    old = Cycle()
    seen = weakref.ref(old)
    usual = gc.get_threshold()
    with old_left_out():
        new = weakref.ref(Cycle())
        del old
        gc.collect()
        assert new() is None
        assert seen() is not None
        with old_left_out():  # what is frozen stays so for the outer block
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == usual
    gc.collect()
    assert seen() is None


def test_what_a_server_says_and_hears_starts_no_collection_of_all_that_it_has() -> None:
    usual = gc.get_threshold()
    try:
        collect_rarely()
        connections = [[[number]] for number in range(20_000)]
        gc.collect()
        before = gc.get_stats()[2]["collections"]
        for _ in range(20):
            for connection, beat in zip(connections, [[number] for number in range(len(connections))], strict=True):
                connection[0] = beat
        assert gc.get_stats()[2]["collections"] == before
        ended = weakref.ref(Cycle())
        some: list[list[int]] = [[] for _ in range(1_400_000)]
        assert ended() is None, "garbage goes at last"
        del some
    finally:
        gc.set_threshold(*usual)
