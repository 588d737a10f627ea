"""Contents of a stage's sums: nobody is told of half a micro-batch, and nothing changes what was told."""

import pytest
import torch
from torch import Tensor

from tests.unit.engine.late import LateStreams
from varuna.core.plan import Pipeline, Plan
from varuna.core.sums import IndexSet, InheritedSum, MicroBatchLoss, SectionSum, StepAssignment
from varuna.engine.device.host_copies import CPU_COPIES, HostCopies, StreamCopies
from varuna.engine.stage.gradient_bucket import Bucket
from varuna.engine.stage.sums import ResumedStep, StepShare, Sums, SumWanted, TiedTotals

PLAN = Plan(
    micro_batch=1, global_batch=6, pipelines=(Pipeline(replicas=2, bounds=(0, 3), stash_limits=(1,)),)
)  # sections 0 and 1 are trained, section 2 has nothing to train


@pytest.fixture
def leaves() -> list[Tensor]:
    return [torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bfloat16, requires_grad=True)]


def sums_over(
    leaves: list[Tensor], begun: ResumedStep | None = None, copies: HostCopies = CPU_COPIES
) -> tuple[Sums, dict[int, Bucket]]:
    here = {number: {"a": leaf} for number, leaf in enumerate(leaves)} | {2: dict[str, Tensor]()}
    flats = {} if begun is None else begun.flats
    buckets = {number: Bucket(own, torch.device("cpu"), flats.get(number)) for number, own in here.items()}
    return Sums(buckets, PLAN, begun, outlast=True, copies=copies), buckets


def add(sums: Sums, buckets: dict[int, Bucket], leaves: list[Tensor], section: int, micro_batch: int) -> None:
    with sums.adding(section, micro_batch):
        (leaves[section].float() * 2).sum().backward()  # type: ignore[no-untyped-call]
        buckets[section].collect()


def told(sums: Sums) -> dict[int, IndexSet]:
    return {each.section: each.micro_batches for each in sums.seal()}


def test_only_whole_micro_batches_are_told(leaves: list[Tensor]) -> None:
    sums, buckets = sums_over(leaves)
    sums.begin()
    for micro_batch in (0, 1):
        add(sums, buckets, leaves, 1, micro_batch)
    add(sums, buckets, leaves, 0, 0)
    with sums.adding(0, 1, whole=False):
        pass  # I of a split backward; its W is still to come
    assert told(sums) == {1: ((0, 2),)}
    assert sums.without == (2,)
    assert sums.counted(1, replica=1) == (2.0, 1.0 + 4.0)
    assert sums.counted(2, replica=0) == (6.0, 91.0)
    assert sums.counted(2, replica=1) == (0.0, 0.0)


def test_a_backward_that_raises_makes_its_section_void(leaves: list[Tensor]) -> None:
    sums, buckets = sums_over(leaves)
    sums.begin()
    for section in (0, 1):
        add(sums, buckets, leaves, section, 0)
    with pytest.raises(ValueError, match="half-way"), sums.adding(1, 1):
        raise ValueError("half-way")
    assert told(sums) == {0: ((0, 1),)}


def test_a_reduction_takes_effect_at_once_or_not_at_all(leaves: list[Tensor]) -> None:
    sums, buckets = sums_over(leaves)
    sums.begin()
    for section in (0, 1):
        add(sums, buckets, leaves, section, 0)
    sums.reduced(0, torch.full((3,), 7.0))
    assert sums.counted(0, replica=0) == (1.0, 1.0), "the vote adds up what each replica has added"
    assert told(sums) == {0: ((0, 6),), 1: ((0, 1),)}
    with pytest.raises(RuntimeError, match="ended"):
        sums.reduced(1, torch.full((3,), 7.0))
    with pytest.raises(RuntimeError, match="ended"), sums.changing():
        buckets[1].flat.zero_()
    assert buckets[0].flat.tolist() == [7.0] * 3
    assert buckets[1].flat.tolist() == [2.0] * 3


def test_the_total_of_a_tied_gradient_leaves_the_sums_as_they_are_until_the_update(leaves: list[Tensor]) -> None:
    sums, buckets = sums_over(leaves)
    totals = TiedTotals(sums)
    totals.views["w"] = buckets[0].views["a"]
    sums.begin()
    for section in (0, 1):
        add(sums, buckets, leaves, section, 0)
    before = buckets[0].flat.clone()
    totals.add_total("w", torch.full((3,), 100.0))
    assert totals.known["w"].tolist() == [100.0] * 3
    assert torch.equal(buckets[0].flat, before)
    assert told(sums) == {0: ((0, 1),), 1: ((0, 1),)}
    with pytest.raises(RuntimeError, match="the generation has ended"):
        totals.add_total("w", torch.zeros(3))
    sums.discard()
    totals.place_totals()
    assert told(sums) == {}
    assert buckets[0].flat.tolist() == [100.0] * 3


