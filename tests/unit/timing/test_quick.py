"""A calibration within seconds leaves no trace in the job."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.engine.models import Dropping
from tests.unit.engine.ranks import Setup, single_threaded
from varuna.calibration.file import check_matches
from varuna.core.devices import equal_workers
from varuna.core.plan import Plan
from varuna.planner.choose import plan_run
from varuna.timing.compute import Thoroughness, measure_window
from varuna.timing.quick import quick_calibration
from varuna.timing.stand_ins import StandIns
from varuna.timing.window import Window


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def forbidden(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    pytest.fail("the user's optimizer is not asked for stand-ins")


@pytest.mark.nightly
def test_every_section_has_times_at_every_size_and_nothing_else_changes() -> None:
    setup = Setup(Dropping)
    job = replace(setup.job(), optimizer=forbidden)
    batch = setup.source.micro_batch(range(2)).tensors
    kept = {name: value.clone() for name, value in (*batch.items(), *job.buffers.items())}
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    found = quick_calibration(job, setup.beginning, batch, global_batch=8, limit_s=60.0)
    assert (random.getstate(), str(np.random.get_state())) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(value, kept[name]) for name, value in (*batch.items(), *job.buffers.items()))
    check_matches(found, setup.model.facts)
    assert found.first.sizes[:3] == (1, 2, 4)
    assert found.first.sized_for == 8
    for kind in found.first.kinds.values():
        assert min(*kind.forward_s, *kind.recompute_s, *kind.backward_s) > 0
        assert kind.input_s[0] + kind.weight_s[0] == pytest.approx(kind.backward_s[0])
    plan = plan_run(
        setup.facts(1).model_copy(update={"micro_batch": None}),
        workers=equal_workers(2),
        calibrations=found,
    )
    assert isinstance(plan, Plan)
    assert plan.workers == 2, "a network that was not measured is no reason to leave a worker idle"


def test_a_size_that_would_end_too_late_is_not_begun() -> None:
    setup = Setup(Dropping)
    found = quick_calibration(
        setup.job(), setup.beginning, setup.source.micro_batch(range(2)).tensors, global_batch=8, limit_s=0.0
    )
    assert found.first.sizes == (1,)
    assert found.first.sized_for == 0, "a later run measures again"


def test_a_size_for_which_the_host_has_no_memory_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, measured = Setup(Dropping), Window.round

    def limited(window: Window, batch: dict[str, torch.Tensor], examples: int, *, halves: bool = True) -> object:
        if examples > 2:
            torch.empty(2**62, dtype=torch.uint8)  # the allocator's own refusal
        return measured(window, batch, examples, halves=halves)

    monkeypatch.setattr(Window, "round", limited)
    found = measure_window(
        setup.job(),
        range(len(setup.model.sections)),
        (1, 2, 4, 8),
        beginning=StandIns(setup.model.shapes, setup.beginning),
        batch=lambda m: setup.source.micro_batch(range(m)).tensors,
        memory_bytes=None,
        effort=Thoroughness(0.0, updates=False),
    )
    assert {each.micro_batch for each in found.sections} == {1, 2}
    assert found.updates == ()
