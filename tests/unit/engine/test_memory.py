"""A stage uses the bytes that its plan promised."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth, nightly, nightly_rows
from tests.unit.engine.ranks import Setup
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import equal_workers
from varuna.core.plan import Pipeline, Plan
from varuna.core.precision import Precision
from varuna.engine.base import spans
from varuna.engine.stage.cross_stage import all_reduce_shared
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import DeferredWeightGrad, Stage
from varuna.engine.worker.stored import initial_states
from varuna.partition.watching.live_bytes import Allocated
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spans import Spans
from varuna.schedule.actions import Kind
from varuna.schedule.buffers import ACTIVATIONS_COMING

_MICRO_BATCH, _MICRO_BATCHES = 8, 4
PRECISIONS = ["bf16", *nightly("fp32")]


class Wide(nn.Module):
    """Tied embeddings, and layers whose activations are far larger than what crosses between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@contextmanager
def counted_by_rank() -> Iterator[list[Allocated]]:
    """Counts of the ranks, which are threads of this one, and of all threads that they start; since they formed."""
    counts: list[Allocated] = []
    of: dict[threading.Thread, Allocated] = {}
    start, run = threading.Thread.start, threading.Thread.run

    def started(thread: threading.Thread) -> None:
        known = of.get(threading.current_thread())
        if known is None:
            known = Allocated()
            counts.append(known)
        of[thread] = known
        start(thread)

    def watched(thread: threading.Thread) -> None:
        with of[thread].watch():
            run(thread)

    def hear(mark: spans.Span) -> None:
        if mark.name == "form" and mark.phase == "end":
            gc.collect()
            of[threading.current_thread()].restart()

    undo = spans.subscribe(hear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", started)
        patch.setattr(threading.Thread, "run", watched)
        try:
            yield counts
        finally:
            undo()


def setup_of(micro_batches: int, **changes: Any) -> Setup:
    given: dict[str, Any] = {"build": Wide, "micro_batch": _MICRO_BATCH, "policy": "adaptive", **changes}
    return Setup(global_batch=micro_batches * given["micro_batch"], **given)


def peaks(setup: Setup, plan: Plan) -> list[int]:
    """Return the most bytes of each rank over some steps."""
    setup.adjusted = lambda _: plan
    with counted_by_rank() as counts:
        setup.run(plan.stages, plan.replicas, steps=by_depth(2, 3))
    return [count.peak_bytes for count in counts]


def later_peaks(setup: Setup, plan: Plan) -> list[int]:
    """The same of the steps after the first, by which what the workers began with is gone."""
    setup.adjusted = lambda _: plan
    begun = list[spans.Span]()
    with counted_by_rank() as counts:

        def hear(mark: spans.Span) -> None:
            if mark.step == 1 and not begun:
                begun.append(mark)
                gc.collect()
                for count in counts:
                    count.restart()

        undo = spans.subscribe(hear)
        try:
            setup.run(plan.stages, plan.replicas, steps=3)
        finally:
            undo()
    return [count.peak_bytes for count in counts]


def planned(setup: Setup, stages: int, memory_bytes: int | None = None) -> Plan:
    calibration = nominal_calibration(setup.model.facts)
    return best_plan(
        PlanRequest(
            calibrations=Calibrations.of_one(calibration.offloaded(apart=False) if setup.offload else calibration),
            workers=equal_workers(stages),
            stages=stages,
            global_batch=setup.global_batch,
            micro_batch=setup.micro_batch,
            memory_bytes=memory_bytes,
            tentative=setup.combines,
        )
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_single_stage_uses_what_its_plan_promised(precision: str) -> None:
    setup = setup_of(2, precision=precision)
    plan = planned(setup, 1)
    assert peaks(setup, plan) == pytest.approx(list(plan.first.memory_bytes), rel=0.02)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_stage_of_a_pipeline_exceeds_its_promise(precision: str) -> None:
    setup = setup_of(_MICRO_BATCHES, precision=precision)
    plan = planned(setup, 2).with_each_pipeline(split_last=0)
    for found, promised in zip(peaks(setup, plan), plan.first.memory_bytes, strict=True):
        assert 0.5 * promised < found < 1.02 * promised  # how much was in flight at once is a matter of luck


class Heavy(nn.Module):
    """Much more state than activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.head = nn.Linear(96, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stages", [2, *nightly(1)])
def test_offloaded_state_and_what_is_streamed_of_it_are_promised(stages: int, precision: Precision) -> None:
    """Here host memory and the device's are one, so that both, and the copies of tentative steps, add up."""

    def talking(named: object) -> None:
        all_reduce_shared(torch.ones(()))  # every step is tentative, also those that find state to copy

    setup = setup_of(2, build=Heavy, micro_batch=1, precision=precision, offload=True, before_step=talking)
    plan = planned(setup, stages)
    assert peaks(setup, plan) == pytest.approx(list(plan.first.memory_bytes), rel=0.1)
    without = planned(replace(setup, offload=False), stages)
    for more, less in zip(plan.first.memory_bytes, without.first.memory_bytes, strict=True):
        assert more > 1.03 * less  # what passes through shows in the peak


@pytest.mark.parametrize("precision", PRECISIONS)
def test_host_memory_holds_the_state_that_was_promised(precision: Precision) -> None:
    setup = setup_of(2, build=Heavy, micro_batch=1, precision=precision, offload=True)
    apart = nominal_calibration(setup.model.facts).offloaded()
    plan = best_plan(
        PlanRequest(calibrations=Calibrations.of_one(apart), workers=equal_workers(1), global_batch=2, micro_batch=1)
    )
    setup.run(1, 1, steps=1)
    assert setup.finished[0].current is not None
    stage = setup.finished[0].current.stage
    away = stage.parameters.values() if stage.job.masters_away else ()
    state = [value for name in stage.parameters for value in stage.optimizer.state_of(name)[0].values()]
    assert plan.first.host_bytes == (sum(value.nbytes for value in (*away, *state)),)


class Based(Heavy):
    """Frozen, with an adapter beside each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(96, 2, bias=False) for _ in self.layers)
        self.up = nn.ModuleList(nn.Linear(2, 96, bias=False) for _ in self.layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + torch.tanh(layer(x) + up(down(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stages", [1, *nightly(2)])
def test_frozen_parameters_in_host_memory_take_the_places_of_two_sections(stages: int, precision: Precision) -> None:
    setup = setup_of(4, build=Based, micro_batch=1, precision=precision)
    calibration = nominal_calibration(setup.model.facts)
    request = PlanRequest(
        calibrations=Calibrations.of_one(calibration),
        workers=equal_workers(stages),
        stages=stages,
        global_batch=4,
        micro_batch=1,
    )
    here, streamed = (
        best_plan(request.model_copy(update={"streams_frozen": streams})).with_each_pipeline(split_last=0)
        for streams in (False, True)
    )
    assert max(streamed.first.memory_bytes) < 0.8 * max(here.first.memory_bytes)
    rested = [0] * stages  # what is in a file counts as memory here
    found = later_peaks(setup, streamed)
    for session in setup.finished:
        assert session.current is not None
        stage = session.current.stage
        storages = [value.untyped_storage() for value in stage.parameters.values()]
        files = {each.data_ptr(): each.nbytes() for each in storages if each.filename is not None}
        rested[stage.index] = sum(files.values())
    for peak, at_rest, promised in zip(found, rested, streamed.first.memory_bytes, strict=True):
        assert at_rest
        assert 0.8 * promised < peak - at_rest < 1.1 * promised


class Stack(nn.Module):
    """Linears with nothing between them: what waits for W is twice what B keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_waits_for_w_is_as_large_as_promised(precision: Precision) -> None:
    """Every W after all I's, without luck: on one stage, whose sections are told to split."""
    setup = Setup(build=Stack, micro_batch=_MICRO_BATCH, precision=precision)
    count, facts = len(setup.model.sections), setup.model.facts.sections
    only = Pipeline(bounds=(0, count), stash_limits=(1,))
    job, counted = setup.job(), Allocated()
    states = initial_states(setup.model, range(count), setup.beginning.parameters, job.buffers)
    stage = Stage(job, Plan(micro_batch=_MICRO_BATCH, global_batch=24, pipelines=(only,)), 0, states, 0)
    loss = setup.model.sections[-1].makes[0]
    lefts: list[list[DeferredWeightGrad]] = []
    for micro_batch in range(4):
        if micro_batch == 1:
            lefts.clear()  # the first one is checked for equal bits, which leaves caches
            gc.collect()
            before_bytes = counted.now_bytes
        examples = Examples(setup.source.micro_batch(range(_MICRO_BATCH)).tensors, _MICRO_BATCH)
        with counted.watch():
            tapes = stage.record({}, examples, 0, micro_batch, split=True)
            lefts.append(stage.input_backward(tapes, {loss: torch.ones((), dtype=job.dtype)})[1])
    queued = sum(section.queued_bytes or 0 for section in facts)
    assert counted.now_bytes - before_bytes == pytest.approx(3 * queued * _MICRO_BATCH, rel=0.02)
    assert queued > 1.5 * sum(section.activation_bytes for section in facts)


class Normed(nn.Module):
    """A model whose linears take what is made from the inputs of sections."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def test_what_waits_for_w_does_not_hold_what_the_stage_took() -> None:
    setup = Setup(build=Normed, micro_batch=_MICRO_BATCH)
    count, job = len(setup.model.sections), setup.job()
    crossings = setup.model.split.crossings
    start = next(k for k in range(count // 2, count) if len(crossings[k]) == 1)
    [taken] = crossings[start]
    states = initial_states(setup.model, range(start, count), setup.beginning.parameters, job.buffers)
    two = Pipeline(bounds=(0, start, count), stash_limits=(1, 1))
    stage = Stage(job, Plan(micro_batch=_MICRO_BATCH, global_batch=24, pipelines=(two,)), 1, states, 0)
    examples = Examples(setup.source.micro_batch(range(_MICRO_BATCH)).tensors, _MICRO_BATCH)
    value = torch.randn(taken.shape(_MICRO_BATCH))
    storage = weakref.ref(value.untyped_storage())
    tapes = stage.record({taken.name: value}, examples, 0, 0, split=True)
    del value
    loss = setup.model.sections[-1].makes[0]
    gradients, left = stage.input_backward(tapes, {loss: torch.ones((), dtype=job.dtype)})
    assert list(gradients) == [taken.name]
    assert sum(len(pending.parts) for _, _, pending in left if pending is not None) >= 2
    assert storage() is None


@pytest.mark.nightly
def test_a_stage_that_splits_uses_what_its_plan_promised() -> None:
    setup = setup_of(_MICRO_BATCHES, build=Stack)
    plan = planned(setup, 2).with_each_pipeline(split_last=_MICRO_BATCHES)
    of_sections = profile(nominal_calibration(setup.model.facts), _MICRO_BATCH)
    sections = plan.first.sections_of(1)
    live_bytes = [Spans(of_sections, splits=splits).at_work(sections.start, sections.stop) for splits in (False, True)]
    found = peaks(setup, plan)
    assert 0.85 * plan.first.memory_bytes[1] < found[1] < 1.03 * plan.first.memory_bytes[1]
    assert found[1] > plan.first.memory_bytes[1] - (live_bytes[1] - live_bytes[0])  # B whole would need less


@pytest.mark.nightly
def test_kept_activations_are_as_large_as_promised() -> None:
    setup = setup_of(_MICRO_BATCHES)
    plan = planned(setup, 2, memory_bytes=2**30)
    assert plan.first.keeps_all(0)
    assert plan.first.stash_limits[0] == _MICRO_BATCHES
    assert plan.first.memory_bytes[0] > 1.8 * planned(setup, 2).first.memory_bytes[0]
    all_in_flight = plan.with_each_pipeline(stash_limits=(_MICRO_BATCHES,) * 2, split_last=0)
    found = peaks(setup, all_in_flight.model_copy(update={"policy": "gpipe"}))
    assert found[0] == pytest.approx(plan.first.memory_bytes[0], rel=0.1)


class Standardised(nn.Module):
    """Batch normalisation of many channels: a micro-batch leaves more statistics than anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 1024)
        self.norms = nn.ModuleList(nn.BatchNorm1d(1024) for _ in range(4))
        self.head = nn.Linear(1024, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids).mean(1)
        for norm in self.norms:
            x = x + norm(x).relu()
        return nn.functional.cross_entropy(self.head(x), labels[:, 0])


@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), *nightly_rows((1, 1), (1, 2))])
def test_statistics_for_buffers_are_promised_for_every_micro_batch(stages: int, replicas: int) -> None:
    micro_batches = 48
    setup = setup_of(micro_batches, build=Standardised, micro_batch=2)
    plan = best_plan(
        PlanRequest(
            calibrations=Calibrations.of_one(nominal_calibration(setup.model.facts)),
            workers=equal_workers(stages * replicas),
            stages=stages,
            global_batch=setup.global_batch,
            micro_batch=2,
            tentative=setup.combines,
            leaves_idle=False,
        )
    )
    assert (plan.stages, plan.replicas) == (stages, replicas)
    each = sum(section.statistics_bytes for section in setup.model.facts.sections)
    assert each >= 4 * 2 * 1024 * 4  # mean and variance
    assert micro_batches * each > 0.3 * sum(plan.first.memory_bytes)
    # While the last stage updates, forwards of the next step may be here. Beside so small an update they show.
    early = (plan.first.stash_limits[0] + ACTIVATIONS_COMING) * 2 * setup.model.facts.sections[0].boundary_bytes
    for found, promised in zip(peaks(setup, plan), plan.first.memory_bytes * replicas, strict=True):
        assert 0.9 * promised < found < 1.02 * promised + early * (stages - 1)


