"""When a checkpoint is due, who saves what, and that training on does not change what is being saved."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.engine.ranks import Setup, SmallLanguage
from varuna.checkpoint.shards import read_shard
from varuna.checkpoint.writer import BackgroundWriter
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard
from varuna.core.plan import Plan
from varuna.engine import saving
from varuna.engine.forming import initial_states
from varuna.engine.saving import Saver, check_writable
from varuna.engine.stage import Stage


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(build=SmallLanguage)


def stage_of(setup: Setup, *, stages: int = 1, replicas: int = 1, index: int = 0, next_step: int = 4) -> Stage:
    sections = len(setup.model.sections)
    plan = Plan(
        stages=stages,
        replicas=replicas,
        micro_batch=1,
        global_batch=8,
        starts=tuple(stage * sections // stages for stage in range(stages)),
        sections=sections,
        stash_limits=(1,) * stages,
    )
    states = initial_states(setup.model, plan.sections_of(index), setup.beginning.parameters)
    return Stage(setup.job(), plan, index, states, next_step)


def test_every_third_step_is_due_by_the_number_of_steps_done(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 3, lambda shard: None)
    assert [step for step in range(10) if saver.is_due(step)] == [2, 5, 8]
    assert all(Saver(tmp_path, 1, lambda shard: None).is_due(step) for step in range(3))


def test_a_checkpoint_is_due_when_the_time_since_the_last_save_has_passed(
    tmp_path: Path, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    saver = Saver(tmp_path, timedelta(minutes=1), lambda shard: None)
    assert not saver.is_due(0)
    now_s[0] += 59.9
    assert not saver.is_due(1)
    now_s[0] += 0.1
    assert saver.is_due(2)
    assert saver.is_due(3)  # asking changes nothing
    saver.save(stage_of(setup), 0, 0)
    assert not saver.is_due(4)
    now_s[0] += 60
    assert saver.is_due(5)
    saver.flush()


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (1, 3), (2, 2), (3, 2), (2, 8)])
def test_the_shares_of_replicas_cover_each_section_exactly_once(
    tmp_path: Path, setup: Setup, stages: int, replicas: int
) -> None:
    saved: list[SavedShard] = []
    for index in range(stages):
        for replica in range(replicas):
            saver = Saver(tmp_path, 1, saved.append)
            saver.save(stage_of(setup, stages=stages, replicas=replicas, index=index), replica, 7)
            saver.flush()
    assert sorted(shard.section for shard in saved) == list(range(len(setup.model.sections)))
    assert {shard.step for shard in saved} == {4}
    found = [name for shard in saved for name in read_shard(tmp_path, shard).tensors]
    names = {f"parameters/{name}" for name, _ in SmallLanguage().named_parameters()}
    assert len(found) == len(names)  # a tied parameter is in its owner's shard alone
    assert set(found) == names


class Gate(BackgroundWriter):
    """Writes once the gate is open."""

    gate = threading.Event()

    def _run(self) -> None:
        self.gate.wait(20)
        super()._run()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    monkeypatch.setattr(Gate, "gate", threading.Event())
    monkeypatch.setattr(saving, "BackgroundWriter", Gate)
    return Gate.gate


def test_what_is_saved_is_a_copy_of_the_step_boundary(tmp_path: Path, setup: Setup, gate: threading.Event) -> None:
    stage, saved = stage_of(setup), list[SavedShard]()
    expected = {name: value.detach().clone() for name, value in stage.parameters.items()}
    saver = Saver(tmp_path, 1, saved.append)
    saver.save(stage, 0, 0)
    with torch.no_grad():
        for parameter in stage.parameters.values():
            parameter.fill_(7.0)  # training goes on
    gate.set()
    saver.flush()
    tensors = {name: value for shard in saved for name, value in read_shard(tmp_path, shard).tensors.items()}
    assert all(torch.equal(tensors[f"parameters/{name}"], value) for name, value in expected.items())


def test_a_save_on_top_of_an_unfinished_one_is_skipped_and_says_so(
    tmp_path: Path, setup: Setup, gate: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[SavedShard] = []
    saver = Saver(tmp_path, 1, saved.append)
    saver.save(stage_of(setup, next_step=4), 0, 0)
    saver.save(stage_of(setup, next_step=5), 0, 0)
    assert "the checkpoint of step 5 is skipped: the one before is still being written" in capsys.readouterr().err
    gate.set()
    saver.flush()
    saver.save(stage_of(setup, next_step=6), 0, 0)
    saver.flush()
    assert {shard.step for shard in saved} == {4, 6}


def test_a_folder_that_cannot_be_written_is_found_out_before_training(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        check_writable(tmp_path / "file" / "below")
