import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from tests.unit.schedule.validator import validate
from varuna.core.errors import UsageError
from varuna.schedule.actions import Action, Kind
from varuna.schedule.policy import POLICIES, Policy, make_policy, split_last, stash_limit
from varuna.simulator.costs import uniform
from varuna.simulator.step import simulate

BENDING = ("varuna", "adaptive")
"""Policies that keep any stash limit."""


def policies(
    name: str,
    stages: int,
    micro_batches: int,
    limits: list[int],
    *,
    split_last: int = 0,
    empties: bool = False,
    keeping: frozenset[int] = frozenset(),
) -> list[Policy]:
    return [
        make_policy(
            name,
            stage=k,
            stages=stages,
            micro_batches=micro_batches,
            stash_limit=limit,
            split_last=split_last,
            empties=empties,
            keeps_all=k in keeping,
        )
        for k, limit in enumerate(limits)
    ]


def run_with_random_arrivals(
    pipeline: list[Policy], micro_batches: int, seed: int
) -> tuple[list[list[Action]], set[Action]]:
    """Let stages act and messages arrive in any order until nothing can happen; returns rows and kept forwards."""
    chance = random.Random(seed)
    last = len(pipeline) - 1
    rows: list[list[Action]] = [[] for _ in pipeline]
    kept: set[Action] = set()
    sent = {kind: [0] * len(pipeline) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    here = {kind: [0] * len(pipeline) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    sent[Kind.FORWARD][0] = here[Kind.FORWARD][0] = micro_batches
    sent[Kind.BACKWARD][last] = here[Kind.BACKWARD][last] = micro_batches
    while True:
        moves: list[tuple[int, Action | Kind]] = []
        for k, policy in enumerate(pipeline):
            action = policy.next(here[Kind.FORWARD][k], here[Kind.BACKWARD][k])
            moves += [(k, action)] if action is not None else []
            moves += [(k, kind) for kind in sent if here[kind][k] < sent[kind][k]]
        if not moves:
            return rows, kept
        k, move = chance.choice(moves)
        if isinstance(move, Kind):
            here[move][k] += 1
            continue
        if move.kind is Kind.FORWARD and pipeline[k].keeps(move.micro_batch):
            kept.add(move)
        pipeline[k].done(move)
        rows[k].append(move)
        if move.kind is Kind.FORWARD and k < last:
            sent[move.kind][k + 1] += 1
        if move.kind in (Kind.BACKWARD, Kind.INPUT) and k:
            sent[Kind.BACKWARD][k - 1] += 1


@given(data=st.data(), stages=st.integers(1, 6), micro_batches=st.integers(1, 12), seed=st.integers(0, 2**32))
@settings(max_examples=by_depth(25, 150), deadline=None)
def test_varuna_finishes_validly_under_any_limits_and_arrivals(
    data: st.DataObject, stages: int, micro_batches: int, seed: int
) -> None:
    limits = data.draw(st.lists(st.integers(1, micro_batches), min_size=stages, max_size=stages))
    pipeline = policies("varuna", stages, micro_batches, limits)
    rows, _ = run_with_random_arrivals(pipeline, micro_batches, seed)
    assert all(policy.finished for policy in pipeline)
    validate(rows, micro_batches=micro_batches, stash_limits=limits)
    assert {policy.backward_order for policy in pipeline} == {tuple(range(micro_batches))}


@given(data=st.data(), stages=st.integers(1, 6), micro_batches=st.integers(1, 12), seed=st.integers(0, 2**32))
@settings(max_examples=by_depth(25, 200), deadline=None)
def test_adaptive_finishes_validly_however_it_splits_keeps_and_is_limited(
    data: st.DataObject, stages: int, micro_batches: int, seed: int
) -> None:
    limits = data.draw(st.lists(st.integers(1, micro_batches), min_size=stages, max_size=stages))
    split_last = data.draw(st.integers(0, micro_batches + 1))
    keeping, empties = data.draw(st.frozensets(st.integers(0, stages - 1))), data.draw(st.booleans())
    pipeline = policies(
        "adaptive", stages, micro_batches, limits, split_last=split_last, empties=empties, keeping=keeping
    )
    rows, kept = run_with_random_arrivals(pipeline, micro_batches, seed)
    assert all(policy.finished for policy in pipeline)
    live_limits = [limit if k in keeping else 1 for k, limit in enumerate(limits)]
    validate(rows, micro_batches=micro_batches, stash_limits=limits, live_limits=live_limits)
    for k, row in enumerate(rows):
        halves = [action.micro_batch for action in row if action.kind is Kind.INPUT]
        assert halves == (list(range(micro_batches))[max(0, micro_batches - split_last) :] if k else [])
        recomputed = {action.micro_batch for action in row if action.kind is Kind.RECOMPUTE}
        assert {action.micro_batch for action in kept if action.stage == k} == set(range(micro_batches)) - recomputed


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in BENDING])
@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), seed=st.integers(0, 2**32))
@settings(max_examples=by_depth(6, 25), deadline=None)
def test_lists_finish_validly_whatever_arrives_when(name: str, stages: int, micro_batches: int, seed: int) -> None:
    limits = [stash_limit(stages, k, micro_batches, name) for k in range(stages)]
    pipeline = policies(name, stages, micro_batches, limits)
    rows, _ = run_with_random_arrivals(pipeline, micro_batches, seed)
    assert all(policy.finished for policy in pipeline)
    validate(rows, micro_batches=micro_batches, backward_order=pipeline[0].backward_order, stash_limits=limits)


