"""Sums of another rank count only beside its state of the same step, and the newest of each section alone."""

import torch

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.sums import HeldSums, MicroBatchLoss, SectionSum, Spans, joined
from varuna.engine.copies.keeping import KeptCopy
from varuna.engine.copies.layout import SectionLayout


def held(section: int, spans: Spans, *losses: int) -> HeldSums:
    noted = tuple(MicroBatchLoss(micro_batch=number, values=(1.0, 2.0)) for number in losses)
    return HeldSums(
        micro_batch=2,
        sections=(),
        copies=(SectionSum(section=section, micro_batches=spans),),
        without=(9,),
        losses=noted,
    )


def copy_of(step: int) -> KeptCopy:
    """A complete copy of two sections."""
    copy = KeptCopy()
    layouts = [
        SectionLayout.of(SectionState(section, {"parameters/w": torch.full((4,), float(section))}))
        for section in (3, 4)
    ]
    assert copy.begin(layouts) is not None
    copy.complete(step, layouts)
    return copy


def put(copy: KeptCopy, step: int, sums: HeldSums, value: float) -> None:
    room = copy.begin_sum(step, 16)
    assert room is not None
    copy.complete_sum(step, sums, room.fill_(value))


def test_the_newest_sums_of_each_section_are_reported_with_the_state() -> None:
    copy = copy_of(5)
    put(copy, 5, held(3, ((0, 2),), 0, 1), 1.0)
    put(copy, 5, held(4, ((0, 3),), 0, 1, 2), 2.0)
    put(copy, 5, held(3, ((0, 4),), 0, 1, 2, 3), 3.0)
    assert set(copy.seal(5)) == {3, 4}
    sums = copy.sums(5)
    assert [set(sums[section].values.tolist()) for section in (3, 4)] == [{3.0}, {2.0}]
    whole = joined([each.held for each in sums.values()])
    assert whole is not None
    assert {each.section: each.micro_batches for each in whole.copies} == {3: ((0, 4),), 4: ((0, 3),)}
    assert [each.micro_batch for each in whole.losses] == [0, 1, 2, 3]
    assert whole.without == (9,)
    assert copy.sums(6) == {}


def test_sums_alone_are_those_of_the_newest_step() -> None:
    """Memory of what is replaced or over is used again: a stage's sums and one more are the most that there is."""
    copy, places = KeptCopy(), set[int]()
    for step in range(4):
        copy.turn_to(step)
        for section in (3, 4, 3, 4):
            put(copy, step, held(section, ((0, 1),)), float(step))
            places.add(copy.sums(step)[section].values.data_ptr())
    assert len(places) == 3
    assert copy.sums(2) == {}
    assert copy.seal(3) == {}
    assert {section: each.values.tolist() for section, each in copy.sums(3).items()} == {3: [3.0] * 4, 4: [3.0] * 4}
    copy.turn_to(4)
    assert set(copy.sums(3)) == {3, 4}, "it is sealed"


def test_sums_that_belong_to_no_complete_state_are_not_taken() -> None:
    copy = copy_of(5)
    assert copy.begin_sum(4, 16) is None
    assert copy.begin_sum(6, 16) is None
    room = copy.begin_sum(5, 16)
    assert room is not None
    copy.begin([])  # the next state comes
    copy.complete_sum(5, held(3, ((0, 1),)), room)
    assert (copy.seal(5), copy.sums(5)) == ({}, {})


def test_sums_that_arrive_after_the_report_are_dropped() -> None:
    copy = copy_of(5)
    room = copy.begin_sum(5, 16)
    assert room is not None
    copy.seal(5)
    copy.complete_sum(5, held(3, ((0, 1),)), room)
    assert copy.sums(5) == {}
    assert copy.begin_sum(5, 16) is None


def test_a_worker_without_any_has_none() -> None:
    assert joined([]) is None
