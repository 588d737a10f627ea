"""A run without a manager is shown from its folder, and nothing of it can be changed."""

import math
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.fleet.support import Driver, two_stages
from varuna.core.errors import UsageError
from varuna.fleet.manager.kept_run import KeptRun, kept_api
from varuna.fleet.page.live_feed import LiveFeed
from varuna.fleet.page.logins import Logins
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.run_folder.past_events import PastStep, events_and_steps
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.outputs import Publish
from varuna.fleet.state.run_events import Priced, RunEnded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one after the other; the newest lost a worker, and has ended."""
    folder = tmp_path_factory.mktemp("run")
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
    driver.begin(0, 1)
    driver.kill("w3")
    driver.all_held(2)
    driver.voted(2)
    journal = Journal(folder, None)
    for run in ("old", "new"):
        journal.begin_run(run)
        journal.append(Priced(per_hour=3600.0, on_demand_per_hour=7200.0))
        for done in driver.done:
            if isinstance(done, Publish):
                journal.append(done.event)
    journal.append(RunEnded(exit_code=1, text="w0 failed", worker="w0"))
    journal.close()
    (folder / "w0.log").write_text("the last words of w0\n")
    return folder


def test_the_journal_is_read_as_it_was_written(folder: Path) -> None:
    found = list(events_and_steps(folder))
    steps = [event for _, event in found if isinstance(event, PastStep)]
    assert [step.step for step in steps] == [0, 1, 2]  # of the newest run alone
    assert all(math.isfinite(step.loss) and step.time_s > 1e9 for step in steps)
    assert found[-1][1] == RunEnded(exit_code=1, text="w0 failed", worker="w0")
    with pytest.raises(UsageError, match="there is no run in"):
        list(events_and_steps(folder / "nowhere"))


def test_what_the_run_has_cost_follows_from_its_folder(folder: Path) -> None:
    events = [(time_s, event) for time_s, event in events_and_steps(folder) if not isinstance(event, PastStep)]
    here, spent, before_s = 0, 0.0, events[0][0]
    for time_s, event in events:
        spent += here * (time_s - before_s)
        before_s = time_s
        here += (event.kind == "worker_joined") - (event.kind == "worker_lost")
    assert here == 3
    cost = KeptRun(folder).status()["cost"]
    assert isinstance(cost, dict)
    assert cost["spent"] == pytest.approx(spent, abs=1e-3)
    assert (cost["per_hour"], cost["on_demand"] > 0) == (0.0, True)


def test_readers_see_the_end_and_nobody_can_change_anything(folder: Path) -> None:
    kept, logins = KeptRun(folder), Logins()
    feed = LiveFeed(kept.chronicle, kept.status)
    assert kept.has_ended
    with TestClient(Starlette(routes=kept_api(kept, feed, logins).routes())) as client:
        session = client.post("/login", json={"code": logins.invite()}).json()["session"]
        reader = {"Authorization": f"Bearer {session}"}
        status = client.get("/status", headers=reader).json()
        assert (status["state"], status["read_only"]) == ("ended with exit code 1", True)
        assert (status["plan"]["shape"], status["plan"]["depths"], len(status["members"])) == ("2x1", [2], 3)
        assert client.get("/logs/w0", headers=reader).text == "the last words of w0\n"
        assert client.get("/status").status_code == 401
        for path in ("stop", "morph", "drain", "checkpoint", "links"):
            for headers in (reader, {"Authorization": "Bearer "}, {}):
                assert client.post(f"/{path}", headers=headers, json={}).status_code == 401
        feed.closing = True  # so that the stream ends
        assert client.get("/events", headers=reader).status_code == 503
    _, whole = kept.chronicle.describe()
    assert whole["ended"] is not None
