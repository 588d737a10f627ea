"""``len`` and ``hash`` are others for the threads that export a model, while they do."""

import builtins
import threading

import torch

from varuna.partition.capture.open_sizes import general_lengths, hashed_sizes
from varuna.partition.opaque.each_sample import listed as listed_of


def test_only_the_threads_that_export_have_them_and_the_last_one_takes_them_away() -> None:
    length, hashed = builtins.len, torch.SymInt.__hash__
    inside, leave, seen = threading.Event(), threading.Event(), list[int]()
    listed = listed_of(torch.zeros(3, 2))  # two elements stand for three

    def export() -> None:
        with general_lengths(), hashed_sizes():
            inside.set()
            assert leave.wait(10)
            seen.append(len(listed))

    other = threading.Thread(target=export)
    with general_lengths(), hashed_sizes():
        other.start()
        assert inside.wait(10)
        assert len(listed) == 3
    assert builtins.len is not length  # the other thread still exports
    assert torch.SymInt.__hash__ is not hashed
    assert len(listed) == 2
    leave.set()
    other.join()
    assert seen == [3]
    assert builtins.len is length
    assert torch.SymInt.__hash__ is hashed
