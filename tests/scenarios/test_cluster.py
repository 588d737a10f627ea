"""Machines that come and go, with a manager that does too: real processes, real TLS, and the losses of one process."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import varuna
from tests.depth import by_depth, of_depth
from tests.scenarios.cluster import Cluster, ended, kill
from tests.scenarios.launch import JOB, Alone, json_log, processes_with
from tests.unit.fleet.metadata import Metadata, metadata_service
from tests.waiting import wait_for
from varuna.core.version import __version__
from varuna.fleet.notices.aws import ENDPOINT_VARIABLE

pytestmark = pytest.mark.timeout(300)
STEPS = 60
ARGS = ("--steps", str(STEPS), "--dropout", "0.1", "--slow", "0.15")


@pytest.fixture
def undisturbed(alone: Alone) -> dict[int, float]:
    return alone(STEPS, "--dropout", "0.1")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, "--workers", "4", "--stages", "2", "--price", "3600")
    yield cluster
    cluster.close()


def turn_strangers_away(cluster: Cluster, args: tuple[str, ...]) -> None:
    """Agents with a token that was spent or is wrong, of another job, version or manager, end and are told why."""
    fingerprint = cluster.join.rpartition("/")[2]
    strangers = [
        cluster.agent("twice", *args, join=cluster.join),  # the token was for one
        cluster.agent("wrong", *args, join=cluster.join.replace("varuna://", "varuna://x")),
        cluster.agent("args", *args, "--dropout", "0.2"),
        cluster.agent("pin", *args, join=cluster.join.replace(fingerprint, "ab" * 32)),
    ]
    older = start_older_agent(cluster, args)
    assert [ended(process) for process in (*strangers, older)] == [1] * 5
    said = cluster.said()
    for reason in (
        "token has been used",
        "token is unknown",
        "arguments differ",
        "not the one that this JOIN string",
        f"the manager runs Varuna {__version__}; install the same version here",
        f"was not let in: it runs Varuna 0.0.1, the manager {__version__}",
    ):
        assert reason in said
    assert "Traceback" not in said
    refused = [event.why for event in cluster.events("audited") if not event.allowed]
    assert any("token" in why for why in refused)  # the first of several in ten seconds
    assert any("arguments" in why for why in refused)


def older_image(folder: Path) -> Path:
    """Make an image with an older version of ``varuna``."""
    image = folder / "image"
    shutil.copytree(Path(varuna.__file__).parent, image / "varuna", ignore=shutil.ignore_patterns("__pycache__"))
    version = image / "varuna" / "core" / "version.py"
    version.write_text(version.read_text().replace(f'"{__version__}"', '"0.0.1"'))
    return image


def start_older_agent(cluster: Cluster, args: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    """A machine whose image has an older Varuna."""
    image = older_image(cluster.folder)
    join = cluster.verb("join-token").out.strip()
    words = ["-m", "varuna", "agent", "--state-dir", str(cluster.folder / "older"), join, "--", JOB, *args]
    with (cluster.folder / "older-0.err").open("wb") as err:
        own = {**cluster.environment, "PYTHONPATH": str(image)}
        process = subprocess.Popen(
            [sys.executable, *words], env=own, cwd=image, stdout=err, stderr=err, start_new_session=True
        )
    cluster.processes.append(process)
    return process


@pytest.mark.parametrize("start", of_depth(("warm_start", "cold_start"), {"warm_start"}))
def test_strangers_are_turned_away_and_training_goes_on_while_the_manager_is_away_and_when_a_machine_dies(
    start: str, request: pytest.FixtureRequest, cluster: Cluster, undisturbed: dict[int, float]
) -> None:
    request.getfixturevalue(start)
    args = (*ARGS, "--checkpoint-dir", str(cluster.folder / "checkpoints"), "--checkpoint-every", "4")
    first = cluster.agent("a", *args, workers=2)
    cluster.until_agents(1)
    turn_strangers_away(cluster, args)
    second = cluster.agent("b", *args, workers=2)
    cluster.until_step(5)
    spent, asked_s = cluster.status()["cost"]["spent"], time.time()
    kill(cluster.manager)
    last = max(cluster.steps())
    cluster.flags = cluster.flags[:-2]  # the run folder knows the price
    cluster.start_manager()
    cluster.until_step(last + 4)
    cost, waited_s = cluster.status()["cost"], time.time() - asked_s
    assert cost["per_hour"] == 4 * 3600
    assert spent + 4 * waited_s - 1 < cost["spent"] < spent + 4 * waited_s + 4  # dollars: a worker costs one per second
    assert "the manager is back: generation 0" in cluster.said()
    kill(second)  # its workers die with it
    assert ended(first) == 0
    assert ended(cluster.manager) == 0
    assert re.search(r"done .* \$[\d,.]+ spent\n", cluster.said())
    log = cluster.check(undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS))  # nothing committed was redone, nothing went unseen
    generations = [event.record.generation for event in cluster.events("generation_started")]
    assert generations == list(range(len(generations)))
    wait_for(lambda: not processes_with(str(cluster.folder)), 10)
    logs = b"".join(path.read_bytes() for path in (cluster.run_dir / "logs").glob(f"{cluster.node('a')}.*.log"))
    assert b"step 0 loss" in logs  # forwarded to the manager, both before and after it was away
    assert f"step {STEPS - 1} loss".encode() in logs


@pytest.mark.nightly
def test_a_manager_that_moves_to_another_address_is_found_by_the_join_file(
    cluster: Cluster, undisturbed: dict[int, float]
) -> None:
    file = cluster.run_dir / "join"
    file.write_text(cluster.verb("join-token", "--uses", "3").out)
    agents = [cluster.agent(name, *ARGS, workers=2, join_file=file) for name in "ab"]
    cluster.until_step(3)
    kill(cluster.manager)
    kill(agents.pop())  # nobody can tell the others
    before, cluster.port, cluster.flags = cluster.port, 0, (*cluster.flags, "--host", "127.0.0.2")
    with socket.create_server(("127.0.0.2", before)):  # where it was, somebody else is
        cluster.start_manager()
        assert cluster.port != before
        agents.append(cluster.agent("b", *ARGS, workers=2, join_file=file))
        last = max(cluster.steps())
        cluster.until_step(last + 4)
        assert f"connected to the manager again, at 127.0.0.2:{cluster.port}" in cluster.said()
    assert [ended(process) for process in [*agents, cluster.manager]] == [0, 0, 0]
    cluster.check(undisturbed)


def test_machines_are_drained_and_return_and_a_person_ends_the_run(
    cluster: Cluster, undisturbed: dict[int, float]
) -> None:
    checkpoints = ("--checkpoint-dir", str(cluster.folder / "checkpoints"), "--checkpoint-every", "1000")
    args = (*ARGS, *checkpoints, "--steps", "5000")  # it is ended by hand
    first = cluster.agent("a", *args, workers=2)
    cluster.until_agents(1)
    used, second = cluster.join, cluster.agent("b", *args, workers=2)
    cluster.until_step(3)
    a, b = cluster.node("a"), cluster.node("b")
    shown = cluster.verb("status")
    assert shown.code == 0, shown.err
    assert a in shown.out
    assert b in shown.out
    assert "plan 2x2" in shown.out

    for path in (cluster.run_dir / "logs").glob(f"{b}.*.log"):
        os.truncate(path, 0)  # as logrotate's copytruncate does
    cluster.until_step(max(cluster.steps()) + 3)
    assert cluster.status()["generation"] == 0  # it costs nobody anything
    kill(second)
    wait_for(lambda: cluster.status()["generation"] == 1)
    second = cluster.agent("b", *args, workers=2, join=used)  # spent long ago: its state folder is what counts
    wait_for(lambda: [w["state"] for w in cluster.status()["workers"] if w["node"] == b] == ["joined"] * 2)
    assert cluster.node("b") == b
    assert cluster.verb("morph").code == 0
    wait_for(lambda: {w["node"] for w in cluster.status()["workers"] if w["rank"] is not None} == {a, b})
    wait_for(lambda: cluster.status()["generations"][-1]["recovery_s"] is not None)

    assert cluster.verb("drain", "n7").code == 1
    assert cluster.verb("drain", a).code == 0
    assert ended(first) == 0
    assert not (cluster.folder / "a" / "agent.json").exists()  # its secret is void
    cluster.until_step(max(cluster.steps()) + 2)
    failure = cluster.verb("logs", "--first-failure")
    assert (failure.code, b in failure.err) == (0, True)
    assert (
        "step 0 loss" in cluster.verb("logs", "--worker", f"{a}.0").out + cluster.verb("logs", "--worker", f"{a}.1").out
    )

    assert cluster.verb("stop").code == 0
    assert ended(cluster.manager) == 0
    assert ended(second) == 0
    log = [(line["step"], line["loss"]) for line in json_log(cluster.log)]
    assert [step for step, _ in log] == list(range(len(log)))
    assert all(loss == pytest.approx(undisturbed[step], rel=1e-5) for step, loss in log if step in undisturbed)
    assert (cluster.folder / "checkpoints").exists()
    assert "has ended with exit code 0: " in cluster.verb("status").out  # the manager has ended
    actions = [event.action for event in cluster.events("audited") if event.allowed]
    assert {"morph", "drain a node", "stop the run"} <= set(actions)


def test_a_spot_notice_reaches_the_manager_and_the_run_leaves_the_machine(
    cluster: Cluster, undisturbed: dict[int, float]
) -> None:
    """The clock is real here: planning a morph before a deadline is tested in virtual time (test_departure)."""
    args = (*ARGS, "--steps", "5000")  # it is ended by hand
    with metadata_service() as url:
        cluster.environment[ENDPOINT_VARIABLE] = url
        spot = cluster.agent("spot", *args, workers=2)
        cluster.until_agents(1)
        cluster.environment[ENDPOINT_VARIABLE] = "http://127.0.0.1:9"
        other = cluster.agent("other", *args, workers=2)
        cluster.until_step(3)
        nodes = {cluster.node("spot"), cluster.node("other")}
        wait_for(lambda: {w["node"] for w in cluster.status()["workers"] if w["rank"] is not None} == nodes)
        assert Metadata.tokens_given == 1
        here = cluster.node("spot")
        assert all(worker["zone"] is None for worker in cluster.status()["workers"])
        Metadata.zone = "us-east-1a"  # a cloud that answers late is asked again
        wait_for(
            lambda: (
                {worker["zone"] for worker in cluster.status()["workers"] if worker["node"] == here}
                == {"us-east-1/us-east-1a"}
            )
        )
        moment = datetime.now(UTC) + timedelta(seconds=by_depth(12, 25))
        Metadata.action = json.dumps({"action": "terminate", "time": moment.strftime("%Y-%m-%dT%H:%M:%SZ")})
        assert ended(spot, 120.0) == 0
    cluster.until_step(max(cluster.steps()) + 2)
    assert cluster.verb("stop").code == 0
    assert ended(other) == 0
    assert ended(cluster.manager) == 0
    node = cluster.node("spot")
    assert any(f"node {node} will leave in " in event.text for event in cluster.events("notice"))
    second = cluster.events("generation_started")[-1].record
    assert {name.rpartition(".")[0] for name in second.grid} == {cluster.node("other")}
    assert not second.rollback
    if "spot notice: terminate" in second.cause:  # a machine that is too slow for that loses the step in flight
        assert second.steps_redone == 0
    losses = {line["step"]: line["loss"] for line in json_log(cluster.log)}
    assert len(losses) > second.first_step
    assert all(losses[step] == pytest.approx(undisturbed[step], rel=1e-5) for step in losses if step in undisturbed)


def test_a_run_folder_has_one_manager_and_a_lost_journal_is_noticed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        first = cluster.manager
        second = cluster.verb_at("manager", "--run-dir", str(cluster.run_dir))
        assert second.code == 1
        assert f"is used by another manager, process {first.pid} on" in second.err
        assert cluster.status()["state"] == "starting"  # the first one serves on, by the same token
        kill(first)
        cluster.start_manager()  # the lock died with it
        kill(cluster.manager)
        (cluster.run_dir / "run.db-wal").unlink()  # as in a copy of run.db alone
        (cluster.run_dir / "run.db").unlink()
        cluster.start_manager()
        wait_for(lambda: "has the keys of a run but an empty journal" in cluster.said())
        modes = {path.name: path.stat().st_mode & 0o077 for path in (cluster.run_dir, cluster.run_dir / "logs")}
        assert set(modes.values()) == {0}
    finally:
        cluster.close()


@pytest.mark.nightly
@pytest.mark.usefixtures("cold_start")
def test_an_upgrade_is_a_stop_and_the_same_commands_and_a_manager_of_another_version_breaks_nothing(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    installed = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(older_image(tmp_path))}
    args = (*ARGS, "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "100")
    cluster = Cluster(tmp_path, "--workers", "2", "--stages", "2", whereabouts=lambda machine: installed)

    def train(until: int) -> list[subprocess.Popen[bytes]]:
        agents = []
        for number, name in enumerate("ab", 1):
            agents.append(cluster.agent(name, *args))
            cluster.until_agents(number)
        cluster.until_step(until)
        return agents

    try:
        agents = train(until=4)
        kill(cluster.manager)
        tried = cluster.verb_at("manager", "--run-dir", str(cluster.run_dir), "--port", str(cluster.port))
        assert tried.code == 2
        assert f"goes on with Varuna 0.0.1, and this is {__version__}" in " ".join(tried.err.split())
        cluster.start_manager()
        cluster.until_step(max(cluster.steps()) + 4)
        assert cluster.verb("stop").code == 0
        assert [ended(process) for process in (cluster.manager, *agents)] == [0] * 3
        assert max(cluster.steps()) < STEPS - 1
        installed.clear()
        cluster.start_manager()
        agents = train(until=STEPS - 1)
        assert [ended(process) for process in (cluster.manager, *agents)] == [0] * 3
        assert [line["step"] for line in cluster.check(undisturbed)] == list(range(STEPS)), "no step was done twice"
    finally:
        cluster.close()
