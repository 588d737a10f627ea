"""Without a manager: one process or torchrun's world agree on the job and on what to resume."""

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.saves import make_plan as make_small_plan
from tests.unit.checkpoint.saves import save_parts
from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup
from tests.unit.fleet.support import make_job, make_plan
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.checkpoint.manifest import survey
from varuna.checkpoint.names import checkpoint_place, step_folder
from varuna.core.devices import DeviceFacts, WorkerGroups, equal_workers, reserved_bytes
from varuna.core.errors import CheckpointError, FleetError, NoPlanError, UsageError
from varuna.core.messages import Assign, Assignment, Beat, Finish
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.data.digests import sample_digest
from varuna.engine.base.transport import local_store
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.membership.detect import solo_from_environment
from varuna.membership.static import StaticMembership, World, world_from_environment
from varuna.planner.choose import plan_run
from varuna.store.opening import open_store
from varuna.testing.threads import run_all

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "VARUNA_STAGES", "VARUNA_MEMORY_PER_WORKER", "VARUNA_NEW"):
        monkeypatch.delenv(name, raising=False)


def members(size: int, **changes: Any) -> list[StaticMembership]:
    store = local_store()
    return [StaticMembership(World(rank, size, store, "127.0.0.1", 1), make_plan, **changes) for rank in range(size)]


def join(solo: StaticMembership, job: JobFacts, device: DeviceFacts | None = None) -> None:
    def never(*what: object) -> None:
        pytest.fail("nobody holds or pauses a solo run")

    solo.join(job, device=device, beat=lambda: Beat(generation=0, step=0, activity=""), on_hold=never, on_flag=never)


def assignments(solos: list[StaticMembership], job: JobFacts) -> list[Assignment]:
    found: dict[int, Assignment] = {}

    def work(solo: StaticMembership) -> None:
        join(solo, job)
        directive = solo.next_directive()
        assert isinstance(directive, Assign)
        found[solo.world.rank] = directive.assignment

    run_all([partial(work, solo) for solo in solos])
    return [found[rank] for rank in range(len(solos))]


def job_in(directory: Path, **changes: Any) -> JobFacts:
    return make_job(**changes).model_copy(update={"checkpoint_dir": str(directory)})


def save(directory: Path, solo: StaticMembership, step: int, *, generation: int = 0, sections: int = 4) -> None:
    for shard in save_parts(open_store(directory), step, one_replica(), generation):
        if shard.section < sections:
            solo.saved(shard)
    if solo._keeper is not None:
        solo._keeper.wait_until_settled()


def one_replica() -> Plan:
    return make_small_plan(1, 1, sections=4)


def committed_steps(directory: Path) -> list[int]:
    return [folder.step for folder in survey(open_store(directory)) if folder.is_committed]


# -- the environment ---------------------------------------------------------------------------------------


def test_a_plain_process_is_a_world_of_one() -> None:
    world = world_from_environment()
    assert (world.rank, world.size) == (0, 1)


