"""Of another rank's sums those of the newest step are kept, and the newest of each section alone."""

from varuna.core.sums import HeldSums, IndexSet, MicroBatchLoss, SectionSum, joined
from varuna.engine.copies.keeping import KeptSums


def held(section: int, spans: IndexSet, *losses: int) -> HeldSums:
    noted = tuple(MicroBatchLoss(micro_batch=number, values=(1.0, 2.0)) for number in losses)
    return HeldSums(
        micro_batch=2,
        sections=(),
        copies=(SectionSum(section=section, micro_batches=spans),),
        without=(9,),
        losses=noted,
    )


def put(kept: KeptSums, step: int, sums: HeldSums, value: float) -> int:
    """Keep sums, and return their address in memory."""
    room = kept.begin(step, 16)
    assert room is not None
    kept.complete(sums, room.fill_(value))
    return room.data_ptr()


def test_the_newest_sums_of_each_section_are_reported() -> None:
    kept = KeptSums()
    put(kept, 5, held(3, ((0, 2),), 0, 1), 1.0)
    put(kept, 5, held(4, ((0, 3),), 0, 1, 2), 2.0)
    put(kept, 5, held(3, ((0, 4),), 0, 1, 2, 3), 3.0)
    sums = kept.sealed(5)
    assert [set(sums[section].values.tolist()) for section in (3, 4)] == [{3.0}, {2.0}]
    whole = joined([each.held for each in sums.values()])
    assert whole is not None
    assert {each.section: each.micro_batches for each in whole.copies} == {3: ((0, 4),), 4: ((0, 3),)}
    assert [each.micro_batch for each in whole.losses] == [0, 1, 2, 3]
    assert whole.without == (9,)
    assert (kept.sealed(6), kept.sealed(None)) == ({}, {})


def test_memory_of_what_is_replaced_or_over_is_used_again() -> None:
    """A stage's sums and one more are the most that there is."""
    kept, places = KeptSums(), set[int]()
    for step in range(4):
        for section in (3, 4, 3, 4):
            places.add(put(kept, step, held(section, ((0, 1),)), float(step)))
    assert len(places) == 3
    assert {section: each.values.tolist() for section, each in kept.sealed(3).items()} == {3: [3.0] * 4, 4: [3.0] * 4}


def test_sums_that_arrive_after_the_report_are_dropped() -> None:
    kept = KeptSums()
    room = kept.begin(5, 16)
    assert room is not None
    assert kept.sealed(5) == {}
    kept.complete(held(3, ((0, 1),)), room)
    assert kept.sealed(5) == {}
    assert kept.begin(5, 16) is None
    assert kept.begin(6, 16) is None


def test_a_worker_without_any_has_none() -> None:
    assert joined([]) is None
