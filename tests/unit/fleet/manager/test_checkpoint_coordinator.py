from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import make_plan, save_parts
from tests.unit.fleet.support import make_job
from varuna.checkpoint.names import checkpoint_place
from varuna.core.errors import CheckpointError, UsageError
from varuna.core.model import JobFacts
from varuna.fleet.manager.checkpoint_coordinator import CheckpointCoordinator, is_within
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import GenerationRecord
from varuna.store.opening import open_store

PLAN = make_plan(1, 2, sections=2)


def job_in(place: str) -> JobFacts:
    return make_job(sections=2).model_copy(update={"checkpoint_dir": place})


def record(generation: int = 0, *, rollback: bool = True) -> GenerationRecord:
    return GenerationRecord(
        generation=generation,
        plan=PLAN,
        members=("w1", "w2"),
        cause="start",
        first_step=0,
        steps_redone=0,
        moved_sections=0,
        rollback=rollback,
    )


def save(keep: CheckpointCoordinator, place: str, step: int, generation: int = 0, parts: slice = slice(None)) -> None:
    for shard in save_parts(open_store(place), step, PLAN, generation)[parts]:
        keep.collect(shard)


def keeper(warnings: list[str], *, new: bool = False, overwrite: bool = False) -> CheckpointCoordinator:
    return CheckpointCoordinator(new=new, overwrite=overwrite, warn=warnings.append)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.nodeid}"


def test_a_job_without_a_directory_has_no_checkpoints() -> None:
    keep = keeper([])
    assert keep.newest(make_job()) is None
    keep.begin_generation(record())
    keep.close()


def test_a_checkpoint_is_found_once_all_its_shards_are_in(place: str) -> None:
    warnings: list[str] = []
    keep, job = keeper(warnings), job_in(place)
    assert keep.newest(job) is None
    keep.begin_generation(record())
    save(keep, place, 5, parts=slice(0, -1))
    assert keep.newest(job) is None
    save(keep, place, 5, parts=slice(-1, None))
    assert keep.newest(job) == Checkpoint(checkpoint_place(place, 5), 5, 1)
    assert warnings == []


def test_survivors_complete_a_checkpoint_after_a_morph(place: str) -> None:
    keep, job = keeper([]), job_in(place)
    keep.newest(job)
    keep.begin_generation(record())
    save(keep, place, 5, parts=slice(0, -1))
    keep.begin_generation(record(1, rollback=False))
    save(keep, place, 5, parts=slice(-1, None))
    found = keep.newest(job)
    assert found is not None
    assert found.step == 5


def test_shards_that_a_dead_manager_heard_of_are_said_again_to_the_next_one(place: str) -> None:
    warnings: list[str] = []
    first, job = keeper(warnings), job_in(place)
    first.newest(job)
    first.begin_generation(record())
    save(first, place, 5)
    save(first, place, 10, parts=slice(0, -1))  # the last report was under way when it died
    first.newest(job)
    first.close()
    second = keeper(warnings)
    second.resume(job, (record(), record(1, rollback=False)))
    for step in (5, 10):  # 5 is complete
        save(second, place, step)
        save(second, place, step)
    found = second.newest(job)
    assert found is not None
    assert found.step == 10
    third = keeper(warnings)
    second.close()
    third.resume(job, (record(), record(1)))
    save(third, place, 15, generation=0)  # before a rollback
    found = third.newest(job)
    assert found is not None
    assert found.step == 10
    assert warnings == []


def test_a_checkpoint_that_cannot_be_committed_is_a_warning(place: str) -> None:
    warnings: list[str] = []
    keep, job = keeper(warnings), job_in(place)
    keep.newest(job)
    keep.begin_generation(record())
    save(keep, place, 5, generation=7)
    assert keep.newest(job) is None
    assert "generation 7 never began" in warnings[0]


def test_a_local_directory_that_the_manager_does_not_share_is_found_out(tmp_path: Path) -> None:
    warnings: list[str] = []
    keep, job = keeper(warnings), job_in(str(tmp_path / "managers"))
    keep.newest(job)
    keep.begin_generation(record())
    save(keep, str(tmp_path / "workers"), 5)
    assert keep.newest(job) is None
    assert "is missing" in warnings[0]
    assert "A local directory must be shared by all machines" in warnings[0]


def test_a_new_run_moves_old_checkpoints_aside_only_if_told(place: str) -> None:
    keep, job = keeper([]), job_in(place)
    keep.newest(job)
    keep.begin_generation(record())
    save(keep, place, 5)
    keep.close()
    with pytest.raises(CheckpointError, match="--new --overwrite"):
        keeper([], new=True).newest(job)
    fresh = keeper([], new=True, overwrite=True)
    assert fresh.newest(job) is None
    fresh.begin_generation(record())
    save(fresh, place, 2)
    found = fresh.newest(job)  # a rollback of the new run finds the new run's own
    assert found is not None
    assert found.step == 2