def test_each_job_of_a_process_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in zip(TORCHRUN, ("0", "1", "127.0.0.1", str(port)), strict=True):
        monkeypatch.setenv(name, value)
    first = world_from_environment()
    first.store.set("job", "of the first Trainer")
    second = world_from_environment()  # the port is taken: by ourselves
    assert not second.store.check(["job"])
    second.store.set("job", "of the second")
    assert first.store.get("job") == b"of the first Trainer"


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_of_torchrun_is_refused_with_the_missing_name(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in zip(TORCHRUN, ("0", "2", "127.0.0.1", "1"), strict=True):
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(FleetError, match=rf"environment is incomplete: '{missing}'\. Start with torchrun, or unset"):
        world_from_environment()


@pytest.mark.parametrize("odd", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_an_environment_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    for name, value in zip(TORCHRUN, ("0", "2", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, "x7" if name == odd else value)
    with pytest.raises(FleetError, match="x7"):
        world_from_environment()


@pytest.mark.parametrize("stages", ["0", "-1", "two", "1.5"])
def test_a_depth_that_is_no_number_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, stages: str) -> None:
    monkeypatch.setenv("VARUNA_STAGES", stages)
    with pytest.raises(UsageError, match=f"VARUNA_STAGES={stages}"):
        solo_from_environment()


# -- one job, one assignment -------------------------------------------------------------------------------


def test_each_rank_gets_the_same_assignment_but_for_its_rank_and_then_the_end() -> None:
    solos = members(4)
    found = assignments(solos, make_job())
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert {each.model_copy(update={"rank": 0}) for each in found} == {found[0]}
    assert found[0].fresh
    assert found[0].members == 4
    assert all(isinstance(solo.next_directive(), Finish) for solo in solos)


@pytest.mark.parametrize("apart", [True, False])
def test_rank_0_plans_for_the_memory_that_all_devices_have_for_each(apart: bool) -> None:
    """Three of them on two GPUs; what one of them has does not make their jobs differ."""
    store, seen = local_store(), list[WorkerGroups]()

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        seen.append(workers)
        return make_plan(job, workers, micro_batch)

    def work(rank: int) -> None:
        solo = StaticMembership(World(rank, 3, store, "127.0.0.1", 1), plan)
        gpu = DeviceFacts(name=f"gpu{rank % 2}", memory_bytes=64 * 2**30)
        join(solo, make_job().model_copy(update={"memory_apart": apart}), gpu if apart else None)
        solo.next_directive()

    run_all([partial(work, rank) for rank in range(3)])
    expected = 32 * 2**30 - reserved_bytes(32 * 2**30) if apart else None
    assert seen == [equal_workers(3, expected)]


def test_rank_0_plans_from_what_it_measured_and_the_others_follow() -> None:
    store, job = local_store(), make_job()
    known = Calibrations.of_one(nominal_calibration(job.model))

    def from_known(calibrations: Calibrations) -> Any:
        assert calibrations == known
        return lambda job, workers, micro_batch: make_plan(job, workers, 4)

    def alone(*_: object) -> Plan:
        pytest.fail("rank 0 knows better")

    solos = [StaticMembership(World(rank, 2, store, "127.0.0.1", 1), alone, plans_from=from_known) for rank in range(2)]
    assert [solo.measures for solo in solos] == [True, False]
    solos[0].offer_calibrations(known.model_dump_json())
    assert [assignment.plan.micro_batch for assignment in assignments(solos, job)] == [4, 4]


def test_a_plan_that_rank_0_cannot_make_is_refused_on_all_ranks() -> None:
    store = local_store()

    def refused(*_: object) -> Plan:
        raise NoPlanError("no plan fits: the reason")

    solos = [StaticMembership(World(rank, 2, store, "127.0.0.1", 1), refused) for rank in range(2)]

    def work(solo: StaticMembership) -> None:
        join(solo, make_job())
        with pytest.raises(NoPlanError, match="no plan fits: the reason"):
            solo.next_directive()

    run_all([partial(work, solo) for solo in solos])


def test_a_rank_that_never_joins_is_waited_for_aloud_and_with_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    world = World(0, 2, local_store(), "127.0.0.1", 1)
    alone = StaticMembership(world, make_plan, join_bound_s=0.5, said_after_s=0.0)
    join(alone, make_job())
    with pytest.raises(FleetError, match=r"not all of 2 ranks have captured .*waited \d s for rank 1 to capture"):
        alone.next_directive()
    assert "varuna: rank 0 has waited 0 s for rank 1 to capture the model" in capsys.readouterr().err


def test_rank_0_is_waited_for_longer_than_its_store_would_wait() -> None:
    first, second = members(2)
    first.world.store.set_timeout(timedelta(seconds=0.05))
    threading.Timer(0.2, join, (first, make_job())).start()
    join(second, make_job())


def test_rank_0_is_named_by_who_waits_for_it() -> None:
    with pytest.raises(FleetError, match=r"rank 1 waited for rank 0, .* within 0 s that it has captured the model"):
        join(members(2, join_bound_s=0.02)[1], make_job())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (make_job(seed=1), "its job.seed is 1, but the run's is 0"),
        (make_job(steps=7), "its job.steps is 7"),
        (make_job(sections=3), "its job.model.sections is"),
        (make_job(micro_batch=1), "its job.micro_batch is 1"),
        (make_job().model_copy(update={"first_samples": "7f"}), r"other samples .* goes through a set.*PYTHONHASHSEED"),
    ],
)
def test_ranks_with_different_jobs_are_refused_by_rank_and_field(other: JobFacts, words: str) -> None:
    first, second = members(2)
    join(first, make_job())
    with pytest.raises(FleetError, match=f"rank 1 runs a different job than rank 0: .*{words}"):
        join(second, other)


def test_ranks_that_round_the_first_samples_differently_run_the_same_job() -> None:
    first, second = members(2)
    x = torch.linspace(-1, 1, 99)
    digests = [sample_digest({"x": x}), sample_digest({"x": x + 3e-4 * x.cos()})]
    assert digests[0] != digests[1]
    for rank, digest in zip((first, second), digests, strict=True):
        join(rank, make_job().model_copy(update={"first_samples": f"{digest:x}"}))


# -- resuming ----------------------------------------------------------------------------------------------


def test_an_empty_folder_starts_fresh(tmp_path: Path) -> None:
    [found] = assignments(members(1), job_in(tmp_path))
    assert (found.fresh, found.next_step, found.checkpoint, found.generation) == (True, 0, None, 0)


def test_a_run_resumes_from_the_newest_complete_checkpoint_on_every_rank(tmp_path: Path) -> None:
    [solo] = members(1)
    assignments([solo], job_in(tmp_path))
    save(tmp_path, solo, 4)
    save(tmp_path, solo, 8)
    save(tmp_path, solo, 12, sections=3)  # incomplete: the process died meanwhile
    for found in assignments(members(3), job_in(tmp_path)):
        assert (found.fresh, found.next_step, found.generation) == (False, 8, 1)
        assert found.checkpoint == checkpoint_place(str(tmp_path), 8)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [solo] = members(1)
    assignments([solo], job_in(tmp_path))
    save(tmp_path, solo, 4)
    save(tmp_path, solo, 8)
    file = next((tmp_path / step_folder(8)).glob("section-002.*"))
    file.write_bytes(file.read_bytes()[:-1])
    [found] = assignments(members(1), job_in(tmp_path))
    assert found.next_step == 4
    said = capsys.readouterr().err
    assert "the checkpoint of step 8 cannot be used" in said
    assert "resuming" in said


