from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planner.models import MB, calibrated, model, section
from varuna.calibration.format import Hardware, OptimizerCosts
from varuna.core.model import ModelFacts, TiedParameter
from varuna.planner.pricing.profile import Peaks, profile
from varuna.planner.pricing.spans import Spans
from varuna.planner.pricing.stage_size import Size, Sizer, StageBytes
from varuna.schedule.buffers import SAMPLES_AHEAD

FOUR = model([section()] * 4)


def sizer(
    facts: ModelFacts,
    wanted: Sequence[int],
    *,
    micro_batch: int = 1,
    limit_bytes: int | None = None,
    reserved_bytes: int = 0,
    may_keep: bool = True,
    tentative: bool = True,
    together: bool = False,
    splits: bool = False,
    host_limit_bytes: int | None = None,
    stash_moves: bool = False,
) -> Sizer:
    hardware = Hardware(name="test", reserved_bytes=reserved_bytes)
    calibration = calibrated(facts, hardware=hardware, optimizer=OptimizerCosts(together=together))
    spans = Spans(
        profile(calibration, micro_batch), limit_bytes=limit_bytes, host_limit_bytes=host_limit_bytes, splits=splits
    )
    least = [1] * len(wanted)
    return Sizer(
        [spans] * len(wanted),
        wanted=wanted,
        least=least,
        may_keep=may_keep,
        stash_moves=stash_moves,
        tentative=tentative,
    )


def test_a_stage_needs_state_stash_activations_and_messages() -> None:
    needs = sizer(FOUR, (5, 3, 1), micro_batch=20, reserved_bytes=7 * MB).detail(1, 1, 3, Size(depth=3, kept=1))
    assert needs == StageBytes(
        parameters=200 * MB,
        gradients=200 * MB,
        optimizer=400 * MB,
        reserved=7 * MB,
        stash=(3 + 2) * 20 * 2 * MB,  # two more may have arrived: stage 0 runs up to 5
        kept=3 * 20 * 50 * MB + 2 * 40 * MB,  # and what each began with; the live one's is among its activations
        live=20 * (50 + 2 * 2) * MB,  # F of another micro-batch is through, what it has made is being copied
        messages=(3 + 1 + 2 + 3) * 40 * MB,  # activations in, gradients out, activations out, gradients in
        update=600 * MB,
    )
    assert needs.total == needs.state + needs.stash + needs.kept + needs.live + needs.messages


def test_activations_and_the_copy_of_a_tentative_step_never_meet() -> None:
    needs = sizer(FOUR, (5, 3, 1)).detail(1, 1, 3, Size(depth=1, kept=0))
    assert needs.stash + needs.live + needs.messages < needs.update
    assert needs.total == needs.state + needs.update
    assert sizer(FOUR, (1,)).detail(0, 0, 4, Size(depth=1, kept=0)).update == 0


def test_steps_that_nobody_combines_in_are_never_tentative_and_copy_nothing() -> None:
    assert sizer(FOUR, (5, 3, 1), tentative=False).detail(1, 1, 3, Size(depth=1, kept=0)).update == 0


@pytest.mark.parametrize(("together", "needed"), [(False, 70), (True, 100)])
def test_what_an_update_needs_counts_once_or_for_all_sections(together: bool, needed: int) -> None:
    large, small = (section().model_copy(update={"update_bytes": each * MB}) for each in (70, 30))
    sizes = sizer(model([small, large, section()]), (2, 1), tentative=False, together=together)
    assert sizes.detail(0, 0, 2, Size(depth=1, kept=0)).update == needed * MB


def test_the_ends_of_the_pipeline_have_no_neighbour() -> None:
    whole = sizer(FOUR, (1,)).detail(0, 0, 4, Size(depth=1, kept=0))
    assert (whole.stash, whole.messages) == (0, 0)


