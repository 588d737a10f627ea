"""Plan, vote and units: the arithmetic that everything else relies on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from varuna.core.errors import UsageError
from varuna.core.plan import Pipeline, Plan
from varuna.core.units import format_bytes, format_duration, parse_bytes, step_number
from varuna.core.vote import VoteLayout


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    global_batch = draw(st.integers(1, 60))
    micro_batch = draw(st.integers(1, global_batch))
    sections = draw(st.integers(1, 12))
    stages = draw(st.integers(1, sections))
    starts = sorted(draw(st.permutations(range(1, sections)))[: stages - 1])
    replicas = draw(st.integers(1, -(-global_batch // micro_batch)))
    speeds = draw(st.lists(st.floats(0.01, 1.0), min_size=replicas, max_size=replicas) | st.just([]))
    return Plan(
        micro_batch=micro_batch,
        global_batch=global_batch,
        pipelines=(
            Pipeline(
                replicas=replicas,
                bounds=(0, *starts, sections),
                stash_limits=(1,) * stages,
                speeds=tuple(sorted(speeds, reverse=True)),
            ),
        ),
    )


@given(plans())
def test_every_sample_of_the_global_batch_is_used_exactly_once(plan: Plan) -> None:
    samples = [
        sample
        for replica in range(plan.replicas)
        for micro_batch in plan.micro_batches_of(replica)
        for sample in plan.samples_of(micro_batch)
    ]
    assert sorted(samples) == list(range(plan.global_batch))
    shares = [len(plan.micro_batches_of(replica)) for replica in range(plan.replicas)]
    assert shares == sorted(shares, reverse=True)
    assert min(shares) >= 1
    assert plan.speeds or max(shares) - min(shares) <= 1


@given(plans())
def test_ranks_and_sections_map_both_ways(plan: Plan) -> None:
    for rank in range(plan.workers):
        assert plan.rank_of(*plan.place_of(rank)) == rank
    for stage in range(plan.stages):
        assert all(plan.first.stage_of(section) == stage for section in plan.first.sections_of(stage))
    assert sum(len(plan.first.sections_of(stage)) for stage in range(plan.stages)) == plan.sections


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValidationError, match="do not ascend"):
        Plan(micro_batch=1, global_batch=4, pipelines=(Pipeline(bounds=(0, 0, 3), stash_limits=(1, 1)),))
    for speeds in ((1.0,), (0.5, 1.0), (1.5, 1.0), (1.0, 0.0)):
        with pytest.raises(ValidationError, match=r"more than 0 and at most 1, fastest first"):
            Plan(
                micro_batch=1,
                global_batch=4,
                pipelines=(Pipeline(replicas=2, bounds=(0, 3), stash_limits=(1,), speeds=speeds),),
            )
    with pytest.raises(ValidationError, match="cannot share"):
        Plan(micro_batch=1, global_batch=4, pipelines=(Pipeline(replicas=5, bounds=(0, 3), stash_limits=(1,)),))
    for stay in [(1,), (4, 1), (-1, 1)]:
        with pytest.raises(ValidationError, match=r"stash_on_device|on the device"):
            Pipeline(bounds=(0, 1, 2), stash_limits=(3, 1), stash_on_device=stay)


def test_pipelines_that_are_cut_alike_are_listed_by_their_speed() -> None:
    pipelines = (
        Pipeline(replicas=2, bounds=(0, 2), stash_limits=(1,), speeds=(1.0, 0.5)),
        Pipeline(replicas=2, pace=0.6, bounds=(0, 1, 2), stash_limits=(2, 1), speeds=(1.0, 0.5)),
    )
    plan = Plan(micro_batch=1, global_batch=30, pipelines=pipelines)
    assert plan.rates == (1.0, 0.5, 0.6, 0.3)
    assert sum(plan.shares) == 30
    assert plan.shares[0] > plan.shares[2] > plan.shares[1] > plan.shares[3]
    with pytest.raises(ValidationError, match="divide the same sections"):
        Plan(micro_batch=1, global_batch=30, pipelines=(*pipelines, Pipeline(bounds=(0, 3), stash_limits=(1,))))


def test_a_copy_with_a_field_that_there_is_not_is_refused() -> None:
    plan = Plan(micro_batch=1, global_batch=4, pipelines=(Pipeline(bounds=(0, 3), stash_limits=(1,)),))
    with pytest.raises(AttributeError, match="Plan has no split_last"):
        plan.model_copy(update={"split_last": 2})
    assert plan.with_each_pipeline(split_last=2).first.split_last == 2


def test_a_stage_keeps_its_last_sections_and_has_nothing_to_recompute_if_those_are_all() -> None:
    plan = Plan(micro_batch=1, global_batch=4, pipelines=(Pipeline(bounds=(0, 3, 5, 6), stash_limits=(4, 3, 1)),))
    assert [list(plan.first.kept_sections_of(k)) for k in range(3)] == [[], [], []]
    plan = plan.with_each_pipeline(kept=(1, 2, 0))
    assert [list(plan.first.kept_sections_of(k)) for k in range(3)] == [[2], [3, 4], []]
    assert [plan.first.keeps_all(k) for k in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("kept", "complaint"),
    [((1,), "kept \\(1,\\) must give a value for each of 2"), ((0, 3), "stage 1 has 2 sections and cannot keep 3")],
)
def test_a_plan_cannot_keep_sections_that_it_does_not_have(kept: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        Plan(micro_batch=1, global_batch=4, pipelines=(Pipeline(bounds=(0, 1, 3), stash_limits=(2, 1), kept=kept),))


def test_a_vote_reads_back_what_each_writer_wrote() -> None:
    layout = VoteLayout(sections=2, micro_batches=2, metrics=("hits",))
    vector = [0.0] * layout.size
    vector[layout.squared_norm(0)], vector[layout.squared_norm(1)] = 9.0, 16.0
    vector[layout.micro_batch(0) : layout.micro_batch(0) + 3] = [6.0, 2.0, 1.0]
    vector[layout.micro_batch(1) : layout.micro_batch(1) + 3] = [2.0, 2.0, 3.0]
    vector[layout.flag("stop")], vector[layout.flag("lr")] = 1.0, 0.5
    totals = layout.read(vector)
    assert (totals.loss, totals.weight, totals.grad_norm) == (2.0, 4.0, 5.0 / 4.0)
    assert totals.metrics == {"hits": 4.0}
    assert (totals.stop, totals.regroup, totals.checkpoint, totals.lr) == (True, False, False, 0.5)


def test_a_vote_without_targets_or_with_nan_is_told_apart() -> None:
    layout = VoteLayout(sections=1, micro_batches=1)
    assert layout.read([0.0] * layout.size).loss == 0.0
    broken = [0.0] * layout.size
    broken[layout.micro_batch(0)], broken[layout.micro_batch(0) + 1] = math.nan, 1.0
    assert math.isnan(layout.read(broken).loss)
    with pytest.raises(ValueError, match="expected a vote of"):
        layout.read([0.0])


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1.5GiB", 3 * 2**29), ("300 MB", 300_000_000), ("4096", 4096), ("2k", 2000)]
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["lots", "", "-1GB", "0", "1.5 parsecs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"1\.5GiB"):
        parse_bytes(text)


def test_sizes_and_durations_are_printed_short() -> None:
    assert [format_bytes(size) for size in (12, 1536, 3 * 2**29)] == ["12 B", "1.5 KiB", "1.5 GiB"]
    assert [format_duration(s) for s in (0.25, 3.0, 100.0, 3720.0)] == ["250 ms", "3.0 s", "1m 40s", "1h 02m"]


def test_steps_count_from_0_and_a_run_without_end_tells_no_total() -> None:
    assert [step_number(11, 48), step_number(11, 10**9), step_number(11, None)] == ["12/48", "12", "12"]
