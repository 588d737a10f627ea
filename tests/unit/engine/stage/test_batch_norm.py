"""Models with batch normalisation: what buffers become depends on neither P nor D, and survives what runs survive."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import STEPS, Setup
from varuna.core.devices import WorkerGroups
from varuna.core.errors import UsageError
from varuna.core.messages import Apply, Vote
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.engine.base.inbox import GenerationEnded
from varuna.engine.base.transport import local_store
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.export import export_model
from varuna.engine.worker.session import Session
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.membership.static import StaticMembership, World
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition
from varuna.planner.choose import plan_run
from varuna.store.opening import open_store
from varuna.testing.threads import run_all
from varuna.trainer import Trainer


class Normalised(nn.Module):
    """Three normalised layers; two of them share one normalisation, and the dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=0.3)])
        self.norms.append(self.norms[0])
        self.norms.append(nn.BatchNorm1d(8, track_running_stats=False))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return nn.functional.mse_loss(x, y)


class Points:
    """Points of a plane, far from normal."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index)) * (1 + index % 3) + index % 5
        return {"x": x, "y": x.flip(0) / 5}


def sgd(named: Any) -> torch.optim.Optimizer:
    """Adam would blow up the rounding errors in front of a normalisation, where a bias has no gradient."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)


def setup(**changes: Any) -> Setup:
    return Setup(build=Normalised, dataset=Points(), optimizer=sgd, global_batch=11, micro_batch=3, **changes)


@pytest.mark.nightly
def test_a_norm_that_is_used_twice_counts_twice() -> None:
    """``test_options`` compares all running statistics with a plain loop's."""
    job = setup()
    job.run(2, 2, steps=2)
    assert int(job.buffers()["norms.0.num_batches_tracked"]) == 2 * 4 * 2  # four micro-batches


def plan_of(stages: int) -> Any:
    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, stages=stages, micro_batch=micro_batch)

    return plan


def sessions_of(job: Setup, stages: int, replicas: int, steps: int, directory: Path | None = None) -> list[Session]:
    store, size = local_store(), stages * replicas
    sessions = []
    for rank in range(size):
        solo = StaticMembership(World(rank, size, store, "127.0.0.1", 0), plan_of(stages))
        saver = None if directory is None else Snapshotter(open_store(directory), 100, solo.saved)
        sessions.append(job.session(solo, store, steps, saver=saver, rank=rank))
    return sessions


def test_they_are_saved_restored_into_another_plan_and_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = setup()
    whole.run(1, 1)
    job = setup(directory=str(tmp_path))
    first = sessions_of(job, 2, 1, STEPS // 2, tmp_path)
    run_all([partial(list, session.steps()) for session in first])
    second = sessions_of(job, 1, 1, STEPS, tmp_path)
    run_all([partial(list, session.steps()) for session in second])
    stage = second[0].standing.stage
    assert stage is not None
    assert stage.next_step == STEPS
    expected = whole.buffers()
    assert all(torch.equal(stage.buffers[name], value) for name, value in expected.items())
    export_model(second[0].current, job.model, tmp_path / "out.safetensors")
    model = Normalised()
    model.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=False)
    assert torch.equal(model.state_dict()["norms.2.running_var"], expected["norms.0.running_var"])


def test_a_step_that_is_undone_leaves_no_trace_and_a_verdict_updates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks lose the vote on step 1: one is told to commit, the other runs the step again."""
    expected = setup()
    expected.run(1, 2, steps=2)
    job = setup()
    sessions = sessions_of(job, 1, 2, 2)
    lost: dict[int, tuple[float, ...]] = {}

    def break_the_vote(session: Session) -> None:
        for committed in session.steps():
            generation = session.current
            assert generation is not None
            if committed.step == 0:
                rank, whole = generation.assignment.rank, generation.reducer.vote

                def vote(step: int, vector: Tensor, rank: int = rank, whole: Any = whole) -> tuple[float, ...]:
                    lost[rank] = whole(step, vector)
                    raise GenerationEnded(0)

                monkeypatch.setattr(generation.reducer, "vote", vote)

    run_all([partial(break_the_vote, session) for session in sessions])
    done, undone = (session.standing.stage for session in sessions)
    assert done is not None
    assert undone is not None
    before = {name: value.clone() for name, value in undone.buffers.items()}
    for _ in range(2):
        sessions[0].standing.apply_verdict(Apply(generation=0, vote=Vote(generation=0, step=1, vector=lost[0])))
    assert all(torch.equal(done.buffers[name], value) for name, value in expected.buffers().items())
    undone.clear_gradients()  # the step begins again
    undone.statistics.apply(undone.buffers)
    assert all(torch.equal(undone.buffers[name], value) for name, value in before.items())
    assert not torch.equal(undone.buffers["norms.1.running_mean"], done.buffers["norms.1.running_mean"])


def test_recomputing_a_micro_batch_changes_nothing() -> None:
    job = setup()
    job.run(1, 1, steps=1)
    session = job.finished[0]
    assert session.current is not None
    stage: Stage = session.current.stage
    [section] = [s for s in job.model.sections if "norms.1.running_mean" in s.updated]
    stage.statistics.clear()
    for micro_batch in range(4):
        stage.statistics.keep_found(section.index, micro_batch, [torch.zeros(8)] * 2)  # F
        stage.statistics.keep_found(section.index, micro_batch, [torch.ones(8)] * 2)  # R
    stage.statistics.complete(section.index, stage.statistics.table(section.index))
    before = stage.buffers["norms.1.running_mean"].clone()
    stage.statistics.apply(stage.buffers)
    torch.testing.assert_close(stage.buffers["norms.1.running_mean"], before * 0.7**4)


@pytest.mark.parametrize("alone", [True, False])
def test_what_goes_with_sums_is_the_same_before_and_after_all_replicas_know_it(alone: bool) -> None:
    job = setup()
    job.run(1, 1, steps=1)
    session = job.finished[0]
    assert session.current is not None
    statistics = session.current.stage.statistics
    [section] = [s.index for s in job.model.sections if "norms.1.running_mean" in s.updated]
    statistics.clear()
    for micro_batch in range(4):
        statistics.keep_found(section, micro_batch, [torch.full((8,), float(micro_batch))] * 2)
    before = statistics.as_bytes(section, ((1, 3),))
    assert before is not None
    statistics.complete(section, None if alone else statistics.table(section))
    after = statistics.as_bytes(section, ((1, 3),))
    assert after is not None
    rows = [carried.view(2, -1)[:, :32].view(torch.float32) for carried in (before, after)]  # the means of two
    assert torch.equal(rows[0], torch.tensor([[1.0], [2.0]]).expand(2, 8))
    assert torch.equal(rows[0], rows[1])


def test_the_micro_batch_must_be_given() -> None:
    model = partition(Recipe(Normalised), {key: value[None] for key, value in Points()[0].items()})
    assert model.facts.batch_dependent
    trainer = Trainer(Normalised, Points(), lambda named: torch.optim.SGD([p for _, p in named]), global_batch=8)
    with pytest.raises(UsageError, match="Pass micro_batch="):
        next(iter(trainer.steps(1)))