@given(name=st.sampled_from(POLICIES), micro_batches=st.integers(1, 8), seed=st.integers(0, 2**32))
@settings(max_examples=by_depth(10, 60), deadline=None)
def test_what_keeps_says_is_what_happens(name: str, micro_batches: int, seed: int) -> None:
    stages = 3
    limits = [stash_limit(stages, k, micro_batches, name) for k in range(stages)]
    pipeline = policies(name, stages, micro_batches, limits)
    rows, kept = run_with_random_arrivals(pipeline, micro_batches, seed)
    recomputed = {action for row in rows for action in row if action.kind is Kind.RECOMPUTE}
    everything = {Action(k, Kind.RECOMPUTE, i) for k in range(stages) for i in range(micro_batches)}
    assert recomputed == everything - {action._replace(kind=Kind.RECOMPUTE) for action in kept}


def first_stage(name: str = "varuna", micro_batches: int = 4, limit: int = 4) -> Policy:
    return make_policy(name, stage=0, stages=2, micro_batches=micro_batches, stash_limit=limit)


def follow(policy: Policy, activations_in: int, gradients_in: int, steps: int) -> str:
    row = []
    for _ in range(steps):
        action = policy.next(activations_in, gradients_in)
        if action is None:
            break
        policy.done(action)
        row.append(str(action))
    return " ".join(row)


def test_a_listed_recompute_runs_before_its_gradient_and_then_waits_for_it() -> None:
    policy = first_stage()
    assert follow(policy, 4, 0, 9) == "0F0 0F1 0F2 0R0"
    assert policy.awaited() == Action(0, Kind.BACKWARD, 0)
    assert follow(policy, 4, 1, 1) == "0B0"


def test_after_a_late_gradient_ready_forwards_run_instead_of_listed_recomputes() -> None:
    policy = first_stage(micro_batches=6, limit=6)
    assert follow(policy, 6, 0, 9) == "0F0 0F1 0F2 0R0"  # a forward could run now
    assert follow(policy, 6, 1, 9) == "0B0 0F3 0F4 0F5 0R1"
    in_time = first_stage(micro_batches=6, limit=6)
    assert follow(in_time, 6, 1, 9) == "0F0 0F1 0F2 0R0 0B0 0R1"


