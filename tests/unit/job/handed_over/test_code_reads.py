"""Reads of an object by a function are found in the bytecode of every Python."""

import dis
from collections.abc import Iterator
from typing import Any

import pytest

from varuna.job.handed_over.code_reads import Reads

_instructions = dis.get_instructions


class Counted:
    """A dataset whose length follows an attribute that is read after an assignment."""

    level = 2

    def __getitem__(self, index: int) -> int:
        doubled = 2 * index
        return self.level * doubled

    def __len__(self) -> int:
        return 8


def fused(code: Any, **how: Any) -> Iterator[dis.Instruction]:
    """The instructions as Python 3.13 writes them: it fuses a store or a load with the load that follows."""
    steps = list(_instructions(code, **how))
    while steps:
        step = steps.pop(0)
        if step.opname in ("STORE_FAST", "LOAD_FAST") and steps and steps[0].opname == "LOAD_FAST":
            after = steps.pop(0)
            name = f"{step.opname}_LOAD_FAST"
            step = step._replace(opname=name, argval=(step.argval, after.argval))
        yield step


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_attribute_that_is_read_after_an_assignment_is_found(
    monkeypatch: pytest.MonkeyPatch, is_fused: bool
) -> None:
    if is_fused:
        monkeypatch.setattr(dis, "get_instructions", fused)
    reads = Reads()
    reads.follow_reads(Counted(), "dataset")
    assert "dataset.level" in [place.name for place in reads.found()]