def test_a_tied_parameter_counts_once_within_a_stage_but_accumulates_gradients_per_section() -> None:
    tied = (TiedParameter(name="wte", sections=(0, 2), size_bytes=40 * MB),)
    plain, shared = (sizer(model([section()] * 3, t), (1,)).detail(0, 0, 3, Size(depth=1, kept=0)) for t in ((), tied))
    assert plain.parameters - shared.parameters == 40 * MB
    assert plain.optimizer - shared.optimizer == 80 * MB
    assert plain.gradients == shared.gradients


def test_a_tied_parameter_counts_in_every_stage_that_holds_it() -> None:
    tied = (TiedParameter(name="wte", sections=(0, 2), size_bytes=40 * MB),)
    sizes = sizer(model([section()] * 3, tied), (3, 2, 1))
    assert [sizes.detail(k, k, k + 1, Size(1, 0)).parameters for k in (0, 2)] == [100 * MB, 100 * MB]


def test_what_a_section_needs_at_work_counts_where_it_is_highest() -> None:
    early = section().model_copy(update={"backward_bytes": 400 * MB, "fixed_bytes": 7 * MB})
    late = section().model_copy(update={"backward_bytes": 20 * MB, "forward_bytes": 30 * MB})
    sizes = sizer(model([early, late, late]), (2, 1))
    assert sizes.detail(0, 0, 3, Size(1, 0)).live == (50 + 400 + 7) * MB  # B of the first, when the others are through
    assert sizes.detail(1, 1, 3, Size(1, 0)).live == (50 + 50 + 20) * MB  # B of the last, with all activations
    assert sizes.detail(0, 1, 3, Size(2, 0)).live == (50 + 50 + 30 + 2) * MB  # F of another micro-batch meanwhile


def test_on_a_cpu_a_message_is_there_until_its_last_gradient_has_been_used() -> None:
    early = section().model_copy(update={"backward_bytes": 400 * MB})
    facts = model([early, section(), section()])
    apart, together = (Spans(profile(calibrated(facts), 1), one_memory=one).at_work(0, 2) for one in (False, True))
    assert (apart, together) == ((50 + 400) * MB, (50 + 400 + 2) * MB)
    late = Spans(profile(calibrated(model([section(), early, section()])), 1), one_memory=True)
    assert late.at_work(0, 2) == (2 * 50 + 400) * MB  # among what the last section needs


def queueing(queued: int, split: int) -> ModelFacts:
    bytes_of = {
        "queued_bytes": queued * MB,
        "split_bytes": split * MB,
        "backward_bytes": 20 * MB,
        "fixed_bytes": 7 * MB,
    }
    return model([section().model_copy(update=bytes_of)] * 4)


def test_what_waits_for_w_takes_the_place_of_activations_section_by_section() -> None:
    def live(facts: ModelFacts, stage: int, start: int) -> int:
        return sizer(facts, (3, 1), splits=True).detail(stage, start, start + 3, Size(1, 0)).live

    assert live(queueing(10, 15), 1, 1) == (3 * 50 + 20 + 7) * MB  # B of the last section needs most
    assert live(queueing(10, 40), 1, 1) == (3 * 50 + 40) * MB  # I of the last
    assert live(queueing(80, 40), 1, 1) == (50 + 40 + 2 * 80) * MB  # I of the first: the others have left theirs
    assert live(queueing(80, 0), 1, 1) == (3 * 80 + 7) * MB  # W of the last
    assert live(queueing(80, 40), 0, 0) == (3 * 50 + 20 + 7) * MB  # stage 0 runs B whole