@pytest.mark.parametrize(("stages", "micro_batches", "units"), [(4, 5, 27), (18, 50, 249), (36, 113, 555)])
def test_on_a_network_without_delay_it_is_as_long_as_the_papers_tool_printed(
    stages: int, micro_batches: int, units: int
) -> None:
    assert simulate(uniform(stages), micro_batches=micro_batches, policy="varuna").step_s == units


def test_a_full_stash_lets_the_recompute_run_early() -> None:
    assert follow(first_stage(limit=2), 4, 0, 9) == "0F0 0F1 0R0"


def test_a_backward_is_preferred_to_a_forward_once_its_turn_has_come() -> None:
    assert follow(first_stage(), 4, 4, 5) == "0F0 0F1 0F2 0R0 0B0"


def test_a_lone_micro_batch_in_flight_keeps_its_activations() -> None:
    assert follow(first_stage(limit=1), 4, 4, 4) == "0F0 0B0 0F1 0B1"


def test_adaptive_keeps_what_is_next_and_runs_forwards_beside_it() -> None:
    policy = first_stage("adaptive")
    assert policy.keeps(0)
    assert follow(policy, 4, 0, 9) == "0F0 0F1 0F2 0F3"
    assert follow(policy, 4, 4, 9) == "0B0 0R1 0B1 0R2 0B2 0R3 0B3"


def test_adaptive_prefers_the_gradient_that_is_here_to_a_forward() -> None:
    assert follow(first_stage("adaptive"), 4, 1, 4) == "0F0 0B0 0F1 0F2"


def test_adaptive_recomputes_ahead_of_the_gradient_only_when_idle() -> None:
    policy = first_stage("adaptive", limit=2)
    assert follow(policy, 4, 1, 9) == "0F0 0B0 0F1 0F2"
    late = make_policy("adaptive", stage=0, stages=2, micro_batches=4, stash_limit=3)
    assert follow(late, 2, 0, 9) == "0F0 0F1"
    assert follow(late, 3, 1, 9) == "0B0 0F2 0R1"


def test_adaptive_feeds_the_stages_behind_before_it_recomputes() -> None:
    policy = make_policy("adaptive", stage=0, stages=4, micro_batches=20, stash_limit=14)
    assert follow(policy, 20, 20, 12) == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0F4 0B4 0F5 0B5"
    late = make_policy("adaptive", stage=0, stages=4, micro_batches=20, stash_limit=14)
    assert follow(late, 2, 0, 9) == "0F0 0F1"
    assert follow(late, 20, 20, 9) == "0B0 0F2 0F3 0F4 0F5 0F6 0F7 0R1 0B1"


def test_adaptive_feeds_the_stages_behind_up_to_its_limit() -> None:
    policy = make_policy("adaptive", stage=0, stages=4, micro_batches=20, stash_limit=6)
    assert follow(policy, 2, 0, 9) == "0F0 0F1"
    assert follow(policy, 20, 20, 9) == "0B0 0F2 0F3 0F4 0F5 0F6 0R1 0B1 0F7"
    whole = make_policy("adaptive", stage=0, stages=4, micro_batches=20, stash_limit=4, keeps_all=True)
    assert follow(whole, 20, 20, 7) == "0F0 0F1 0F2 0F3 0B0 0F4 0B1"


def test_the_stage_before_the_last_runs_empty_where_that_is_asked_for_and_needs_fewer_recomputes() -> None:
    policy = make_policy("adaptive", stage=1, stages=3, micro_batches=20, stash_limit=20, empties=True)
    assert follow(policy, 3, 0, 3) == "1F0 1F1 1F2"
    assert follow(policy, 20, 20, 8) == "1B0 1R1 1B1 1R2 1B2 1F3 1B3 1F4"
    before = make_policy("adaptive", stage=0, stages=3, micro_batches=20, stash_limit=20, empties=True)
    assert follow(before, 20, 20, 4) == "0F0 0B0 0F1 0B1"
    assert follow(before, 20, 2, 6) == "0F2 0F3 0F4 0F5 0F6 0F7"
    assert follow(before, 20, 3, 3) == "0B2 0F8 0F9", "it feeds the stages behind"