def test_a_full_disk_is_said_now_and_then_until_a_checkpoint_is_complete_again(place: str) -> None:
    warnings: list[str] = []
    now_s = 1000.0
    keep = CheckpointCoordinator(new=False, overwrite=False, warn=warnings.append, clock_s=lambda: now_s)
    job = job_in(place)
    keep.newest(job)
    keep.begin_generation(record())
    for step in (5, 10):
        for worker in ("w1", "w2"):
            keep.tell_missing_shard(worker, f"cannot write {step}: No space left on device.")
    assert warnings == [
        "worker w1 did not save its part of a checkpoint: cannot write 5: No space left on device. "
        "There is no complete checkpoint."
    ]
    now_s += 299.0
    keep.tell_missing_shard("w1", "cannot write 11")
    now_s += 2.0
    keep.tell_missing_shard("w1", "cannot write 12")
    keep.tell_missing_shard("w2", "cannot write 12")
    assert warnings[1:] == [
        "worker w1 did not save its part of a checkpoint: cannot write 12. There is no complete checkpoint. None was "
        "complete in the last 5m 01s."
    ]
    save(keep, place, 15)
    assert keep.newest(job) == Checkpoint(checkpoint_place(place, 15), 15, 1)
    keep.tell_missing_shard("w2", "cannot write 20")
    assert warnings[2:] == [
        "worker w2 did not save its part of a checkpoint: cannot write 20. "
        "The newest complete checkpoint is that of step 15."
    ]


def test_where_a_part_finds_no_room_what_should_have_gone_before_is_removed(place: str) -> None:
    keep, job = keeper([]), job_in(place)
    keep.newest(job)
    keep.begin_generation(record())
    save(keep, place, 5)
    keep.newest(job)
    store = open_store(place)
    save_parts(store, 3, PLAN, 0)  # written by one that took its time, or not removed after step 5
    keep.tell_missing_shard("w1", "cannot write 10: No space left on device.")
    keep.close()
    assert [folder for folder in store.folders() if folder.startswith("step-")] == ["step-00000005"]


@pytest.mark.parametrize(("steps", "said"), [(0, False), (15, False), (16, True)])
def test_a_run_whose_end_is_in_no_checkpoint_says_so(place: str, steps: int, said: bool) -> None:
    warnings: list[str] = []
    keep = keeper(warnings)
    keep.newest(job_in(place))
    keep.begin_generation(record())
    if steps:
        save(keep, place, 15)
    keep.close()
    missing = keep.account(steps)
    assert (missing is not None) == said
    assert (
        missing is None
        or "the run ended after step 15. The newest complete checkpoint is that of step 15. Look" in missing
    )
    assert not warnings


@pytest.mark.parametrize(
    ("place", "allowed", "expected"),
    [
        ("/srv/c", "/srv/c", True),
        ("/srv/c/run-1", "/srv/c/", True),
        ("/srv/c/../.ssh", "/srv/c", False),
        ("/srv/cc", "/srv/c", False),
        ("s3://b/c/run", "s3://b/c", True),
        ("s3://b/cc", "s3://b/c", False),
        ("s3://b/c/../d", "s3://b/c", False),
        ("s3://other/c", "s3://b/c", False),
        ("/srv/c", "s3://b/c", False),
    ],
)
def test_a_job_stays_within_what_the_manager_allows(place: str, allowed: str, expected: bool) -> None:
    assert is_within(place, allowed) is expected


@pytest.mark.parametrize("place", ["s3://b/c/%2e%2e/d", "file:///srv/c/%2e%2e/d", "file:///srv/c/../d"])
def test_no_spelling_of_a_url_leads_out_of_what_the_manager_allows(place: str) -> None:
    for allowed in ("s3://b/c", "file:///srv/c", "/srv/c"):
        keep = CheckpointCoordinator(new=False, overwrite=False, warn=print, allowed=allowed)
        with pytest.raises((CheckpointError, UsageError)):
            keep.newest(job_in(place))


def test_a_place_that_is_allowed_may_be_spelled_as_a_url(tmp_path: Path) -> None:
    keep = CheckpointCoordinator(new=False, overwrite=False, warn=print, allowed=tmp_path.as_uri())
    assert keep.newest(job_in(str(tmp_path / "run"))) is None
    keep.close()
    with pytest.raises(UsageError, match="is not a place"):
        CheckpointCoordinator(new=False, overwrite=False, warn=print, allowed="s3://b/c%20d")


def test_the_first_machine_does_not_choose_where_the_manager_writes(tmp_path: Path) -> None:
    keep = CheckpointCoordinator(new=False, overwrite=False, warn=lambda text: None, allowed=str(tmp_path / "here"))
    with pytest.raises(CheckpointError, match="--checkpoints"):
        keep.newest(job_in(str(tmp_path / "elsewhere")))
    assert not (tmp_path / "elsewhere").exists()
    assert keep.newest(job_in(str(tmp_path / "here" / "run"))) is None
    keep.close()


def test_a_configuration_of_another_program_is_never_replaced_and_our_own_is(tmp_path: Path) -> None:
    """Think of a job whose checkpoint_dir is ~/.docker."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text("{another program's}")
    for place, expected in ((foreign, "{another program's}"), (tmp_path / "own", "second")):
        for config in ("first", "second"):  # also by the next run, when the folder looks like one of ours
            warnings: list[str] = []
            keep = keeper(warnings)
            keep.newest(job_in(str(place)).model_copy(update={"config": config}))
            keep.close()
            assert ["is left unchanged" in text for text in warnings] == [True] * (place == foreign)
        assert (place / "config.json").read_text() == expected


@pytest.mark.parametrize("rescues", [False, True])
def test_each_checkpoint_is_told_and_one_that_rescues_a_run_is_no_news_for_people(place: str, *, rescues: bool) -> None:
    completed, committed = list[int](), list[int]()
    keep = CheckpointCoordinator(
        new=False, overwrite=False, warn=print, committed=committed.append, completed=completed.append
    )
    assert keep.newest(job_in(place).model_copy(update={"rescues": rescues})) is None
    keep.begin_generation(record())
    save(keep, place, 3)
    keep.close()
    assert completed == [3]
    assert committed == ([] if rescues else [3])