def test_where_all_is_kept_what_waits_for_w_counts_if_it_is_more_than_activations_and_input() -> None:
    def detail(facts: ModelFacts, kept: int) -> StageBytes:
        return sizer(facts, (9, 5, 1), splits=True).detail(1, 1, 3, Size(5, kept))

    assert detail(queueing(40, 0), 2).kept == 5 * 2 * 50 * MB
    assert detail(queueing(51, 0), 2).kept == 5 * 2 * 50 * MB  # the input of 2 MB, which is in the stash, goes before
    assert detail(queueing(80, 0), 2).kept == (2 * 50 + 4 * (2 * 80 - 2)) * MB
    assert detail(queueing(80, 0), 1).kept == (5 * 50 + 4 * 2) * MB  # with an R, W follows its I at once
    facts = queueing(80, 0)
    limit = detail(facts, 2).total
    assert sizer(facts, (9, 5, 1), limit_bytes=limit, splits=True).size(1, 1, 3) == Size(5, 2)
    assert sizer(facts, (9, 5, 1), limit_bytes=limit - 1, splits=True).size(1, 1, 3) == Size(5, 1)


def test_samples_count_while_their_micro_batch_is_in_flight_and_as_they_are_read_ahead() -> None:
    reading = section().model_copy(update={"input_bytes": MB})
    sizes = sizer(model([reading, section(), section()]), (3, 1))
    assert sizes.detail(0, 0, 2, Size(3, 0)).stash == (3 + SAMPLES_AHEAD) * MB
    assert sizes.detail(1, 2, 3, Size(1, 0)).stash == (1 + 2) * 2 * MB


def test_on_a_cpu_whole_samples_count_while_they_are_read_even_if_a_stage_needs_a_part() -> None:
    pixels, labels = (section().model_copy(update={"input_bytes": size}) for size in (5 * MB, MB))
    facts = model([pixels, section(), labels])
    for one_memory, more in ((False, 0), (True, 6 * MB)):
        spans = Spans(profile(calibrated(facts), 1), one_memory=one_memory)
        assert [spans.ahead(0, 1), spans.ahead(1, 2), spans.ahead(2, 3)] == [
            SAMPLES_AHEAD * 5 * MB + more,
            0,
            SAMPLES_AHEAD * MB + more,
        ]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_peaks_know_the_largest_of_any_span(values: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values) - 1))
    stop = data.draw(st.integers(start + 1, len(values)))
    assert Peaks.of(values).over(start, stop) == max(values[start:stop])


MORE = 2
"""Messages that may leave beside those of a stage with one micro-batch in flight."""


def least(facts: ModelFacts, wanted: Sequence[int]) -> int:
    return sizer(facts, wanted, micro_batch=20).least_bytes(1, 1, 3)


def test_memory_goes_to_depth_first_and_then_to_keeping() -> None:
    bare, message, activations = least(FOUR, (6, 6, 1)), 40 * MB, 20 * 50 * MB
    rest = 5 * message + MORE * message
    one = activations + message  # what it takes too: the section before keeps nothing

    def size(limit_bytes: int) -> Size | None:
        return sizer(FOUR, (6, 6, 1), micro_batch=20, limit_bytes=limit_bytes).size(1, 1, 3)

    assert size(bare - 1) is None
    assert size(bare) == Size(depth=1, kept=0)
    assert size(bare + rest - 1) == Size(depth=5, kept=0)
    assert size(bare + rest) == Size(depth=6, kept=0)
    assert size(bare + rest + 5 * one - 1) == Size(depth=6, kept=0)
    assert size(bare + rest + 5 * one) == Size(depth=6, kept=1)
    assert size(bare + rest + 10 * activations - 1) == Size(depth=6, kept=1)
    assert size(bare + rest + 10 * activations) == Size(depth=6, kept=2)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_bytes_of_a_size_are_what_it_was_chosen_by(kept: int) -> None:
    taken = 20 * 2 * MB * (kept == 1)  # the first section takes the stage's input, which is in the stash
    limit = least(FOUR, (6, 6, 1)) + (5 + MORE) * 40 * MB + 5 * (kept * 20 * 50 * MB + taken)
    sizes = sizer(FOUR, (6, 6, 1), micro_batch=20, limit_bytes=limit)
    size = sizes.size(1, 1, 3)
    assert size == Size(depth=6, kept=kept)
    assert sizes.detail(1, 1, 3, size).total == limit


