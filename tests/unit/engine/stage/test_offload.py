"""Optimizer state in host memory changes no bit, wherever the run has been and wherever it goes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varuna
from tests.depth import nightly
from tests.unit.engine.models import SmallLanguage, Tokens, adamw, tiny_gpt2
from tests.unit.engine.optimizers import grouped, momentum, warm
from tests.unit.engine.ranks import STEPS, Setup
from tests.unit.testing.test_resuming import train
from varuna.checkpoint.io.section_state import from_bytes, to_bytes
from varuna.core.errors import UsageError
from varuna.core.model import JobFacts, Memory
from varuna.core.precision import Precision
from varuna.engine.device.host_copies import DONE, HostCopies, Ready
from varuna.engine.stage.cross_stage import StageExchange
from varuna.engine.stage.offload import OffloadedOptimizer
from varuna.engine.stage.optimizer import NamedParameters, StageOptimizer
from varuna.engine.stage.stage import Stage
from varuna.job.spec import JobSpec
from varuna.job.start import job_facts

Build = Callable[[NamedParameters], torch.optim.Optimizer]


def halved(named: NamedParameters) -> None:
    """A ``before_step`` that combines gradients over the stages."""
    norm = varuna.all_reduce_shared(sum((p.grad.square().sum() for _, p in named), torch.zeros(())))  # type: ignore[union-attr]
    for _, parameter in named:
        assert parameter.grad is not None
        parameter.grad /= 1 + norm


def test_before_step_sees_the_whole_stage_once() -> None:
    given: dict[str, Any] = {"before_step": halved}
    assert Setup(**given, offload=True).losses(2, 1) == Setup(**given).losses(2, 1)


@pytest.mark.parametrize("saved_offloaded", [True, *nightly(False)])
def test_a_checkpoint_is_resumed_with_and_without(saved_offloaded: bool, tmp_path: Path) -> None:
    def setup(offload: bool) -> Setup:
        return Setup(scheduler=warm, optimizer=grouped, directory=str(tmp_path), offload=offload)

    undisturbed = Setup(scheduler=warm, optimizer=grouped).losses(2, 1)
    first = train(setup(saved_offloaded), 2, 1, STEPS // 2, str(tmp_path))
    second = train(setup(not saved_offloaded), 2, 1, STEPS, str(tmp_path))
    assert first + second == undisturbed


@pytest.mark.parametrize("precision", ["bf16", *nightly("fp32")])
def test_states_go_from_stages_with_to_stages_without_and_back(precision: Precision) -> None:
    """A morph does this: a state as bytes, a stage built from it."""
    plain, offloaded = Setup(precision=precision), Setup(precision=precision, offload=True)
    expected = plain.losses(1, 1, steps=2)
    assert offloaded.losses(1, 1, steps=2) == expected
    jobs = [plain.job(), offloaded.job()]
    generation = offloaded.finished[0].current
    assert generation is not None
    stage = generation.stage
    before = {section: to_bytes(stage.state_of(section)) for section in stage.sections}
    for job in (*jobs, *jobs):
        states = {section: from_bytes(to_bytes(stage.state_of(section))) for section in stage.sections}
        stage = Stage(job, stage.plan, 0, states, 2)
        assert {section: to_bytes(stage.state_of(section)) for section in stage.sections} == before


@pytest.mark.parametrize("precision", ["bf16", *nightly("fp32")])
def test_a_tentative_step_is_undone_bit_for_bit(precision: Precision) -> None:
    setup = Setup(precision=precision, offload=True, optimizer=momentum)
    setup.losses(1, 1, steps=2)
    generation = setup.finished[0].current
    assert generation is not None
    stage = generation.stage
    before = {section: to_bytes(stage.state_of(section)) for section in stage.sections}
    stage.optimizer.prepare()
    stage.apply_tentatively(0.5, StageExchange(lambda row: row.view(1, -1), stage.owned))
    assert {section: to_bytes(stage.state_of(section)) for section in stage.sections} != before
    stage.roll_back()
    assert {section: to_bytes(stage.state_of(section)) for section in stage.sections} == before
    name = next(iter(stage.parameters))
    assert torch.equal(stage._compute[name], stage.parameters[name].to(stage.job.dtype))


# -- places ------------------------------------------------------------------------------------------------------

META = torch.device("meta")


class OneWay(HostCopies):
    """Nothing can be copied back from the meta device."""

    def __init__(self) -> None:
        self.most = self.held = 0

    def fetch(self, values: Sequence[Tensor], after: Ready = DONE) -> tuple[list[Tensor], Ready]:
        assert all(value.device.type == "cpu" for value in values)
        self.held += 1
        self.most = max(self.most, self.held)
        return [value.to(META) for value in values], DONE

    def copy_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready | None = None) -> Ready:
        assert all(source.device == META and target.device.type == "cpu" for source, target in pairs)
        self.held -= 1
        return DONE


@pytest.mark.parametrize("away", [False, True])
def test_a_step_runs_on_the_device_and_nothing_stays_there_but_two_sections(away: bool) -> None:
    place = torch.device("cpu") if away else META
    sections = [[(f"{i}.weight", nn.Parameter(torch.zeros(4, 3, device=place)))] for i in range(5)]
    gradients = {name: torch.zeros(4, 3, device=META) for part in sections for name, _ in part}
    stepped: list[str] = []

    class Watched(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            [parameter] = self.param_groups[0]["params"]
            moments = [value for key, value in self.state[parameter].items() if key != "step"]
            assert parameter.device == META
            assert parameter.shape == (4, 3)
            assert parameter.grad is not None
            assert all(value.device == META for value in moments)
            stepped.append(str(len(moments)))
            super().step()

    def build(named: NamedParameters) -> StageOptimizer:
        device = torch.device("cpu")
        return StageOptimizer(lambda n: Watched([p for _, p in n], foreach=False), None, named, {}, 0, home=device)

    copies = OneWay()
    optimizer = OffloadedOptimizer(build, sections, device=META, gradients=gradients if away else None, copies=copies)
    if not away:
        for part in sections:
            for name, parameter in part:
                parameter.grad = gradients[name]
    for _ in range(2):
        optimizer.prepare()
        optimizer.update(lambda written: None)
        for part in sections:
            for name, _ in part:
                tensors, _ = optimizer.state_of(name)
                assert tensors.keys() == {"step", "exp_avg", "exp_avg_sq"}
                assert all(value.device.type == "cpu" for value in tensors.values())
                assert away is (optimizer.parameters[name].numel() == 0)
    assert stepped == ["0"] * 5 + ["2"] * 5
    assert copies.most == 2


def test_state_in_host_memory_is_taken_over_and_written_in_place() -> None:
    stage = _trained_stage()
    name = stage.named_parameters()[0][0]
    before = {key: value.data_ptr() for key, value in stage.optimizer.state_of(name)[0].items()}
    stage.apply(stage.next_step, 0.5)
    assert {key: value.data_ptr() for key, value in stage.optimizer.state_of(name)[0].items()} == before


def _trained_stage() -> Stage:
    setup = Setup(offload=True)
    setup.losses(1, 1, steps=1)
    generation = setup.finished[0].current
    assert generation is not None
    return generation.stage


# -- arguments ---------------------------------------------------------------------------------------------------


def test_gradients_and_parameters_that_are_apart_are_not_shown_to_before_step() -> None:
    with pytest.raises(UsageError, match=r"before_step= cannot be given with offload_optimizer=True"):
        JobSpec(
            tiny_gpt2,
            Tokens(),
            adamw,
            8,
            precision="bf16",
            memory=Memory(offload_optimizer=True),
            before_step=lambda named: None,
        )


@pytest.mark.parametrize(("device", "apart"), [("cpu", False), ("meta", True)])
def test_the_job_tells_where_its_state_lives(device: str, apart: bool) -> None:
    memory = Memory(offload_optimizer=True)
    spec = JobSpec(SmallLanguage, Tokens(), adamw, 8, device=torch.device(device), memory=memory)
    facts = JobFacts.model_validate_json(job_facts(spec, 1).model_dump_json())
    assert (facts.memory, facts.memory_apart) == (memory, apart)