def half_stage(*, keeps_all: bool) -> Policy:
    return make_policy("adaptive", stage=1, stages=3, micro_batches=4, stash_limit=4, split_last=3, keeps_all=keeps_all)


def test_adaptive_sends_the_input_gradient_first_and_frees_the_activations_next() -> None:
    assert follow(half_stage(keeps_all=False), 4, 4, 20) == "1F0 1B0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3"


def test_a_stage_that_keeps_everything_puts_weight_gradients_off_to_idle_time() -> None:
    assert follow(half_stage(keeps_all=True), 4, 4, 20) == "1F0 1F1 1F2 1B0 1F3 1I1 1I2 1I3 1W1 1W2 1W3"


def test_a_stage_that_keeps_everything_feeds_the_stages_behind_first() -> None:
    policy = make_policy("adaptive", stage=0, stages=3, micro_batches=20, stash_limit=20, keeps_all=True)
    assert follow(policy, 20, 20, 9) == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2"
    last = make_policy("adaptive", stage=2, stages=3, micro_batches=20, stash_limit=20, keeps_all=True)
    assert follow(last, 20, 20, 4) == "2F0 2B0 2F1 2B1"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_lists_run_without_recompute_where_all_is_kept(name: str) -> None:
    pipeline = policies(name, 3, 6, [6, 6, 6], keeping=frozenset({0, 1, 2}))
    rows, _ = run_with_random_arrivals(pipeline, 6, seed=1)
    assert not [action for row in rows for action in row if action.kind is Kind.RECOMPUTE]
    order = pipeline[0].backward_order
    validate(rows, micro_batches=6, backward_order=order, live_limits=[6, 6, 6])


def test_what_a_policy_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'varuna' never splits a backward\. Use the policy 'adaptive'"):
        make_policy("varuna", stage=0, stages=2, micro_batches=8, stash_limit=8, split_last=1)
    with pytest.raises(UsageError, match=r"'varuna' lets no stage run empty\. Use the policy 'adaptive'"):
        make_policy("varuna", stage=0, stages=2, micro_batches=8, stash_limit=8, empties=True)
    with pytest.raises(UsageError, match="'varuna' is the paper's, which recomputes"):
        make_policy("varuna", stage=0, stages=2, micro_batches=8, stash_limit=8, keeps_all=True)


def test_a_missing_input_is_what_a_stage_with_room_waits_for() -> None:
    policy = make_policy("varuna", stage=1, stages=3, micro_batches=4, stash_limit=4)
    assert policy.next(0, 0) is None
    assert policy.awaited() == Action(1, Kind.FORWARD, 0)


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"no schedule policy 'zb'\. Choose one of gpipe, 1f1b, varuna, varuna-strict, adapt"
    ):
        make_policy("zb", stage=0, stages=1, micro_batches=1, stash_limit=1)


def test_a_list_refuses_a_limit_that_it_cannot_keep() -> None:
    with pytest.raises(UsageError, match="policy 'gpipe' keeps 8 micro-batches in flight on stage 0 of 2"):
        make_policy("gpipe", stage=0, stages=2, micro_batches=8, stash_limit=7)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_takes_a_limit_of_zero(name: str) -> None:
    with pytest.raises(UsageError, match="stash limit of 0"):
        make_policy(name, stage=0, stages=2, micro_batches=8, stash_limit=0)


def test_default_limits_grow_towards_the_first_stage() -> None:
    assert [stash_limit(4, k, 100) for k in range(4)] == [14, 11, 8, 5]
    assert [stash_limit(4, k, 100, "1f1b") for k in range(4)] == [4, 3, 2, 1]
    assert [stash_limit(4, k, 6, "gpipe") for k in range(4)] == [6, 6, 6, 6]


def test_by_default_only_adaptive_splits_as_many_backwards_as_there_are_stages() -> None:
    assert [split_last(4, 10, name) for name in POLICIES] == [0, 0, 0, 0, 4]
    assert split_last(4, 3, "adaptive") == 3