NAMES = ("activation_bytes", "boundary_bytes", "forward_bytes", "backward_bytes", "input_bytes", "queued_bytes")
IDLE = dict.fromkeys(NAMES, 0)


def sections_of(sizes_bytes: Sequence[dict[str, int]]) -> ModelFacts:
    return model([section().model_copy(update=each) for each in sizes_bytes])


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    each = st.just(0) | st.integers(0, 9).map(lambda megabytes: megabytes * MB)
    return sections_of([{name: draw(each) for name in NAMES} for _ in range(4)])


@given(st.data(), models(), st.integers(1, 7), st.booleans())
def test_what_a_size_was_promised_with_is_enough_for_it(
    data: st.DataObject, facts: ModelFacts, depth: int, splits: bool
) -> None:
    wanted = (depth + 1, depth, 1)

    def sized(limit_bytes: int) -> tuple[Size | None, Sizer]:
        sizes = sizer(facts, wanted, limit_bytes=limit_bytes, splits=splits, tentative=False)
        return sizes.size(1, 1, 3), sizes

    limit = sizer(facts, wanted).detail(1, 1, 3, Size(1, 0)).state + data.draw(st.integers(1, 400)) * MB
    size, sizes = sized(limit)
    if size is None:
        return
    needed = sizes.detail(1, 1, 3, size).total
    assert needed <= limit
    again = sized(needed)[0]
    assert again is not None
    assert again.depth == size.depth
    assert sizes.detail(1, 1, 3, again).total <= needed


@given(st.data(), models(), st.integers(1, 7), st.booleans())
def test_what_a_size_was_promised_with_is_enough_where_inputs_move(
    data: st.DataObject, facts: ModelFacts, depth: int, may_keep: bool
) -> None:
    wanted, first = (depth + 2, depth, 1), data.draw(st.integers(0, 1))
    place = first, first, first + 2
    limit = sizer(facts, wanted, tentative=False).detail(*place, Size(1, 0)).state + data.draw(st.integers(1, 200)) * MB
    host_limit = data.draw(st.none() | st.integers(0, 60).map(lambda megabytes: megabytes * MB))
    sizes = sizer(
        facts,
        wanted,
        limit_bytes=limit,
        host_limit_bytes=host_limit,
        stash_moves=True,
        may_keep=may_keep,
        tentative=False,
    )
    size = sizes.size(*place)
    if size is None:
        return
    needed = sizes.detail(*place, size)
    assert needed.total <= limit
    assert host_limit is None or needed.host <= host_limit
    assert size.moved <= size.depth


def test_no_more_inputs_move_than_are_in_flight_though_more_messages_then_leave() -> None:
    facts = sections_of(
        [
            IDLE | {"backward_bytes": 5 * MB, "input_bytes": 9 * MB},
            IDLE | {"backward_bytes": 8 * MB, "boundary_bytes": 3 * MB},
            *(IDLE, IDLE),
        ]
    )
    state = sizer(facts, (8, 7, 1), tentative=False).detail(0, 0, 2, Size(1, 0)).state
    for limit, host_limit in product(range(60, 100, 4), range(30, 70, 2)):
        sizes = sizer(
            facts,
            (8, 7, 1),
            limit_bytes=state + limit * MB,
            host_limit_bytes=host_limit * MB,
            stash_moves=True,
            tentative=False,
        )
        size = sizes.size(0, 0, 2)
        if size is not None:
            needed = sizes.detail(0, 0, 2, size)
            assert needed.total <= state + limit * MB
            assert needed.host <= host_limit * MB
            assert size.moved <= size.depth


