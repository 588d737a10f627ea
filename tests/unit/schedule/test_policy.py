import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.core.errors import UsageError
from varuna.schedule.actions import Action, Kind
from varuna.schedule.policy import POLICIES, Policy, make_policy, stash_limit
from varuna.schedule.validate import validate


def policies(name: str, stages: int, micro_batches: int, limits: list[int]) -> list[Policy]:
    return [
        make_policy(name, stage=k, stages=stages, micro_batches=micro_batches, stash_limit=limit)
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
        if move.kind is Kind.BACKWARD and k:
            sent[move.kind][k - 1] += 1


@given(data=st.data(), stages=st.integers(1, 6), micro_batches=st.integers(1, 12), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_varuna_finishes_validly_under_any_limits_and_arrivals(
    data: st.DataObject, stages: int, micro_batches: int, seed: int
) -> None:
    limits = data.draw(st.lists(st.integers(1, micro_batches), min_size=stages, max_size=stages))
    pipeline = policies("varuna", stages, micro_batches, limits)
    rows, _ = run_with_random_arrivals(pipeline, micro_batches, seed)
    assert all(policy.finished for policy in pipeline)
    validate(rows, micro_batches=micro_batches, stash_limits=limits)
    assert {policy.backward_order for policy in pipeline} == {tuple(range(micro_batches))}


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "varuna"])
@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_lists_finish_validly_whatever_arrives_when(name: str, stages: int, micro_batches: int, seed: int) -> None:
    limits = [stash_limit(stages, k, micro_batches, name) for k in range(stages)]
    pipeline = policies(name, stages, micro_batches, limits)
    rows, _ = run_with_random_arrivals(pipeline, micro_batches, seed)
    assert all(policy.finished for policy in pipeline)
    validate(rows, micro_batches=micro_batches, backward_order=pipeline[0].backward_order, stash_limits=limits)


@given(name=st.sampled_from(POLICIES), micro_batches=st.integers(1, 8), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_keeps_says_is_what_happens(name: str, micro_batches: int, seed: int) -> None:
    stages = 3
    limits = [stash_limit(stages, k, micro_batches, name) for k in range(stages)]
    pipeline = policies(name, stages, micro_batches, limits)
    rows, kept = run_with_random_arrivals(pipeline, micro_batches, seed)
    recomputed = {action for row in rows for action in row if action.kind is Kind.RECOMPUTE}
    everything = {Action(k, Kind.RECOMPUTE, i) for k in range(stages) for i in range(micro_batches)}
    assert recomputed == everything - {action._replace(kind=Kind.RECOMPUTE) for action in kept}


def first_stage(micro_batches: int = 4, limit: int = 4) -> Policy:
    return make_policy("varuna", stage=0, stages=2, micro_batches=micro_batches, stash_limit=limit)


def follow(policy: Policy, activations_in: int, gradients_in: int, steps: int) -> str:
    row = []
    for _ in range(steps):
        action = policy.next(activations_in, gradients_in)
        if action is None:
            break
        policy.done(action)
        row.append(str(action))
    return " ".join(row)


def test_a_late_gradient_lets_a_ready_forward_run_instead_of_the_listed_recompute() -> None:
    assert follow(first_stage(), 4, 0, 4) == "0F0 0F1 0F2 0F3"


def test_a_listed_recompute_runs_before_its_gradient_when_no_forward_is_left_and_then_waits_for_it() -> None:
    policy = first_stage()
    assert follow(policy, 4, 0, 9) == "0F0 0F1 0F2 0F3 0R0"
    assert policy.awaited() == Action(0, Kind.BACKWARD, 0)
    assert follow(policy, 4, 1, 1) == "0B0"


def test_a_full_stash_lets_the_recompute_run_early() -> None:
    assert follow(first_stage(limit=2), 4, 0, 9) == "0F0 0F1 0R0"


def test_a_backward_is_preferred_to_a_forward_once_its_turn_has_come() -> None:
    assert follow(first_stage(), 4, 4, 5) == "0F0 0F1 0F2 0R0 0B0"


def test_a_lone_micro_batch_in_flight_keeps_its_activations() -> None:
    assert follow(first_stage(limit=1), 4, 4, 4) == "0F0 0B0 0F1 0B1"


def test_a_missing_input_is_what_a_stage_with_room_waits_for() -> None:
    policy = make_policy("varuna", stage=1, stages=3, micro_batches=4, stash_limit=4)
    assert policy.next(0, 0) is None
    assert policy.awaited() == Action(1, Kind.FORWARD, 0)


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no schedule policy 'zb'\. Choose one of gpipe, 1f1b, varuna, varuna-strict"):
        make_policy("zb", stage=0, stages=1, micro_batches=1, stash_limit=1)


def test_a_list_refuses_a_limit_that_it_cannot_keep() -> None:
    with pytest.raises(UsageError, match="policy 'gpipe' keeps 8 micro-batches in flight on stage 0 of 2"):
        make_policy("gpipe", stage=0, stages=2, micro_batches=8, stash_limit=7)


def test_no_policy_takes_a_limit_of_zero() -> None:
    with pytest.raises(UsageError, match="stash limit of 0"):
        make_policy("varuna", stage=0, stages=2, micro_batches=8, stash_limit=0)


def test_default_limits_grow_towards_the_first_stage() -> None:
    assert [stash_limit(4, k, 100) for k in range(4)] == [14, 11, 8, 5]
    assert [stash_limit(4, k, 100, "1f1b") for k in range(4)] == [4, 3, 2, 1]
    assert [stash_limit(4, k, 6, "gpipe") for k in range(4)] == [6, 6, 6, 6]
