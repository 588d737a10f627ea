"""Values over several stages: the run equals one process, and a failure in the middle leaves no trace."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varuna
from tests.depth import by_depth
from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.plain import worst
from tests.unit.engine.ranks import Setup
from tests.unit.partition.hidden import Lamb, SharedLamb, over
from varuna.core.devices import WorkerGroups
from varuna.core.errors import LinkError, UsageError
from varuna.core.messages import Apply, Vote
from varuna.core.plan import Plan
from varuna.engine.base.inbox import GenerationEnded
from varuna.engine.base.transport import local_store
from varuna.engine.stage.cross_stage import StageExchange, installed
from varuna.engine.stage.optimizer import StageOptimizer
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.planner.choose import plan_run
from varuna.testing.threads import run_all


def test_outside_a_run_nothing_changes() -> None:
    value = torch.tensor([1.0, 2.0])
    assert varuna.all_reduce_shared(value) is value
    assert varuna.owned(nn.Parameter(value))
    with pytest.raises(UsageError, match="mean"):
        varuna.all_reduce_shared(value, op="mean")


@pytest.mark.nightly
def test_a_lamb_that_does_not_share_trains_another_model() -> None:
    setup = Setup(optimizer=over(Lamb), clip=None)
    assert worst(setup.losses(3, 1, steps=by_depth(3, 6)), setup.losses(1, 1, steps=by_depth(3, 6))) > 1e-5


def test_before_step_shares_what_one_process_sees() -> None:
    seen: list[tuple[float, float]] = []

    def look(named: Any) -> None:
        gradients = [p.grad for _, p in named if varuna.owned(p)]
        squares = torch.stack([g.double().pow(2).sum() for g in gradients]).sum()
        largest = torch.stack([g.abs().max() for g in gradients]).max()
        seen.append((float(varuna.all_reduce_shared(squares)), float(varuna.all_reduce_shared(largest, op="max"))))

    setup = Setup(before_step=look)
    setup.run(1, 1, steps=1)
    one = seen.pop()
    setup.run(3, 1, steps=1)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0] == pytest.approx(one, rel=1e-6)


@pytest.mark.nightly
def test_a_stage_with_nothing_to_train_makes_nobody_wait() -> None:
    def frozen() -> nn.Module:
        model = SmallLanguage()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name)
        return model

    setup = Setup(build=frozen, optimizer=over(SharedLamb), clip=None)
    assert worst(setup.losses(3, 1), setup.losses(1, 1)) < 1e-6


@pytest.mark.nightly
def test_a_job_that_does_not_share_pays_for_one_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    original = Stage.apply_tentatively

    def counting(stage: Stage, scale: float, exchange: StageExchange) -> None:
        tried.append(stage.next_step)
        original(stage, scale, exchange)

    monkeypatch.setattr(Stage, "apply_tentatively", counting)
    Setup().run(2, 1, steps=3)
    assert tried == []  # torch's own optimizer does not share
    Setup(before_step=lambda named: None).run(2, 1, steps=3)
    assert tried == [0, 0]
    Setup(optimizer=over(SharedLamb)).run(2, 1, steps=2)
    assert sorted(tried[2:]) == [0, 0, 1, 1]


def test_a_late_first_call_is_refused() -> None:
    calls: dict[int, int] = {}

    def late(named: Any) -> None:
        calls[id(named[0][1])] = calls.get(id(named[0][1]), 0) + 1
        if calls[id(named[0][1])] == 3:
            varuna.all_reduce_shared(torch.ones(()))

    with pytest.raises((UsageError, LinkError), match=r"in every step|link|vote"):
        Setup(before_step=late).run(2, 1, steps=4)
    calls.clear()
    Setup(before_step=late).run(1, 1, steps=4)


def test_calls_that_differ_between_stages_are_refused() -> None:
    def per_parameter(named: Any) -> None:
        if "layers.0.weight" in dict(named):
            varuna.all_reduce_shared(torch.ones(2))
        else:
            varuna.all_reduce_shared(torch.ones(3))

    with pytest.raises((UsageError, LinkError), match=r"different|link|shared|vote"):
        Setup(before_step=per_parameter).run(2, 1, steps=2)


# -- failures ------------------------------------------------------------------------------------------------


def snapshot(stage: Stage) -> dict[str, Any]:
    """Parameters, optimizer state and groups, as copies."""
    assert isinstance(stage.optimizer, StageOptimizer)
    optimizer: Any = stage.optimizer._optimizer
    return {
        "next": stage.next_step,
        "parameters": {name: value.detach().clone() for name, value in stage.parameters.items()},
        "state": {
            name: copy.deepcopy(dict(optimizer.state.get(value, {}))) for name, value in stage.parameters.items()
        },
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


class Interrupted(SharedLamb):
    """Changes everything it can in its third step, then talks; ``hit`` runs before that."""

    hit: Callable[[], None] = staticmethod(lambda: None)
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        super().step()
        if self.steps == 3:
            self.param_groups[0]["lr"] = 7.0
            type(self).hit()
            varuna.all_reduce_shared(torch.ones(()))


def two_sessions(setup: Setup, steps: int) -> list[Session]:
    store = local_store()

    def plan(job: Any, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, stages=2, micro_batch=micro_batch)

    return [
        setup.session(StaticMembership(World(rank, 2, store, "127.0.0.1", 0), plan), store, steps) for rank in range(2)
    ]


def test_the_end_of_a_generation_within_the_apply_leaves_the_stage_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(optimizer=over(Interrupted), clip=None)
    sessions = two_sessions(setup, steps=5)
    before: dict[int, dict[str, Any]] = {}
    original = Stage.apply_tentatively

    def noting(stage: Stage, scale: float, exchange: StageExchange) -> None:
        if stage.next_step == 2:
            before[stage.index] = snapshot(stage)
        original(stage, scale, exchange)

    def hit() -> None:
        for session in sessions:  # as the manager's word reaches all of them
            if session.standing._inbox is not None:
                session.standing._inbox.abort(GenerationEnded(0))

    monkeypatch.setattr(Stage, "apply_tentatively", noting)
    monkeypatch.setattr(Interrupted, "hit", staticmethod(hit))
    run_all([partial(list, session.steps()) for session in sessions])
    stages = [session.standing.stage for session in sessions]
    for index, stage in enumerate(stages):
        assert stage is not None
        assert stage.next_step == 2
        assert same(snapshot(stage), before[index])


def test_a_tentative_step_is_committed_without_the_others_or_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation ends between the tentative step and the vote's result: COMMIT on one rank, RETRY on the other."""
    setup = Setup(optimizer=over(SharedLamb), clip=None)
    setup.run(2, 1, steps=3)
    expected = setup.parameters()
    sessions = two_sessions(setup, steps=3)
    lost: dict[int, tuple[float, ...]] = {}
    before: dict[str, Any] = {}

    def break_the_vote(session: Session) -> None:
        for committed in session.steps():
            generation = session.current
            assert generation is not None
            if committed.step == 1:
                rank, reducer = generation.assignment.rank, generation.reducer
                before[str(rank)] = snapshot(generation.stage)
                whole = reducer.vote

                def vote(step: int, vector: Tensor, rank: int = rank, whole: Any = whole) -> tuple[float, ...]:
                    lost[rank] = whole(step, vector)
                    raise GenerationEnded(0)

                monkeypatch.setattr(reducer, "vote", vote)

    run_all([partial(break_the_vote, session) for session in sessions])
    for session in sessions:
        assert session.standing.stage is not None
        assert session.standing.stage.next_step == 2
    sessions[0].standing.apply_verdict(Apply(generation=0, vote=Vote(generation=0, step=2, vector=lost[0])))
    done, undone = sessions[0].standing.stage, sessions[1].standing.stage
    assert done is not None
    assert undone is not None
    assert done.next_step == 3
    assert all(torch.equal(value, expected[name]) for name, value in done.parameters.items())
    assert not same(snapshot(undone), before["1"])
    undone.roll_back()
    assert same(snapshot(undone), before["1"])


def test_an_exception_that_the_users_code_swallows_still_ends_the_step() -> None:
    def rows(row: Tensor) -> Tensor:
        raise GenerationEnded(3)

    exchange = StageExchange(rows, frozenset())
    with installed(exchange), pytest.raises(GenerationEnded):
        varuna.all_reduce_shared(torch.ones(()))
    with pytest.raises(GenerationEnded):
        exchange.finish()