def test_kept_activations_wait_while_those_before_them_run_again() -> None:
    before = {"activation_bytes": 7 * MB, "input_bytes": 3 * MB}
    before |= dict.fromkeys(("boundary_bytes", "forward_bytes", "backward_bytes"), 4 * MB)
    kept = {"activation_bytes": 3 * MB, "boundary_bytes": 3 * MB, "input_bytes": 9 * MB}
    facts = sections_of([IDLE | {"boundary_bytes": 8 * MB}, IDLE | before, IDLE | kept, IDLE])
    bare, keeping = (sizer(facts, (5, 4, 1), tentative=False).detail(1, 1, 3, Size(4, kept)).total for kept in (0, 1))
    sizes = sizer(facts, (5, 4, 1), limit_bytes=keeping - MB, tentative=False)
    assert bare < keeping - MB
    assert sizes.size(1, 1, 3) == Size(depth=4, kept=0)
    assert sizer(facts, (5, 4, 1), limit_bytes=keeping, tentative=False).size(1, 1, 3) == Size(depth=4, kept=1)


def test_a_stage_that_needs_less_without_an_r_keeps_rather_than_have_fewer_in_flight() -> None:
    busy, sending = IDLE | {"forward_bytes": 2 * MB, "backward_bytes": 2 * MB}, IDLE | {"boundary_bytes": MB}
    facts = sections_of((IDLE, busy, sending, IDLE))
    bare, keeping = (sizer(facts, (3, 2, 1), tentative=False).detail(1, 1, 3, Size(2, kept)).total for kept in (0, 2))
    assert bare == keeping + MB  # an R waits beside one message more than an F

    def size(limit_bytes: int, *, may_keep: bool = True) -> Size | None:
        return sizer(facts, (3, 2, 1), limit_bytes=limit_bytes, may_keep=may_keep, tentative=False).size(1, 1, 3)

    assert size(keeping) == Size(depth=2, kept=2)
    assert size(keeping, may_keep=False) == Size(depth=1, kept=0)


def test_of_few_micro_batches_in_flight_few_have_messages() -> None:
    facts = model([section().model_copy(update={"backward_bytes": 400 * MB})] * 4)

    def messages(depth: int) -> int:
        return sizer(facts, (7, 7, 1)).detail(1, 1, 3, Size(depth, 0)).messages // (2 * MB)

    ends = 3 + 1  # activations that come, and the gradient that leaves
    # The rest while a backward runs, beside what it was given: gradients that come, and activations that leave.
    assert [messages(depth) - ends for depth in range(1, 8)] == [2 + 0, 3 + 0, 3 + 1, 3 + 2, 3 + 3, 3 + 3, 3 + 3]


def test_a_forward_that_has_not_got_to_the_kept_sections_holds_less_than_others_in_flight() -> None:
    large = section().model_copy(update={"forward_bytes": 600 * MB})
    facts = model([large, section(), section()])

    def live(kept: int) -> int:
        found = sizer(facts, (4, 1)).detail(0, 0, 2, Size(4, kept))
        return found.live + found.kept

    held = 50 + 2
    assert live(0) == (2 * 50 + 600) * MB
    assert live(1) == (2 * held + 2 * 50 + 600) * MB  # two others in flight, the one that waits, and the F


def test_nothing_is_kept_on_memory_that_nobody_knows() -> None:
    assert sizer(FOUR, (6, 6, 1)).size(1, 1, 3) == Size(depth=6, kept=0)


def test_kept_sections_cost_no_recompute_and_the_last_stage_never_recomputes() -> None:
    plenty = 10**12
    keeping, not_keeping = (sizer(FOUR, (6, 6, 1), limit_bytes=plenty, may_keep=may) for may in (True, False))
    assert keeping.seconds(1, 1, 3) == pytest.approx(2 * 3 * 0.005)
    assert not_keeping.seconds(1, 1, 3) == pytest.approx(2 * 4 * 0.005)
    assert not_keeping.seconds(2, 3, 4) == pytest.approx(3 * 0.005)
    assert sizer(FOUR, (6, 6, 1), limit_bytes=1).seconds(1, 1, 3) == float("inf")