def test_the_micro_batch_of_the_run_is_kept_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    [solo] = members(1)
    assignments([solo], job_in(tmp_path, micro_batch=4))
    save(tmp_path, solo, 4)
    [kept] = assignments(members(1), job_in(tmp_path))
    assert kept.plan.micro_batch == 4
    [told] = assignments(members(1), job_in(tmp_path, micro_batch=8))
    assert told.plan.micro_batch == 8


def saved_run(tmp_path: Path) -> None:
    [solo] = members(1)
    assignments([solo], job_in(tmp_path))
    save(tmp_path, solo, 4)


def test_a_checkpoint_of_another_job_is_refused_on_every_rank_with_the_same_text(tmp_path: Path) -> None:
    saved_run(tmp_path)
    job, texts = job_in(tmp_path, seed=5), list[str]()

    def work(solo: StaticMembership) -> None:
        join(solo, job)
        with pytest.raises(CheckpointError, match="seed was 0, is now 5") as refused:
            solo.next_directive()
        texts.append(str(refused.value))

    run_all([partial(work, solo) for solo in members(3)])
    assert len(set(texts)) == 1


def test_new_is_refused_where_checkpoints_are_and_nothing_is_touched(tmp_path: Path) -> None:
    saved_run(tmp_path)
    [solo] = members(1, new=True)
    join(solo, job_in(tmp_path))
    with pytest.raises(CheckpointError, match="--new --overwrite"):
        solo.next_directive()
    [found] = assignments(members(1), job_in(tmp_path))
    assert found.next_step == 4


def test_new_in_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    [found] = assignments(members(1, new=True), job_in(tmp_path))
    assert found.fresh


def test_overwrite_moves_old_checkpoints_aside_and_starts_fresh(tmp_path: Path) -> None:
    saved_run(tmp_path)
    for found in assignments(members(2, new=True, overwrite=True), job_in(tmp_path)):
        assert (found.fresh, found.checkpoint) == (True, None)
    assert committed_steps(tmp_path / "replaced-1") == [4]


# -- the last checkpoint -----------------------------------------------------------------------------------


def test_rank_0_commits_what_other_ranks_report(tmp_path: Path) -> None:
    solos = members(2)
    assignments(solos, job_in(tmp_path))
    for shard in save_parts(open_store(tmp_path), 6, one_replica())[::-1]:
        solos[shard.section % 2].saved(shard)
    solos[0].leaving(6)
    assert committed_steps(tmp_path) == [6]


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(build=SmallLanguage)


def alone(setup: Setup, directory: Path, steps: int, *, stop_behind: int | None = None, every: int = 100) -> list[int]:
    """A run of one process with checkpoints; the steps that it ran."""
    setup.directory = str(directory)
    store = local_store()

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, micro_batch=micro_batch)

    solo = StaticMembership(World(0, 1, store, "127.0.0.1", 0), plan)
    session = setup.session(solo, store, steps, saver=Snapshotter(open_store(directory), every, solo.saved))
    done: list[int] = []

    def run() -> None:
        for committed in session.steps():
            done.append(committed.step)
            if committed.step == stop_behind:
                session.stop()

    run_all([run], bound_s=30)
    return done


@pytest.mark.parametrize("every", [1, 100])
def test_a_finished_run_ends_with_a_checkpoint_of_its_last_step_and_again_at_once(
    tmp_path: Path, setup: Setup, every: int
) -> None:
    assert alone(setup, tmp_path, 6, every=every) == list(range(6))
    assert committed_steps(tmp_path)[0] == 6
    assert alone(setup, tmp_path, 6, every=every) == []
    assert alone(setup, tmp_path, 8, every=every) == [6, 7]


def test_leaving_the_loop_early_saves_what_was_done(tmp_path: Path, setup: Setup) -> None:
    assert alone(setup, tmp_path, 9, stop_behind=3) == [0, 1, 2, 3]
    assert committed_steps(tmp_path) == [4]
    assert alone(setup, tmp_path, 6) == [4, 5]


def test_a_run_of_no_steps_waits_for_no_checkpoint(tmp_path: Path, setup: Setup) -> None:
    assert alone(setup, tmp_path, 0) == []


class Refused(Setup):
    """Its first model is no good."""

    def initial(self, rank: int, names: Sequence[str]) -> Any:
        raise UsageError("the model is not what was captured")


def test_an_error_in_the_first_model_reaches_the_training_thread() -> None:
    [solo] = members(1)
    session = Refused(build=SmallLanguage).session(solo, solo.world.store, 2)
    outcome: list[str] = []
    advance: Callable[[], object] = lambda: list(session.steps())  # noqa: E731

    def run() -> None:
        with pytest.raises(UsageError) as refused:
            advance()
        outcome.append(str(refused.value))

    run_all([run], bound_s=20)
    assert outcome == ["the model is not what was captured"]
