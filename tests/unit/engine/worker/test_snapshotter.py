"""Checkpoints: when one is due, which rank saves what, and that training on does not change what is being saved."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup
from varuna.checkpoint.collector import Collector
from varuna.checkpoint.io.restore import everything, read_states
from varuna.checkpoint.io.sums import fingerprint, write_sums
from varuna.checkpoint.manifest import Manifest, commit, find_step
from varuna.checkpoint.names import checkpoint_place, sums_file
from varuna.checkpoint.saved_sums import SumsLabel
from varuna.core.errors import CheckpointError, DamagedCheckpoint
from varuna.core.messages import Assignment
from varuna.core.plan import Pipeline, Plan
from varuna.core.precision import Precision
from varuna.core.saved import SavedShard
from varuna.core.sums import InheritedSum, SectionSum, StepAssignment
from varuna.engine.stage.stage import Stage
from varuna.engine.worker import snapshotter
from varuna.engine.worker.snapshotter import Snapshotter, check_writable
from varuna.engine.worker.stored import initial_states, stored_sums
from varuna.store.base import Chunks, Store
from varuna.store.opening import open_store


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(build=SmallLanguage)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.nodeid}")


def make_plan(setup: Setup, stages: int = 1, replicas: int = 1) -> Plan:
    sections = len(setup.model.sections)
    return Plan(
        micro_batch=1,
        global_batch=8,
        pipelines=(
            Pipeline(
                replicas=replicas,
                bounds=(*tuple(stage * sections // stages for stage in range(stages)), sections),
                stash_limits=(1,) * stages,
            ),
        ),
    )


def assigned(plan: Plan, rank: int = 0, generation: int = 0, lost_replicas: tuple[int, ...] = ()) -> Assignment:
    return Assignment(
        generation=generation,
        plan=plan,
        rank=rank,
        members=plan.workers,
        lost_replicas=lost_replicas,
        next_step=0,
        fresh=True,
    )


def stage_of(setup: Setup, plan: Plan, index: int = 0, next_step: int = 4, replica: int = 0) -> Stage:
    states = initial_states(setup.model, plan.first.sections_of(index), setup.beginning.parameters, setup.job().buffers)
    return Stage(setup.job(), plan, index, states, next_step, replica=replica)


def small(store: Store, saved: list[SavedShard]) -> Snapshotter:
    return Snapshotter(store, 1, saved.append, smallest_part_bytes=64)


def manifest_of(setup: Setup, store: Store, plan: Plan, saved: Sequence[SavedShard], generation: int = 0) -> Manifest:
    collector = Collector(setup.facts(9), run_id="r", writer="w")
    collector.begin(generation, plan, first_step=0, rollback=True)
    [manifest] = [found for shard in saved if (found := collector.add(shard)) is not None]
    return commit(store, manifest)


def test_every_third_step_is_due_by_the_number_of_steps_done(store: Store) -> None:
    saver = Snapshotter(store, 3, lambda shard: None)
    assert [step for step in range(10) if saver.is_due(step)] == [2, 5, 8]
    assert all(Snapshotter(store, 1, lambda shard: None).is_due(step) for step in range(3))


def test_a_checkpoint_is_due_at_the_end_of_a_step_that_is_nearest_to_the_wished_time(
    store: Store, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, plan = [100.0], make_plan(setup)
    monkeypatch.setattr(snapshotter, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    saver = Snapshotter(store, timedelta(minutes=1), lambda shard: None)
    saved_s = []
    for step in range(12):  # of 25 s each: they end 25, 50, 75 s after the last save, and so on
        due = saver.is_due(step)
        assert saver.is_due(step) == due  # asking again changes nothing
        now_s[0] += 25
        if due:
            saved_s.append(now_s[0] - 100)
            saver.save(stage_of(setup, plan), assigned(plan))
            saver.flush()
    assert saved_s == [50, 100, 150, 200, 250, 300]
    now_s[0] += 59
    assert not Snapshotter(store, timedelta(minutes=1), lambda shard: None).is_due(0)  # it has seen no step yet
    now_s[0] += 1
    assert saver.is_due(40)  # whatever a step takes, the time has come
    saver.flush()


def test_a_state_that_nobody_else_holds_is_saved_as_often_as_that_costs_little(
    store: Store, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, plan = [100.0], make_plan(setup)
    monkeypatch.setattr(snapshotter, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    saver = Snapshotter(store, None, lambda shard: None, alone_s=2.0)
    assert saver.is_rescue
    now_s[0] += 3600.0
    assert not saver.is_due(0)  # nobody goes on after a loss
    assert not saver.is_due(0, make_plan(setup, replicas=2))  # somebody else holds it, too
    assert saver.is_due(0, plan)
    stage = stage_of(setup, plan)
    state_of = stage.state_of

    def slow(*arguments: Any, **more: Any) -> Any:
        now_s[0] += 0.5 / len(stage.sharding.held)
        return state_of(*arguments, **more)

    monkeypatch.setattr(stage, "state_of", slow)
    saver.save(stage, assigned(plan))  # the copy takes half a second
    saver.flush()
    now_s[0] += 9.0
    assert not saver.is_due(5, plan)
    now_s[0] += 1.0
    assert saver.is_due(5, plan)
    saver.begin(stage, assigned(plan).model_copy(update={"losses_per_hour": 100.0}))  # by Young's rule, 6 s apart
    now_s[0] -= 5.1  # it asks for the state as well
    assert not saver.is_due(5, plan)
    now_s[0] += 0.2
    assert saver.is_due(5, plan)
    saver.flush()
    often = Snapshotter(store, timedelta(seconds=1), lambda shard: None, alone_s=60.0)
    now_s[0] += 1.0
    assert often.is_due(0, plan)  # as its user wants, not rarer


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (1, 3), (2, 2), (3, 2), (2, 8)])
def test_what_all_ranks_save_is_the_whole_state_once_and_in_equal_shares(
    store: Store, setup: Setup, stages: int, replicas: int, share: bool
) -> None:
    setup = replace(setup, share=share)  # then a section's two holders divide it
    saved: list[SavedShard] = []
    plan, sizes = make_plan(setup, stages, replicas), list[int]()
    for index in range(stages):
        for replica in range(replicas):
            before, stage = len(saved), stage_of(setup, plan, index, replica=replica)
            saver, seat = small(store, saved), assigned(plan, plan.rank_of(replica, index))
            saver.begin(stage, seat)
            saver.save(stage, seat)
            saver.flush()
            if index == 0:
                sizes.append(sum(piece.size_bytes for shard in saved[before:] for piece in shard.pieces))
    manifest = manifest_of(setup, store, plan, saved)
    states = read_states(store, manifest, dict.fromkeys(range(manifest.sections), everything))
    found = {name: value for state in states.values() for name, value in state.tensors.items()}
    expected = dict(SmallLanguage().named_parameters())
    initial = setup.beginning.parameters(list(expected))
    assert found.keys() == {f"parameters/{name}" for name in expected}  # a tied one is its owner's alone
    assert all(torch.equal(found[f"parameters/{name}"], value) for name, value in initial.items())
    assert share or max(sizes) - min(sizes) <= 0.2 * sum(sizes) + 64


@pytest.mark.parametrize("seats", [2, 1])
def test_survivors_write_what_the_dead_have_not(store: Store, setup: Setup, seats: int) -> None:
    """Also those that have become spares: a later generation would not tell them of this loss any more."""
    plan, saved = make_plan(setup, 1, 3), list[SavedShard]()
    savers = [small(store, saved) for _ in range(2)]  # replica 2 dies before it has written anything
    stages = [stage_of(setup, plan, replica=replica) for replica in range(2)]
    for replica, (saver, stage) in enumerate(zip(savers, stages, strict=True)):
        saver.save(stage, assigned(plan, replica))
        saver.flush()
        with torch.no_grad():
            for parameter in stage.parameters.values():
                parameter.fill_(7.0)  # training goes on
    with pytest.raises(ValueError, match="not enough values"):
        manifest_of(setup, store, plan, saved)
    fewer = make_plan(setup, 1, seats)
    for replica, (saver, stage) in enumerate(zip(savers, stages, strict=True)):
        told = assigned(fewer, replica, 1, lost_replicas=(2,))
        saver.inherit(told)
        if not told.is_spare:
            saver.begin(stage, told)
        saver.flush()
    manifest = manifest_of(setup, store, plan, saved)
    states = read_states(store, manifest, {0: everything})
    [name, *_] = [name for name in states[0].tensors if name.startswith("parameters/")]
    initial = setup.beginning.parameters([name.removeprefix("parameters/")])
    assert torch.equal(states[0].tensors[name], next(iter(initial.values())))


def test_a_morph_without_deaths_makes_nobody_write_for_others(store: Store, setup: Setup) -> None:
    plan, saved = make_plan(setup, 1, 2), list[SavedShard]()
    stage, saver = stage_of(setup, plan), small(store, saved)
    saver.save(stage, assigned(plan))
    saver.flush()
    before = len(saved)
    saver.inherit(assigned(plan, 1, 1))
    saver.flush()
    assert len(saved) == before


class GatedStore:
    """Writes once the gate is open."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.gate = inner, threading.Event()

    def write(self, name: str, chunks: Chunks) -> None:
        assert self.gate.wait(20)
        self.inner.write(name, chunks)


