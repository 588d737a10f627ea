"""Copies of tensors without data."""

import copy
from typing import Any

from torch import nn

from varuna.partition.capture.construction import construct
from varuna.partition.watching.fake_mode import FakeMode


class Copies(nn.Module):
    """Heads that start from the same values, as detectors have them."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Linear(4, 2)
        self.heads = nn.ModuleList(copy.deepcopy(head) for _ in range(3))


def test_what_is_copied_belongs_to_the_same_mode() -> None:
    mode = FakeMode()
    values: list[Any] = list(construct(Copies, 0).module.parameters())

    assert copy.deepcopy({"mode": mode})["mode"] is mode
    assert len({id(value.fake_mode) for value in values}) == 1


def test_copies_have_the_values_of_what_was_copied_unless_drawn_anew() -> None:
    class Reset(Copies):
        def __init__(self) -> None:
            super().__init__()
            nn.init.ones_(self.heads[2].weight)  # type: ignore[arg-type]

    made = construct(Reset, 0)
    first, second, third = (made.parameter(f"heads.{number}.weight", 0) for number in range(3))

    assert first.std() > 0
    assert second.std() > 0
    assert third.eq(1).all()
