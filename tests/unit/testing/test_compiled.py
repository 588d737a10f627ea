"""Compiled sections: once per process, the same draws, the same losses in every plan."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.fx import GraphModule
from torch.nn.functional import cross_entropy, dropout

from tests.depth import by_depth
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.engine.plain import worst
from tests.unit.engine.ranks import Setup
from varuna import Trainer
from varuna.calibration.file import read_calibration
from varuna.core.devices import equal_workers
from varuna.core.errors import FleetError, ModelError
from varuna.core.plan import Plan
from varuna.engine.base.transport import local_store
from varuna.engine.graphs.compiled import Compiler
from varuna.extras.replay.job import job_of
from varuna.membership.static import StaticMembership, World
from varuna.planner.choose import plan_run

pytestmark = pytest.mark.usefixtures("shared_captures")


class Counting:
    """The backend ``aot_eager``, which compiles forward and backward to plain calls; counts what it is asked for."""

    def __init__(self) -> None:
        self.compiled: list[GraphModule] = []

    def __call__(self, module: GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        self.compiled.append(module)
        made: Callable[..., Sequence[Tensor]] = lookup_backend("aot_eager")(module, examples)
        return made


class Dropping(SmallLanguage):
    """Draws twice per layer."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = dropout(x + dropout(layer(x), 0.1), 0.2)
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.nightly
def test_a_section_is_compiled_once_whatever_the_plan() -> None:
    backend = Counting()
    setup = Setup(build=Dropping, dataset=Tokens(padded=True), compiler=Compiler(backend))
    flat = setup.losses(1, 1)
    weights = setup.parameters()
    once = len(backend.compiled)
    assert once < len(setup.model.sections)  # equal layers share one
    for stages in by_depth((3,), (2, 3, 1)):
        assert setup.losses(stages, 1) == flat
        assert all(torch.equal(value, weights[name]) for name, value in setup.parameters().items())
    setup.run(2, 2, 1)
    assert len(backend.compiled) == once
    plain = Setup(build=Dropping, dataset=Tokens(padded=True))
    assert worst(flat, plain.losses(1, 1)) < 1e-6, "dropout draws as if nothing were compiled"


@pytest.mark.nightly
def test_a_smaller_last_micro_batch_is_compiled_for_itself() -> None:
    counts = []
    for examples in (8, 7):
        backend = Counting()
        setup = Setup(build=SmallLanguage, global_batch=examples, compiler=Compiler(backend))
        plain = Setup(build=SmallLanguage, global_batch=examples)
        assert worst(setup.losses(2, 1), plain.losses(2, 1)) < 1e-6
        counts.append(len(backend.compiled))
    assert counts[1] == 2 * counts[0]


@pytest.mark.nightly
def test_bf16_sections_compile_to_the_same_in_every_plan() -> None:
    setup = Setup(build=SmallLanguage, precision="bf16", compiler=Compiler("aot_eager"))
    flat = setup.losses(1, 1)
    assert setup.losses(3, 1) == flat
    assert worst(flat, Setup(build=SmallLanguage, precision="bf16").losses(1, 1)) < 2e-2


@pytest.mark.nightly
def test_compiled_backwards_run_whole() -> None:
    def halved(plan: Plan) -> Plan:
        return plan.with_each_pipeline(split_last=3)

    plain = Setup(build=SmallLanguage, policy="adaptive", adjusted=halved)
    compiled = Setup(build=SmallLanguage, policy="adaptive", adjusted=halved, compiler=Compiler("aot_eager"))
    assert worst(compiled.losses(2, 1), plain.losses(2, 1)) < 1e-6


def test_the_planner_splits_no_compiled_backward() -> None:
    calibration = read_calibration(Path("examples/calibrations/gpt2-2.5b-v100.json"))
    facts = job_of(calibration, 64, 1)
    jobs = [facts.model_copy(update={"compiled": name}) for name in (None, "inductor")]
    split, whole = (
        plan_run(job, workers=equal_workers(6), stages=6, calibrations=calibration).first.split_last for job in jobs
    )
    assert split > 0 == whole


def test_a_backend_that_computes_something_else_is_refused() -> None:
    def wrong(module: GraphModule, _examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        return lambda *given: [value * 1.01 if value.is_floating_point() else value for value in module(*given)]

    with pytest.raises(ModelError, match=r"section 0 \(.*gives different results when compiled: its results differ"):
        Setup(build=SmallLanguage, compiler=Compiler(wrong)).run(1, 1)


def test_a_backend_that_fails_is_reported_with_its_section() -> None:
    def failing(_module: GraphModule, _examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        raise NotImplementedError("no kernel for this")

    with pytest.raises(ModelError, match=r"section 0 \(.*cannot be compiled.*no kernel for this.*Leave compile= out"):
        Setup(build=SmallLanguage, compiler=Compiler(failing)).run(1, 1)


def test_ranks_that_compile_otherwise_are_refused() -> None:
    store, facts = local_store(), Setup(build=SmallLanguage).facts(1)
    ranks = [
        StaticMembership(World(rank, 2, store, "127.0.0.1", 1), lambda *_: pytest.fail("nothing is planned"))
        for rank in (0, 1)
    ]
    jobs = [facts, facts.model_copy(update={"compiled": "inductor"})]

    def never(*_what: object) -> NoReturn:
        pytest.fail("nobody holds or pauses a solo run")

    def join(rank: int) -> None:
        ranks[rank].join(jobs[rank], beat=never, on_hold=never, on_flag=never)

    join(0)
    with pytest.raises(FleetError, match=r"rank 1 runs a different job than rank 0: .*compile"):
        join(1)


def test_a_trainer_compiles_trains_and_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "VARUNA_MANAGER", "VARUNA_STAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    found = []
    for backend in (False, "aot_eager"):
        trainer = Trainer(SmallLanguage, Tokens(), adamw, 8, micro_batch=2, device="cpu", compile=backend)
        losses = [step.loss for step in trainer.steps(by_depth(2, 3))]
        found.append([*losses, trainer.evaluate(Tokens(size=6)).loss])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
