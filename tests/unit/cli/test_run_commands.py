"""The verbs, against a server that answers as a manager does, and against runs that are over."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from tests.unit.fleet.run_folder.test_past_events import spoil_steps
from tests.unit.fleet.support import Driver, two_stages
from varuna.cli import main as cli
from varuna.core.messages import Beat
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.net.serving import Serving
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.page.status import describe
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.connection_file import Access, publish_access
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import DrainRequested, Event, FinishRequested, MorphRequested
from varuna.fleet.state.outputs import Publish
from varuna.fleet.state.run_events import RunEnded
from varuna.process.file_lock import own

pytestmark = pytest.mark.timeout(30)


class RunningManager:
    """A run's folder and its manager's API; two workers, of which one was lost."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
        driver.begin(0, 1)
        driver.kill("w3")
        driver.all_held(2)
        driver.voted(2)
        self.driver = driver
        self.chronicle = Chronicle()
        (folder / "logs").mkdir()
        (folder / "logs" / "w3.log").write_text("the last words of w3\n")
        (folder / "logs" / f"{driver.fleet.members[1]}.log").write_text("what rank 1 said\n")
        self.journal = Journal(folder, None)
        for done in driver.done:
            if isinstance(done, Publish):
                self.journal.append(done.event)
                self.chronicle.add_event(done.event, 1e9)
        people = OperatorApi(
            status=lambda: {**describe(driver.fleet, 0.0), **self.chronicle.newest(20, 1e9)},
            logs=folder / "logs",
            ask=self.ask,
            audit=Audit(lambda event: None),
            mint=lambda uses, life_s: f"varuna://for-{uses}-of-{life_s:.0f}",
            operator_token="operator",
        )
        self.serving = Serving(port=0, max_frame_bytes=1000)
        self.serving.start(Starlette(routes=people.routes()))
        self.publish("operator")

    def ask(self, event: Event) -> bool:
        self.events.append(event)
        return True

    def publish(self, token: str) -> None:
        publish_access(self.folder, Access(host="127.0.0.1", port=self.serving.port, certificate_pem=None, token=token))


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningManager]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("VARUNA_RUN", raising=False)
    (tmp_path / "run").mkdir()
    manager = RunningManager(tmp_path / "run")
    yield manager
    manager.serving.stop()
    manager.journal.close()


class Shell:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> None:
        self.monkeypatch, self.capture = monkeypatch, capsysbinary

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["varuna", *arguments])
        with pytest.raises(SystemExit) as leave:
            sys.exit(cli.main())
        out, err = self.capture.readouterr()
        assert b"Traceback" not in err
        return int(leave.value.code or 0), out.decode(), err.decode()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> Shell:
    return Shell(monkeypatch, capsysbinary)


def test_status_shows_plan_workers_generations_and_the_first_failure(manager: RunningManager, shell: Shell) -> None:
    code, out, _ = shell("status")
    assert code == 0
    for said in ("training", "step 3/100", "plan 2x1", "generation 1", "w0", "first failure  worker w3 killed by"):
        assert said in out
    assert "one copy of each section: if a worker is lost, the run goes back to" in " ".join(out.split())
    code, out, _ = shell("status", "--json")
    assert (code, json.loads(out)["generation"]) == (0, 1)


def test_a_check_says_one_line_and_its_exit_code_how_the_run_is(manager: RunningManager, shell: Shell) -> None:
    assert shell("status", "--check") == (0, "training, step 3 of 100\n", "")
    code, out, _ = shell("status", "--check", "--checkpoint-age", "60")
    assert (code, out.split(":")[0].split(" for ")[0]) == (2, "no new checkpoint")
    fleet = manager.driver.fleet  # the manager's clock says 0
    manager.driver.fleet = replace(fleet, recorded=replace(fleet.recorded, at_s=-400.0))
    code, out, _ = shell("status", "--check")
    assert (code, out[:28]) == (1, "no step for 6m 40s: nothing ")
    assert shell("status", "--check", "--for", "500")[0] == 0
    assert shell("status")[1].splitlines()[0].startswith("no step for 6m 40s: nothing ")
    manager.serving.stop()
    code, out, _ = shell("status", "--check")
    assert (code, out.split(":")[0], "It knew of step 3 " in out) == (3, "the manager is away", True)
    manager.journal.append(RunEnded(exit_code=1, text="it broke\nTraceback"))
    assert shell("status", "--check")[:2] == (
        1,
        f"the run in {manager.folder} has ended with exit code 1: it broke\n",
    )
    assert shell("status", "--check", "--json")[0] == 2


