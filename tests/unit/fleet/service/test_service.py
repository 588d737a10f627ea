"""A manager as a process: built of parts in order, and taken apart again whatever fails."""

from pathlib import Path

import pytest

from tests.unit.fleet.support import make_plan
from varuna.core.errors import FleetError
from varuna.fleet.manager.mailbox import Leave
from varuna.fleet.run_folder.connection_file import find
from varuna.fleet.service.cluster_workers import ClusterLaunch, ClusterWorkers
from varuna.fleet.service.local_workers import LocalLaunch, LocalWorkers
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.run_events import Notice, RunEvent


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