def test_the_stash_never_holds_more_than_the_plan_allows() -> None:
    setup = setup_of(12, micro_batch=1)
    plan = planned(setup, 2).with_each_pipeline(stash_limits=(3, 1), split_last=0)
    setup.adjusted = lambda _: plan
    setup.run(2, 1, steps=1)
    for limit, times in zip(plan.first.stash_limits, setup.times(), strict=True):
        assert times is not None
        kinds = [Kind(took.kind) for took in times.actions]
        in_flight = [kinds[:n].count(Kind.FORWARD) - kinds[:n].count(Kind.BACKWARD) for n in range(1, len(kinds) + 1)]
        assert 1 <= max(in_flight) <= limit
        assert in_flight[-1] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_that_is_shared_out_is_promised_for_the_fullest_replica(precision: Precision) -> None:
    setup = setup_of(8, build=Heavy, micro_batch=1, precision=precision, share=True)
    request = PlanRequest(
        calibrations=Calibrations.of_one(nominal_calibration(setup.model.facts).with_sharded_optimizer()),
        workers=equal_workers(4),
        stages=1,
        global_batch=8,
        micro_batch=1,
        leaves_idle=False,
    )
    plan = best_plan(request)
    assert plan.replicas == 4
    assert max(peaks(setup, plan)) == pytest.approx(plan.first.memory_bytes[0], rel=0.1)
    without = best_plan(
        request.model_copy(update={"calibrations": Calibrations.of_one(nominal_calibration(setup.model.facts))})
    )
    assert plan.first.memory_bytes[0] < 0.9 * without.first.memory_bytes[0]
