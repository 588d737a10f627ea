"""Optimizer state shared out among replicas changes no bit, wherever the run has been and wherever it goes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import varuna
from tests.depth import by_depth, nightly
from tests.unit.engine.models import tiny_gpt2
from tests.unit.engine.optimizers import grouped, warm
from tests.unit.engine.plain import same, worst
from tests.unit.engine.ranks import STEPS, Setup
from tests.unit.engine.stage.test_offload import halved
from tests.unit.testing.test_resuming import train
from varuna.core.errors import UsageError
from varuna.core.messages import StopReport
from varuna.core.precision import Precision
from varuna.engine.base.transport import local_store
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.stage.optimizer import NamedParameters
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.worker_state import WorkerState
from varuna.membership.static import StaticMembership, World


class Listening(StaticMembership):
    """Hears what a worker says that it holds."""

    def __init__(self) -> None:
        super().__init__(World(0, 1, local_store(), "127.0.0.1", 0), lambda job, workers, micro_batch: None)  # type: ignore[arg-type,return-value]
        self.heard: list[StopReport] = []

    def held(self, held: StopReport) -> None:
        self.heard.append(held)


def stages_of(setup: Setup) -> list[Stage]:
    """Of the last run, by rank."""
    generations = [session.current for session in setup.finished]
    return [generation.stage for generation in generations if generation is not None]


def test_what_others_update_is_in_the_compute_dtype() -> None:
    sharing = Setup(precision="bf16", share=True)
    sharing.losses(1, 4, steps=1)
    for stage in stages_of(sharing):
        names = [name for section in stage.sharding.lent for name in stage.job.model.sections[section].parameters]
        assert stage.job.dtype in {stage.parameters[name].dtype for name in names}


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


def test_before_step_sees_the_whole_stage_and_may_talk_to_others() -> None:
    given: dict[str, Any] = {"before_step": halved}
    assert Setup(**given, share=True).losses(2, 3) == Setup(**given).losses(2, 3)


@pytest.mark.parametrize(("option", "given"), [("shard", {"share": True}), ("offload", {"offload": True})])
def test_an_optimizer_that_talks_to_other_stages_is_refused(option: str, given: dict[str, Any]) -> None:
    class Talking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            varuna.all_reduce_shared(torch.ones(()))
            super().step()

    def talking(named: NamedParameters) -> torch.optim.Optimizer:
        return Talking([p for _, p in named], lr=0.1)

    with pytest.raises(UsageError, match=f"cannot run with {option}_optimizer=True"):
        Setup(optimizer=talking, **given).losses(1, 1, steps=1)


@pytest.mark.nightly
@pytest.mark.parametrize("saved_shared", [True, *nightly(False)])
@pytest.mark.parametrize("precision", ["bf16", *nightly("fp32")])
def test_a_checkpoint_is_resumed_with_and_without(saved_shared: bool, precision: Precision, tmp_path: Path) -> None:
    given: dict[str, Any] = {"scheduler": warm, "optimizer": grouped, "precision": precision}
    undisturbed = Setup(**given).losses(1, by_depth(3, 4))

    def setup(share: bool) -> Setup:
        return Setup(**given, directory=str(tmp_path), share=share)

    first = train(setup(saved_shared), 1, by_depth(3, 4), STEPS // 2, str(tmp_path))
    second = train(setup(not saved_shared), 1, by_depth(3, 4), STEPS, str(tmp_path))
    assert first + second == undisturbed


@pytest.mark.nightly
def test_a_shared_checkpoint_is_resumed_in_another_plan(tmp_path: Path) -> None:
    undisturbed = Setup().losses(1, 1)
    first = train(Setup(directory=str(tmp_path), share=True), 1, 3, STEPS // 2, str(tmp_path))
    second = train(Setup(directory=str(tmp_path), share=True), 2, by_depth(3, 4), STEPS, str(tmp_path))
    assert worst(first + second, undisturbed) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_sections_share_out_without_a_change_of_bits_through_a_change_of_plan(
    precision: Precision, tmp_path: Path
) -> None:
    compiler = Compiler("aot_eager")  # one process keeps it over a morph, and from one run to the next

    def run(name: str, *, share: bool) -> tuple[list[Any], dict[str, Tensor]]:
        given: dict[str, Any] = {"precision": precision, "directory": str(tmp_path / name), "share": share}
        begun = train(Setup(**given, compiler=compiler), 1, 3, 2, given["directory"])
        ended = Setup(**given, compiler=compiler)
        return [*begun, *train(ended, 2, 4, 4, given["directory"])], ended.states()

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
    standing.hold_stage(stage)
    assert standing.states().keys() == {*stage.sharding.held, *stage.sharding.lent}
    stage.apply(1, 0.0)  # as a laggard does, whose peers are gone
    assert not stage.sharding.complete
    assert standing.states().keys() == set(stage.sharding.held)
    standing.give_up(3)
    [held] = membership.heard
    assert (held.next_step, held.sections, held.lent) == (2, stage.sharding.held, ())