def test_the_next_generation_goes_on_and_drops_what_some_replica_has(leaves: list[Tensor]) -> None:
    taken = tuple(InheritedSum(section=0, micro_batches=((j, j + 1),), source_rank=j) for j in range(2))
    kept = (SectionSum(section=0, micro_batches=((0, 2), (4, 5))), SectionSum(section=1, micro_batches=((4, 5),)))
    rest = StepAssignment(
        work=((3, 6),), taken=taken, kept=kept, losses=(MicroBatchLoss(micro_batch=0, values=(1.0, 2.0)),)
    )
    flat = torch.full((3,), 5.0)
    sums, buckets = sums_over(leaves, ResumedStep(rest, {0: flat}))
    assert buckets[0].flat is flat, "taken over, not copied"
    sums.begin()
    for section in (0, 1):
        for micro_batch in (3, 4, 5):
            add(sums, buckets, leaves, section, micro_batch)
    assert flat.tolist() == [9.0] * 3
    assert buckets[1].flat.tolist() == [4.0] * 3
    assert sums.counted(0, replica=0) == (4.0, 1.0 + 4.0 + 16.0 + 36.0)
    sums.begin()
    add(sums, buckets, leaves, 0, 4)
    assert flat.tolist() == [2.0] * 3, "from the second step on, all is added to zeros"
    work = StepShare(PLAN, 0, 7, ResumedStep(rest, {}))
    assert (list(work.of(7)), list(work.of(8))) == ([3, 4, 5], [0, 1, 2])
    work.begin(7)
    assert work.losses.numbers() == {0: [1.0, 2.0]}
    other = StepShare(PLAN, 1, 7, ResumedStep(rest, {}))
    other.begin(7)
    assert not other.losses.numbers(), "one replica tells it"
    assert other.known == rest.losses, "but all can tell it after another loss"


def test_another_thread_gets_sums_as_they_are_between_two_actions(leaves: list[Tensor]) -> None:
    sums, buckets = sums_over(leaves)
    sums.begin()
    assert sums.sizes() == {0: 3, 1: 3}
    wanted = SumWanted(1, torch.empty(3))
    sums.request_copy(wanted)
    add(sums, buckets, leaves, 0, 0)
    assert not wanted.taken.is_set(), "of another section"
    add(sums, buckets, leaves, 1, 0)
    assert wanted.taken.is_set()
    add(sums, buckets, leaves, 1, 1)
    assert (wanted.micro_batches, wanted.room.tolist()) == (((0, 1),), [2.0] * 3)


def test_another_thread_gets_no_sums_that_have_half_of_a_micro_batch(leaves: list[Tensor]) -> None:
    sums, _ = sums_over(leaves)
    sums.begin()
    wanted = SumWanted(0, torch.empty(3))
    sums.request_copy(wanted)
    with sums.adding(0, 0, whole=False):
        pass
    assert wanted.taken.is_set()
    assert wanted.micro_batches == ()


def test_a_late_device_adds_to_sums_only_once_the_copy_of_them_is_made(leaves: list[Tensor]) -> None:
    streams = LateStreams()
    sums, buckets = sums_over(leaves, copies=StreamCopies(streams))
    sums.begin()
    wanted = SumWanted(1, sums.room()[:3])
    sums.request_copy(wanted)
    add(sums, buckets, leaves, 1, 0)
    assert wanted.room.isnan().all(), "the training thread has waited for the copy"
    add(sums, buckets, leaves, 0, 0)
    assert streams.left == 1, "nobody else needs it"
    add(sums, buckets, leaves, 1, 1)
    wanted.copied.wait()
    assert (wanted.micro_batches, wanted.room.tolist()) == (((0, 1),), [2.0] * 3)
    assert buckets[1].flat.tolist() == [4.0] * 3


@pytest.mark.parametrize("change", ["the next step", "the update"])
def test_whatever_changes_sums_on_a_late_device_runs_after_their_copies(leaves: list[Tensor], change: str) -> None:
    sums, buckets = sums_over(leaves, copies=StreamCopies(LateStreams()))
    sums.begin()
    wanted = SumWanted(0, sums.room()[:3])
    sums.request_copy(wanted)
    add(sums, buckets, leaves, 0, 0)
    if change == "the next step":
        sums.begin()
    else:
        sums.discard()
        buckets[0].flat.mul_(0.5)
    wanted.copied.wait()
    assert wanted.room.tolist() == [2.0] * 3


def test_a_total_is_on_the_device_before_anybody_is_told_of_it(leaves: list[Tensor]) -> None:
    streams = LateStreams()
    sums, buckets = sums_over(leaves, copies=StreamCopies(streams))
    sums.begin()
    add(sums, buckets, leaves, 0, 0)
    sums.reduced(0, torch.full((3,), 7.0))
    assert told(sums) == {0: ((0, 6),)}
    assert streams.left == 0
    assert buckets[0].flat.tolist() == [7.0] * 3


def test_sums_that_are_reduced_in_place_are_nobodys_meanwhile(leaves: list[Tensor]) -> None:
    sums, buckets = sums_over(leaves)
    sums.begin()
    for section in (0, 1):
        add(sums, buckets, leaves, section, 0)
    with pytest.raises(RuntimeError, match="broke off"), sums.overwriting(0):
        raise RuntimeError("broke off")
    with sums.overwriting(1):
        buckets[1].flat.fill_(7.0)
    assert told(sums) == {1: ((0, 6),)}
    with pytest.raises(RuntimeError, match="the generation has ended"), sums.overwriting(1):
        pass
