"""A manager as a process: built of parts in order, and taken apart again whatever fails."""

from pathlib import Path

import pytest
from pydantic import Field, TypeAdapter

from tests.unit.fleet.support import Driver, make_job, make_plan
from varuna.checkpoint.lease import LeaseOwner, process_scope, process_started
from varuna.core.errors import CheckpointError, FleetError, UsageError
from varuna.core.value import Value
from varuna.core.version import __version__
from varuna.fleet.manager.mailbox import Leave
from varuna.fleet.net.protocol import schema_digest, wire_digest
from varuna.fleet.run_folder.connection_file import find
from varuna.fleet.run_folder.join_file import keep_join
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.service.cluster_workers import ClusterLaunch, ClusterWorkers
from varuna.fleet.service.local_workers import LocalLaunch, LocalWorkers
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.run_events import Notice, RunEnded, RunEvent
from varuna.process import file_lock
from varuna.store.folder import FolderStore


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))


def local(folder: Path, port: int = 0) -> ManagerService[LocalWorkers]:
    place = ServiceConfig(run_dir=folder, port=port)
    return ManagerService(place, LocalLaunch(Path(__file__)), config=FleetConfig(workers=1), planner=make_plan)


@pytest.mark.nightly
def test_what_was_built_before_a_part_that_fails_is_given_back(tmp_path: Path) -> None:
    first = local(tmp_path / "first")
    with pytest.raises(FleetError, match=f"port {first.port} on 127.0.0.1 cannot be used"):
        local(tmp_path / "second", first.port)
    second = local(tmp_path / "second")  # nobody owns its folder any more
    for service in (first, second):
        service.stop("enough", 0)
        ended = service.manage()
        assert ended is not None
        assert ended.exit_code == 0


def test_a_manager_that_leaves_a_cluster_gives_its_folder_and_its_tokens_to_the_next(tmp_path: Path) -> None:
    seen: list[RunEvent] = []

    def manager() -> ManagerService[ClusterWorkers]:
        config = FleetConfig(workers=1, elastic=True)
        place = ServiceConfig(run_dir=tmp_path / "run")
        return ManagerService(place, ClusterLaunch(), config=config, planner=make_plan, on_event=seen.append)

    tokens = set()
    for _ in range(2):
        service = manager()
        tokens.add(find(tmp_path / "run")[1].token)
        service.mailbox.post(Leave())
        assert service.manage() is None
    assert len(tokens) == 1
    said = [event.text for event in seen if isinstance(event, Notice)]
    assert len(said) == 4
    assert all(text.startswith("manager at 127.0.0.1:") for text in said[::2])
    assert all(text.startswith("page at https://127.0.0.1:") for text in said[1::2])


@pytest.mark.parametrize(
    ("version", "wire", "named"), [("0.0.9", "", "0.1.0: "), (__version__, "ab", "another source of")]
)
def test_a_run_that_goes_on_is_left_to_the_varuna_that_it_began_with(
    version: str, wire: str, named: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    journal = Journal(folder, None)
    journal.begin_run("run-1")
    journal.keep_job(Driver(FleetConfig(workers=1)).job, version, wire or wire_digest())

    def manager() -> ManagerService[ClusterWorkers]:
        config = FleetConfig(workers=1, elastic=True)
        return ManagerService(ServiceConfig(run_dir=folder), ClusterLaunch(), config=config, planner=make_plan)

    with pytest.raises(UsageError, match=rf"goes on with Varuna {version}, and this is {named}.*`varuna stop`"):
        manager()
    assert not {"access.json", "tls"} & {path.name for path in folder.iterdir()}, "nothing was opened"
    journal.append(RunEnded(exit_code=0, text="done"))
    journal.close()
    service = manager()  # what has ended is of any version
    service.mailbox.post(Leave())
    assert service.manage() is None


def test_words_for_people_are_no_other_wire() -> None:
    class One(Value):
        number: int = Field(description="of sheep")

    class Same(Value):
        number: int = Field(description="of goats")

    class Other(Value):
        number: int
        more: int

    described = schema_digest(TypeAdapter(One))
    assert described == schema_digest(TypeAdapter(Same))
    assert described != schema_digest(TypeAdapter(Other))


def test_what_is_saved_of_a_model_in_a_folder_that_all_may_read_is_for_its_owner_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    service = local(tmp_path)
    assert (tmp_path / "rescue").stat().st_mode & 0o077 == 0
    service.stop("enough", 0)
    service.manage()
    assert not (tmp_path / "rescue").exists()


def test_a_second_manager_that_nobody_locked_out_and_that_gets_no_checkpoints_leaves_the_way_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS with ``nolock``, from another machine."""
    monkeypatch.setattr(file_lock, "locked", lambda descriptor: True)
    folder = tmp_path / "run"

    def manager() -> ManagerService[ClusterWorkers]:
        config = FleetConfig(workers=1, elastic=True)
        return ManagerService(ServiceConfig(run_dir=folder), ClusterLaunch(), config=config, planner=make_plan)

    first = manager()
    keep_join(folder, str(first.workers.invite()))
    ways = [(folder / name).read_bytes() for name in ("access.json", "join")]
    second = manager()
    assert find(folder)[1].port == second.port
    checkpoints = FolderStore(tmp_path / "checkpoints")
    owner = LeaseOwner(writer="w", host="h", machine=process_scope(), pid=1, started=process_started("1"))
    checkpoints.put("lease/000001.json", owner.model_dump_json().encode())
    with pytest.raises(CheckpointError, match="another run, process 1 on h, saves its checkpoints"):
        second._keeper.newest(make_job().model_copy(update={"checkpoint_dir": checkpoints.url}))
    second.mailbox.post(Leave())
    assert second.manage() is None
    assert [(folder / name).read_bytes() for name in ("access.json", "join")] == ways
    first.mailbox.post(Leave())
    first.manage()