def test_what_is_saved_is_a_copy_of_the_step_boundary(store: Store, setup: Setup) -> None:
    plan, saved, gated = make_plan(setup), list[SavedShard](), GatedStore(store)
    stage = stage_of(setup, plan)
    expected = {name: value.detach().clone() for name, value in stage.parameters.items()}
    saver = Snapshotter(gated, 1, saved.append)  # type: ignore[arg-type]  # only write is asked of it
    saver.save(stage, assigned(plan))
    with torch.no_grad():
        for parameter in stage.parameters.values():
            parameter.fill_(7.0)  # training goes on
    gated.gate.set()
    saver.flush()
    manifest = manifest_of(setup, store, plan, saved)
    states = read_states(store, manifest, dict.fromkeys(range(manifest.sections), everything))
    tensors = {name: value for state in states.values() for name, value in state.tensors.items()}
    assert all(torch.equal(tensors[f"parameters/{name}"], value) for name, value in expected.items())


def test_a_save_on_top_of_an_unfinished_one_is_skipped_and_says_so(
    store: Store, setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, saved, gated = make_plan(setup), list[SavedShard](), GatedStore(store)
    saver = Snapshotter(gated, 1, saved.append)  # type: ignore[arg-type]
    saver.save(stage_of(setup, plan, next_step=4), assigned(plan))
    saver.save(stage_of(setup, plan, next_step=5), assigned(plan))
    assert (
        "the checkpoint of step 5 is skipped, because the previous one is still being written"
        in capsys.readouterr().err
    )
    assert saver.newest == (assigned(plan).generation, 4), "a run that stops after step 5 has to save it"
    gated.gate.set()
    saver.flush()
    saver.save(stage_of(setup, plan, next_step=6), assigned(plan))
    saver.flush()
    assert {shard.step for shard in saved} == {4, 6}


def test_a_write_that_fails_costs_one_checkpoint_and_is_said(store: Store, setup: Setup) -> None:
    plan, saved, said = make_plan(setup), list[SavedShard](), list[str]()

    class Full:
        full = True

        def write(self, name: str, chunks: Chunks) -> None:
            if self.full:
                self.full = False
                raise ZeroDivisionError("no mistake of the store's")
            store.write(name, chunks)

    saver = Snapshotter(Full(), 1, saved.append, said.append)  # type: ignore[arg-type]
    for step in (4, 5):
        saver.save(stage_of(setup, plan, next_step=step), assigned(plan))
        saver.flush()
    assert len(said) == 1
    assert said[0].startswith(
        "a checkpoint was not saved because of an internal error (please report it): ZeroDivisionError"
    )
    found = [sum(shard.step == step for shard in saved) for step in (4, 5)]
    assert found[0] < found[1], "files that were under way beside the failing one may be reported, the failing one not"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_reserved_before_the_first_save_and_never_for_two(store: Store, precision: Precision) -> None:
    setup = Setup(build=SmallLanguage, precision=precision)
    plan = make_plan(setup)
    stage, saver = stage_of(setup, plan), small(store, [])
    saver.begin(stage, assigned(plan))
    saver.flush()
    parameters = sum(value.nbytes for value in stage.parameters.values())
    reserved = saver._buffer.size_bytes
    assert parameters * 3 <= reserved <= parameters * 3 + 2000  # AdamW's two sums are yet to come
    saver.save(stage, assigned(plan))
    saver.flush()
    assert saver._buffer.size_bytes == reserved


def test_a_folder_that_cannot_be_written_is_found_out_before_training(tmp_path: Path) -> None:
    check_writable(open_store(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        check_writable(open_store(tmp_path / "file" / "below"))


def test_saved_sums_of_other_parameters_are_removed_and_not_gone_on_from(store: Store, setup: Setup) -> None:
    """Every update changes the parameters, so sums from before one are not sums of the step that follows it."""
    plan = make_plan(setup)
    states = initial_states(setup.model, [1], setup.beginning.parameters, setup.job().buffers)
    own = {name: states[1].tensors[f"parameters/{name}"] for name in setup.model.sections[1].parameters}
    file, part = sums_file(1, 0, "0123456789abcdef", 0), SectionSum(section=1, micro_batches=((0, 3),))
    taken = InheritedSum(**part.model_dump(), source_rank=0, file=file)
    rest = StepAssignment(work=((3, 8),), taken=(taken,), kept=(part,))
    given = {"fresh": False, "checkpoint": checkpoint_place(store.url, 4), "rest": rest}
    assignment = assigned(plan).model_copy(update=given)

    def taken_of(parameters: int) -> list[str]:
        label = SumsLabel(job="j", parameters=parameters, sections=9, micro_batch=1, micro_batches=8, sums=part)
        write_sums(store, 4, file, label, {"sums": torch.ones(4)})
        return [at.file for _, at in stored_sums(setup.model, states, assignment, torch.float32)]

    assert taken_of(fingerprint(own, torch.float32)) == [file]
    with pytest.raises(DamagedCheckpoint, match="belongs to another state; it is removed"):
        taken_of(fingerprint(own, torch.float32) + 1)
    assert file not in find_step(store, 4).sizes