def test_doctor_finds_no_fault_in_a_run_that_lost_a_worker(
    manager: RunningManager, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The manager's process is this one: sockets that other tests leave open for a moment are not this run's.
    monkeypatch.setattr("varuna.fleet.net.listening_sockets.family_of", lambda pid: set())
    code, out, _ = shell("doctor", "--run", str(manager.folder), "--json")
    found = json.loads(out)
    faults = [finding["text"] for finding in found["findings"] if finding["level"] == "fault"]
    assert (code, found["healthy"], faults) == (0, True, [])
    assert "3 steps" in next(f["text"] for f in found["findings"] if f["subject"] == "ledger")
    manager.serving.stop()
    code, out, _ = shell("doctor", "--run", str(manager.folder))
    assert code == 1
    assert "fault" in out
    manager.journal.append(RunEnded(exit_code=0, text="3 steps done"))
    code, out, _ = shell("doctor", "--run", str(manager.folder))
    assert code == 0
    assert "has ended in order: 3 steps done" in out


def test_long_activities_leave_names_readable(
    manager: RunningManager, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    activity = "waits for activations of micro-batch 3 of step 17 from rank 0 (stage 0), 1.2 s so far"
    for name in ("w0", "w1"):
        manager.driver.say(name, Beat(generation=1, step=3, activity=activity))
    _, out, _ = shell("status")
    assert "   0  w0      local  joined  waits for activations" in out
    assert max(len(line) for line in out.splitlines()) <= 60


HOSTILE = "opens /data/[/x] x[i]\x1b]0;mine\x07\x1b[2J"


def test_status_shows_what_a_machine_says_as_text(manager: RunningManager, shell: Shell) -> None:
    manager.driver.say("w0", Beat(generation=1, step=3, activity=HOSTILE))
    manager.chronicle.failures[0]["cause"] = HOSTILE
    code, out, _ = shell("status")
    assert (code, out.count("opens /data/[/x] x[i]"), "\x1b" in out) == (0, 2, False)


def test_logs_keep_lines_and_progress_bars_and_nothing_else_that_a_terminal_obeys(
    manager: RunningManager, shell: Shell
) -> None:
    text = "50 %\rä \x1b[31mred\x1b[0m\x1b]52;c;AAAA\x07\x9b\tend\n"
    (manager.folder / "logs" / "w3.log").write_text(text)
    shown = "50 %\rä red\tend\n"
    assert shell("logs", "--worker", "w3")[1] == shown
    manager.serving.stop()
    assert shell("logs", "--worker", "w3")[1] == shown


def test_logs_are_found_by_rank_by_name_and_by_what_went_wrong_first(manager: RunningManager, shell: Shell) -> None:
    assert shell("logs", "--rank", "1")[1] == "what rank 1 said\n"
    assert shell("logs", "--worker", "w3")[1] == "the last words of w3\n"
    code, out, err = shell("logs", "--first-failure")
    assert (code, out) == (0, "the last words of w3\n")
    assert "w3: worker w3 killed by SIGKILL" in err
    assert "ranks 0 to 2" in shell("logs", "--rank", "9")[2]
    assert shell("logs", "--rank", "1", "--first-failure")[0] == 2
    assert "no log of a worker 'w8'" in shell("logs", "--worker", "w8")[2]


def test_changing_verbs_reach_the_manager(manager: RunningManager, shell: Shell) -> None:
    assert shell("stop")[0] == 0
    assert shell("morph")[0] == 0
    assert shell("drain", "local")[0] == 0
    assert [type(event) for event in manager.events] == [FinishRequested, MorphRequested, DrainRequested]
    assert shell("join-token", "--uses", "7", "--hours", "2")[1] == "varuna://for-7-of-7200\n"
    code, _, err = shell("drain", "elsewhere")
    assert (code, "which has: local" in err) == (1, True)


def test_verbs_name_their_run_and_ask_when_several_live(manager: RunningManager, shell: Shell, tmp_path: Path) -> None:
    assert shell("stop")[1] == f"the run in {manager.folder} will stop after the current step\n"
    assert str(manager.folder) in shell("status")[2]
    other = tmp_path / "other"
    other.mkdir()
    publish_access(other, Access(host="127.0.0.1", port=1, certificate_pem=None, token=""))
    with_lock = [own(folder, "manager", remedy="") for folder in (manager.folder, other)]
    for verb in (["stop"], ["morph"], ["drain", "local"], ["logs"], ["status"]):
        code, _, err = shell(*verb)
        assert (code, "2 of your runs are running" in err) == (2, True)
        assert f"--run {manager.folder}" in err
        assert f"--run {other}" in err
    assert shell("morph", "--run", str(manager.folder))[0] == 0
    listed = json.loads(shell("list", "--json")[1])
    assert {row["run"]: row["state"] for row in listed} == {str(manager.folder): "running", str(other): "running"}
    with_lock[1].release()  # one of them is over: the other is meant, although it is older
    assert shell("stop")[0] == 0
    assert "without a manager" in shell("list")[1]
    with_lock[0].release()


def test_a_token_of_another_run_is_explained(manager: RunningManager, shell: Shell) -> None:
    manager.publish("stale")
    code, _, err = shell("stop")
    assert (code, "does not accept this run's token" in err) == (1, True)
    assert not manager.events


def test_a_run_that_is_over_still_has_its_logs(manager: RunningManager, shell: Shell) -> None:
    manager.serving.stop()
    code, _, err = shell("status")
    assert (code, "has not ended: start the same command again" in err) == (1, True)
    manager.journal.append(RunEnded(exit_code=3, text="no plan fits"))
    code, _, err = shell("stop")
    assert (code, "has ended with exit code 3: no plan fits" in err) == (1, True)
    assert shell("logs", "--rank", "1")[1] == "what rank 1 said\n"
    assert shell("logs", "--first-failure")[1] == "the last words of w3\n"
    manager.journal.append(RunEnded(exit_code=0, text="100 steps done"))
    assert shell("status")[:2] == (0, f"the run in {manager.folder} has ended with exit code 0: 100 steps done\n")


def test_commands_about_a_run_without_a_manager_read_only_its_newest_steps(
    manager: RunningManager, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna.extras.doctor.gather.AUDITED_STEPS", 1)
    manager.serving.stop()
    spoil_steps(manager.folder, kept=1)
    assert "has not ended: start the same command again" in shell("status")[2]
    manager.journal.append(RunEnded(exit_code=3, text="no plan fits"))
    assert "has ended with exit code 3: no plan fits" in shell("status")[2]
    assert "ended with exit code 3" in shell("list")[1]
    assert shell("logs", "--rank", "1")[1] == "what rank 1 said\n"
    assert shell("logs", "--first-failure")[1] == "the last words of w3\n"
    found = json.loads(shell("doctor", "--run", str(manager.folder), "--json")[1])["findings"]
    [ledger] = [each for each in found if each["subject"] == "ledger"]
    assert (ledger["level"], ledger["text"]) == ("ok", "the newest 1 steps, 16 samples, each used exactly once")


def test_without_a_run_people_are_told_where_one_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, _, err = shell("status")
    assert (code, "no run of this user was found" in err) == (2, True)
    code, _, err = shell("status", "--run", str(tmp_path))
    assert (code, "Use --run" in err) == (2, True)
    (tmp_path / "varuna").mkdir()
    (tmp_path / "varuna" / "newest-run").write_text(json.dumps(str(tmp_path / "removed")))
    code, _, err = shell("status")
    assert (code, "your newest run has finished and its folder was removed" in err) == (2, True)
    assert shell("status", "--json", "--watch")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("agent", "varuna://half", "--", "x.py"), "not a JOIN string"),
        (("agent", f"varuna://{'t' * 20}@127.0.0.1:9/{'ab' * 32}", "--", "missing.py"), "no script at missing.py"),
        (("manager", "--overwrite"), "--new --overwrite"),
    ],
)
def test_wrong_use_of_manager_and_agent_is_explained(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = shell(*arguments)
    assert (code, said in err) == (2, True)


def test_a_zone_that_is_none_is_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_ZONE", "rack 1")
    code, _, err = shell("agent", "varuna://half", "--", "x.py")
    assert (code, "VARUNA_ZONE='rack 1' is not a zone: write a region" in err) == (2, True)


def test_open_gives_a_link_that_works_once_and_only_its_owner_sees(
    manager: RunningManager, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = shell("open")
    assert (code, "works once, within 10 minutes" in err) == (0, True)
    page, _, login = out.strip().partition("#login=")
    assert page == f"http://127.0.0.1:{manager.serving.port}/"
    remote = Access(host="127.0.0.1", port=manager.serving.port, certificate_pem=None, token="").remote()
    assert [remote.post("/login", {"code": login}).status for _ in range(2)] == [201, 403]

    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")

    def note(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr("webbrowser.open", note)
    assert shell("open") == (0, "", "")
    path = manager.folder / "open.html"
    assert opened == [path.as_uri()]  # arguments of a browser are anybody's
    assert path.stat().st_mode & 0o077 == 0
    assert f"http://127.0.0.1:{manager.serving.port}/#login=" in path.read_text()
    assert shell("open", "--void")[1] == "2 links and open pages were revoked\n"
    assert "Give one of them" in shell("open", "--void", "--print")[2]
