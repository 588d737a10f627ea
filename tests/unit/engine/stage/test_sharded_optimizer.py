"""Optimizer state shared out among replicas changes no bit, wherever the run has been and wherever it goes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import varuna
from tests.unit.engine.ranks import Setup, SmallLanguage, Tokens, adamw, single_threaded, tiny_gpt2, worst
from tests.unit.engine.stage.test_offload import Build, grouped, halved, momentum, same, warm
from tests.unit.engine.worker.test_resuming import train
from varuna.checkpoint.io.section_state import from_bytes, to_bytes
from varuna.core.errors import UsageError
from varuna.core.messages import Held
from varuna.core.precision import Precision
from varuna.engine.base.transport import local_store
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.stage.optimizer import NamedParameters
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.worker_state import WorkerState
from varuna.membership.static import StaticMembership, World

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


class Listening(StaticMembership):
    """Hears what a worker says that it holds."""

    def __init__(self) -> None:
        super().__init__(World(0, 1, local_store(), "127.0.0.1", 0), lambda job, workers, micro_batch: None)  # type: ignore[arg-type,return-value]
        self.heard: list[Held] = []

    def held(self, held: Held) -> None:
        self.heard.append(held)


def stages_of(setup: Setup) -> list[Stage]:
    """Of the last run, by rank."""
    generations = [session.current for session in setup.finished]
    return [generation.stage for generation in generations if generation is not None]


def all_states(setup: Setup) -> dict[str, Tensor]:
    """Every tensor of every section that some rank holds, checked to be the same wherever it is held."""
    found: dict[str, Tensor] = {}
    for stage in stages_of(setup):
        for section in stage.sharding.held:
            state = from_bytes(to_bytes(stage.state_of(section)))
            for name, value in state.tensors.items():
                assert torch.equal(found.setdefault(f"{section}/{name}", value), value), name
    return found


@pytest.mark.parametrize(
    ("optimizer", "grid"),
    [(adamw, (1, 3)), (momentum, (2, 4)), (grouped, (2, 3)), (adamw, (1, 4)), (adamw, (2, 2)), (adamw, (2, 1))],
)
def test_losses_norms_parameters_and_state_are_those_of_a_run_without(optimizer: Build, grid: tuple[int, int]) -> None:
    given: dict[str, Any] = {"optimizer": optimizer, "scheduler": warm, "clip": 0.5, "dataset": Tokens(padded=True)}
    plain, sharing = Setup(**given), Setup(**given, share=True)  # tied embeddings, clipped
    assert sharing.losses(*grid) == plain.losses(*grid)
    assert same(all_states(sharing), all_states(plain))
    for one, other in zip(stages_of(sharing), stages_of(plain), strict=True):
        assert one.sharding.complete
        assert same(dict(one.parameters), dict(other.parameters))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("offload", [False, True])
def test_half_precision_shares_fp32_parameters_too(precision: Precision, offload: bool) -> None:
    given: dict[str, Any] = {"precision": precision, "unit": 1.0, "offload": offload}  # the first fp16 steps overflow
    plain, sharing = Setup(**given), Setup(**given, share=True)
    assert repr(sharing.losses(1, 4, steps=6)) == repr(plain.losses(1, 4, steps=6))  # as text: NaN differs from NaN
    assert same(all_states(sharing), all_states(plain))
    for one, other in zip(stages_of(sharing), stages_of(plain), strict=True):
        assert all(torch.equal(one._compute[name], other._compute[name]) for name in other.parameters)
        dtypes = {
            one.parameters[name].dtype for s in one.sharding.lent for name in one.job.model.sections[s].parameters
        }
        assert one.job.dtype in dtypes


def test_state_is_held_twice_and_not_by_everybody() -> None:
    setup = Setup(build=tiny_gpt2, share=True)  # sections of like sizes
    setup.losses(1, 4, steps=1)
    stages = stages_of(setup)
    sections = range(stages[0].plan.sections)
    assert [sum(section in stage.sharding.held for stage in stages) for section in sections] == [2] * len(sections)
    whole = sum(facts.optimizer_bytes for facts in setup.model.facts.sections)
    for stage in stages:
        own = {name: stage.optimizer.state_of(name)[0] for name in stage.parameters}
        assert {name for name, state in own.items() if state} == stage.sharding.updated
        state_bytes = sum(value.nbytes for state in own.values() for key, value in state.items() if key != "step")
        assert state_bytes < 0.7 * whole


def test_offloaded_state_is_shared_out_too() -> None:
    given: dict[str, Any] = {"optimizer": grouped, "scheduler": warm}
    plain, both = Setup(**given), Setup(**given, share=True, offload=True)
    assert both.losses(2, 3) == plain.losses(2, 3)
    assert same(all_states(both), all_states(plain))


def test_sums_that_cross_as_bf16_are_shared_out_too() -> None:
    given: dict[str, Any] = {"clip": 0.5, "rounds": True}
    plain, both = Setup(**given), Setup(**given, share=True)
    assert both.losses(2, 3) == plain.losses(2, 3)
    assert same(all_states(both), all_states(plain))


def test_before_step_sees_the_whole_stage_and_may_talk_to_others() -> None:
    given: dict[str, Any] = {"before_step": halved}
    assert Setup(**given, share=True).losses(2, 3) == Setup(**given).losses(2, 3)


def test_an_optimizer_that_talks_to_other_stages_is_refused() -> None:
    class Talking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            varuna.all_reduce_shared(torch.ones(()))
            super().step()

    def talking(named: NamedParameters) -> torch.optim.Optimizer:
        return Talking([p for _, p in named], lr=0.1)

    with pytest.raises(UsageError, match="cannot run with shard_optimizer=True"):
        Setup(build=SmallLanguage, optimizer=talking, share=True).losses(1, 1, steps=1)


@pytest.mark.parametrize("saved_shared", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_resumed_with_and_without(saved_shared: bool, precision: Precision, tmp_path: Path) -> None:
    given: dict[str, Any] = {"scheduler": warm, "optimizer": grouped, "precision": precision}
    undisturbed = Setup(**given).losses(1, 4, steps=4)

    def setup(share: bool) -> Setup:
        return Setup(**given, directory=str(tmp_path), share=share)

    first = train(setup(saved_shared), 1, 4, 2, str(tmp_path))
    second = train(setup(not saved_shared), 1, 4, 4, str(tmp_path))
    assert first + second == undisturbed


def test_a_shared_checkpoint_is_resumed_in_another_plan(tmp_path: Path) -> None:
    undisturbed = Setup().losses(1, 1, steps=4)
    first = train(Setup(directory=str(tmp_path), share=True), 1, 3, 2, str(tmp_path))
    second = train(Setup(directory=str(tmp_path), share=True), 2, 4, 4, str(tmp_path))
    assert worst(first + second, undisturbed) < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_sections_share_out_without_a_change_of_bits_through_a_change_of_plan(
    precision: Precision, tmp_path: Path
) -> None:
    compiler = Compiler("aot_eager")  # one process keeps it over a morph, and from one run to the next

    def run(name: str, *, share: bool) -> tuple[list[Any], dict[str, Tensor]]:
        given: dict[str, Any] = {"precision": precision, "directory": str(tmp_path / name), "share": share}
        begun = train(Setup(**given, compiler=compiler), 1, 3, 2, given["directory"])
        ended = Setup(**given, compiler=compiler)
        return [*begun, *train(ended, 2, 4, 4, given["directory"])], all_states(ended)

    shared, alone = run("shared", share=True), run("alone", share=False)
    assert len(alone[0]) == 4
    assert shared[0] == alone[0]
    assert same(shared[1], alone[1])


def test_before_a_step_has_come_round_only_what_is_held_is_offered() -> None:
    setup = Setup(share=True)
    setup.losses(1, 3, steps=1)
    stage = stages_of(setup)[0]
    membership = Listening()
    standing = WorkerState(membership)
    standing.take(stage)
    assert standing.states().keys() == {*stage.sharding.held, *stage.sharding.lent}
    stage.apply(1, 0.0)  # as a laggard does, whose peers are gone
    assert not stage.sharding.complete
    assert standing.states().keys() == set(stage.sharding.held)
    standing.give_up(3)
    [held] = membership.heard
    assert (held.next_step, held.sections, held.lent) == (2, stage.sharding.held, ())
