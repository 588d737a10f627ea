"""Sums of another rank count only beside its state of the same step, and the newest of each section alone."""

import pytest
import torch

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.sums import HeldSums, MicroBatchLoss, SectionSum, Spans, joined
from varuna.engine.copies import keeping
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


LAYOUTS = [
    SectionLayout.of(SectionState(section, {"parameters/w": torch.full((4,), float(section))})) for section in (3, 4)
]


def begin(copy: KeptCopy, step: int) -> None:
    """The state of a step comes: each value is its number."""
    body = copy.begin(step, LAYOUTS)
    assert body is not None
    body.write(0, torch.full((body.size_bytes // 4,), float(step)).view(torch.uint8))


def copy_of(step: int) -> KeptCopy:
    """A complete copy of two sections."""
    copy = KeptCopy()
    begin(copy, step)
    copy.complete(step, LAYOUTS)
    return copy


def finish(copy: KeptCopy, step: int) -> None:
    """The last sums of a step come, with a total."""
    for section in (3, 4):
        put(copy, step, held(section, ((0, 4),)), float(section))
    copy.complete_step(step, {"w": torch.ones(4)})


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
    begin(copy, 6)
    copy.complete_sum(5, held(3, ((0, 1),)), room)
    assert (copy.seal(5), copy.sums(5)) == ({}, {})


def values_of(states: dict[int, SectionState]) -> dict[int, float]:
    return {section: float(state.tensors["parameters/w"].mean()) for section, state in states.items()}


@pytest.mark.parametrize("come", ["nothing", "a part"])
def test_a_whole_step_is_kept_until_the_next_state_is_there(come: str) -> None:
    copy = copy_of(5)
    finish(copy, 5)
    if come == "a part":
        begin(copy, 6)
    assert copy.seal(6) == {}
    left = copy.update_left(6)
    assert left is not None
    assert (left.step, values_of(left.states), list(left.totals)) == (5, {3: 5.0, 4: 5.0}, ["w"])
    assert {section: float(each.values[0]) for section, each in left.sums.items()} == {3: 3.0, 4: 4.0}
    assert [copy.update_left(step) for step in (None, 7)] == [None, None]


def test_it_helps_nobody_who_has_not_applied_the_step_or_whose_state_is_there() -> None:
    copy = copy_of(5)
    finish(copy, 5)
    assert values_of(copy.seal(5)) == {3: 5.0, 4: 5.0}
    assert copy.update_left(5) is None
    copy = copy_of(5)
    finish(copy, 5)
    begin(copy, 6)
    copy.complete(6, LAYOUTS)
    assert values_of(copy.seal(6)) == {3: 6.0, 4: 6.0}
    assert copy.update_left(6) is None


def test_a_step_that_is_not_whole_or_not_the_one_before_is_of_no_use() -> None:
    copy = copy_of(5)
    put(copy, 5, held(3, ((0, 4),)), 3.0)
    begin(copy, 6)
    assert (copy.seal(6), copy.update_left(6)) == ({}, None)
    copy = copy_of(5)
    finish(copy, 5)
    begin(copy, 6)
    begin(copy, 7)  # the copy of 6 was broken off
    assert (copy.seal(7), copy.update_left(7)) == ({}, None)


def test_memory_of_states_is_used_again() -> None:
    """Two states and the sums of one step are the most that there is, however many steps there are."""
    copy, places = KeptCopy(), set[int]()
    for step in range(6):
        begin(copy, step)
        copy.complete(step, LAYOUTS)
        finish(copy, step)
        states = [copy._memories[section].data_ptr() for section in (3, 4)]
        places |= {*states, *(each.values.data_ptr() for each in copy.sums(step).values())}
    assert len(places) == 2 * 2 + 2


def test_without_room_for_both_the_older_state_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of(5)
    finish(copy, 5)
    monkeypatch.setattr(keeping, "available_bytes", lambda: 0)
    begin(copy, 6)
    copy.complete(6, LAYOUTS)
    assert values_of(copy.seal(6)) == {3: 6.0, 4: 6.0}


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
