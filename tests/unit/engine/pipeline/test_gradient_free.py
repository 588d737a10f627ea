"""Sections without anything to train, in them or below them, run F only; the numbers stay those of a plain loop."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import nightly
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import equal_workers
from varuna.core.plan import Plan
from varuna.engine.base.spans import subscribe
from varuna.engine.links.links import Sender
from varuna.engine.links.message import Packed
from varuna.engine.links.trips import STAMP_BYTES
from varuna.engine.stage.section import SectionRunner
from varuna.planner.choose import plan_run
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.schedule.actions import Kind
from varuna.simulator.step import simulate

FROZEN_LAYERS = 3


class FineTuned(nn.Module):
    """Embeddings and the first layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(6)
        )
        self.head = nn.Linear(8, 64, bias=False)
        for part in (self.embed, *self.layers[:FROZEN_LAYERS]):
            part.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Undropped(FineTuned):
    """The same without random numbers, which a plain loop draws in another order."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


def trained(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named] or [nn.Parameter(torch.zeros(1))], lr=1e-2)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(build=FineTuned, policy="adaptive", global_batch=12)


def cut_in_the_middle(setup: Setup, stages: int) -> Any:
    """Stage 0 has frozen sections only; another begins with one, where there are three."""
    free, sections = setup.model.gradient_free, len(setup.model.sections)
    starts = {2: (0, free), 3: (0, free - 1, sections - 1)}[stages]

    def adjusted(plan: Plan) -> Plan:
        kept = (free, 0) if stages == 2 else (free - 1, 0, 0)
        return plan.with_each_pipeline(bounds=(*starts, plan.sections), kept=kept, stash_limits=(4, 3, 1)[-stages:])

    return adjusted


def test_the_model_knows_its_sections_without_gradients(setup: Setup) -> None:
    facts = setup.model.facts.sections
    free = setup.model.gradient_free
    assert 2 <= free < len(facts)
    assert [section.gradient_free for section in facts] == [index < free for index in range(len(facts))]
    assert all(section.activation_bytes == section.gradient_boundary_bytes == 0 for section in facts[:free])
    assert all(section.activation_bytes for section in facts[free:])


def test_losses_are_those_of_a_plain_loop() -> None:
    setup = Setup(build=Undropped, optimizer=trained)
    assert worst(setup.losses(1, 1), reference(setup)) < 1e-5


@pytest.mark.parametrize("stages", [3, *nightly(2)])
def test_no_cut_changes_a_bit(setup: Setup, stages: int) -> None:
    setup.adjusted = None
    flat = setup.losses(1, 1)
    weights = {name: value.clone() for name, value in setup.parameters().items()}
    setup.adjusted = cut_in_the_middle(setup, stages)
    assert setup.losses(stages, 1) == flat
    deep = setup.parameters()
    assert all(torch.equal(deep[name], weights[name]) for name in weights)


def test_frozen_sections_are_never_recorded_and_send_and_reduce_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    record = SectionRunner.record

    def noted(runner: SectionRunner, *args: Any, **kwargs: Any) -> Any:
        recorded.append(runner.section.index)
        return record(runner, *args, **kwargs)

    sent: set[int] = set()
    send = Sender.send

    def weighed(sender: Sender, message: Packed) -> None:
        if "(stage 0)" in sender._name:
            sent.add(message.buffer.nbytes)
        send(sender, message)

    monkeypatch.setattr(SectionRunner, "record", noted)
    monkeypatch.setattr(Sender, "send", weighed)
    reduced: set[int] = set()
    unsubscribe = subscribe(lambda span: reduced.add(span.stage) if span.name == "sum" else None)
    try:
        setup.adjusted = cut_in_the_middle(setup, 2)
        setup.run(2, 2, steps=2)
    finally:
        unsubscribe()
    assert min(recorded) == setup.model.gradient_free
    assert sent == {STAMP_BYTES}, "in place of gradients, as acknowledgements"
    assert reduced == {1}
    for session in setup.finished:
        assert session.current is not None
        assert session.current.runtime.times is not None
        kinds = {Kind(took.kind) for took in session.current.runtime.times.actions}
        assert session.current.stage.index or Kind.RECOMPUTE not in kinds


def test_the_planner_and_the_simulator_count_forwards_only(setup: Setup) -> None:
    calibration = nominal_calibration(setup.model.facts)
    plan = cut_in_the_middle(setup, 2)(plan_run(setup.facts(1), workers=equal_workers(2), stages=2, micro_batch=2))
    frozen, learning = pipeline_costs(profile(calibration, 2), plan, gpus_per_vm=1).stages
    assert frozen.keeps_all
    assert frozen.backward_s == pytest.approx(calibration.action_s)
    forward_s = sum(section.forward_s for section in setup.model.facts.sections[: setup.model.gradient_free])
    assert frozen.forward_s == pytest.approx(2 * forward_s + calibration.action_s)
    assert learning.backward_s > calibration.action_s
    costs = pipeline_costs(profile(calibration, 2), plan, gpus_per_vm=1)
    trace = simulate(costs, micro_batches=6, policy="adaptive", stash_limits=plan.first.stash_limits)
    assert Kind.RECOMPUTE not in trace.rows[0].kinds
    assert Kind.RECOMPUTE not in trace.rows[1].kinds, "the last stage keeps its F's graph"
