"""One command on a real Slurm: nodes are requeued, lost and preempted, and the losses are those of one process."""

import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.scenarios.cluster import ended, kill
from tests.scenarios.launch import Alone, processes_with, run
from tests.scenarios.on_engine import OnEngine
from tests.scenarios.slurm import Slurm, missing
from tests.waiting import wait_for
from varuna.core.errors import FleetError, UsageError
from varuna.fleet.engines.engine import AgentCommand, Engine, EnginePlace
from varuna.fleet.engines.provider import CapacityError
from varuna.fleet.engines.registry import kind_of
from varuna.fleet.run_folder.connection_file import find

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: {', '.join(missing())}"),
]
STEPS = 120


def engine_of(on: str, place: EnginePlace, given: Mapping[str, str]) -> Engine:
    kind, where = kind_of(on)
    return kind.make(place, kind.values(where, given))


@pytest.fixture
def undisturbed(alone: Alone) -> dict[int, float]:
    return alone(STEPS, "--dropout", "0.1")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"), nodes=3)
    yield slurm
    slurm.close()


class OnSlurm(OnEngine):
    """``varuna run --on slurm``, and its user."""

    def __init__(self, folder: Path, slurm: Slurm, *flags: str) -> None:
        checkpoints = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "100000")
        super().__init__(folder, "--on", "slurm", *flags, variables=slurm.environment, args=checkpoints)

    @property
    def name(self) -> str:
        """Of its jobs."""
        return str(re.findall(r"`squeue --name (\S+)`", self.said())[0])

    def agents(self) -> list[int]:
        """Their processes."""
        return sorted(processes_with(f"--state-dir {self.run_dir}/slurm/"))


@pytest.fixture
def begin(tmp_path: Path, slurm: Slurm) -> Iterator[Callable[..., OnSlurm]]:
    """Starts the command, and waits until so many nodes train."""
    runs: list[OnSlurm] = []

    def begin(nodes: int) -> OnSlurm:
        runs.append(OnSlurm(tmp_path, slurm, "--partition", "spot", "--nodes", f"{nodes}:{nodes}"))
        wait_for(lambda: runs[0].newest() >= 0 and runs[0].machines() == nodes)
        return runs[0]

    yield begin
    for started in runs:
        started.close()
    slurm.clear()


@pytest.mark.nightly
def test_nodes_are_preempted_and_lost_and_nothing_stays(
    begin: Callable[..., OnSlurm], slurm: Slurm, undisturbed: dict[int, float]
) -> None:
    started = begin(3)
    before = slurm.jobs()
    slurm.ask("sbatch", "-p", "urgent", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_for(lambda: "will leave in 25 s (received SIGTERM)" in started.said())
    [lost, *_] = [number for number, state in slurm.jobs().items() if state == "RUNNING"]
    [agent] = processes_with(f"--state-dir {started.run_dir}/slurm/{lost} ")
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: "1 of 3 jobs wait in the queue (Resources)" in started.said())
    slurm.ask("scancel", "-p", "urgent")
    wait_for(lambda: set(slurm.jobs().values()) == {"RUNNING"} and started.machines() == 3)
    assert (
        len(before.keys() & slurm.jobs().keys()) == 2
    )  # the preempted one is back, in place of the lost one is another
    started.until_steps(3)

    assert started.verb("stop").code == 0
    assert ended(started.manager, 100) == 0, started.said()
    assert slurm.jobs() == {}
    wait_for(lambda: not processes_with(str(started.folder)), 10)
    assert not (started.run_dir / "join").exists()
    started.check(undisturbed)
    cards = [json.loads(path.read_text()) for path in started.run_dir.glob("slurm/*/agent.json")]
    nodes = {card["identity"]["node"].partition("-")[0] for card in cards}
    assert nodes == {"n0", "n1", "n2", "n3"}  # an agent that was requeued is the same machine


@pytest.mark.nightly
def test_the_same_command_continues_and_who_cancels_the_jobs_ends_the_run_in_order(
    begin: Callable[..., OnSlurm], slurm: Slurm, undisturbed: dict[int, float]
) -> None:
    started = begin(2)
    jobs = slurm.jobs()
    kill(started.manager)
    before = find(started.run_dir)[1].port
    with socket.create_server(("0.0.0.0", before)):  # as on another node: neither address nor port are the old ones
        started.start("--advertise", "127.0.0.2")
        wait_for(lambda: "of which 2 are there already" in started.said())
        wait_for(lambda: started.machines() == 2)
    assert find(started.run_dir)[1].port != before
    started.until_steps(3)
    agents = started.agents()
    slurm.stop_controller()
    wait_for(lambda: "squeue says: Unable to contact slurm controller" in started.said())
    started.until_steps(3)
    slurm.start_controller()
    wait_for(slurm.jobs)
    assert (slurm.jobs(), started.agents()) == (jobs, agents)  # it costs nobody anything

    slurm.ask("scancel", "--name", started.name)
    assert ended(started.manager, 100) == 0, started.said()
    assert "its Slurm jobs were cancelled" in started.said()
    assert slurm.jobs() == {}
    started.check(undisturbed)
    assert f"checkpoint {started.folder}/checkpoints/step-{started.newest() + 1:08}" in started.said()


@pytest.mark.nightly
def test_jobs_that_a_controller_forgot_are_submitted_anew_and_cancelled_jobs_whose_agents_were_killed_end_the_run(
    begin: Callable[..., OnSlurm], slurm: Slurm, undisturbed: dict[int, float]
) -> None:
    started = begin(2)
    agents = started.agents()
    kill(slurm.controller)
    slurm.forget_jobs()
    slurm.start_controller()  # nodes kill what it does not know
    wait_for(lambda: started.agents() and not set(started.agents()) & set(agents))
    wait_for(lambda: set(slurm.jobs().values()) == {"RUNNING"} and started.machines() == 2)
    last = started.newest()
    wait_for(lambda: started.newest() not in (-1, last))
    started.check(undisturbed)

    for agent in started.agents():
        os.kill(agent, signal.SIGKILL)
    slurm.ask("scancel", "--name", started.name)
    assert ended(started.manager, 60) == 1, started.said()
    assert "no machine is left, and no more can be requested: its Slurm jobs were cancelled" in started.said()
    assert slurm.jobs() == {}


@pytest.mark.nightly
def test_two_runs_of_one_name_leave_each_other_alone_and_a_second_command_for_one_is_refused(
    tmp_path: Path, slurm: Slurm, undisturbed: dict[int, float]
) -> None:
    flags = ("--partition", "spot", "--nodes", "1:1")
    first, second = (OnSlurm(tmp_path / name, slurm, *flags) for name in ("a", "b"))
    try:
        first.wait(lambda: first.newest() >= 0)
        second.wait(lambda: second.newest() >= 0)
        assert first.name != second.name
        assert first.name.rpartition("-")[0] == second.name.rpartition("-")[0] == "varuna-run"
        again = run(first.command, **{**slurm.environment, "XDG_STATE_HOME": str(tmp_path / "a" / "state")})
        assert again.code != 0
        assert "Stop that one, or pass another --run-dir." in again.err
        assert first.verb("stop").code == 0
        assert ended(first.manager) == 0, first.said()
        assert slurm.ask("squeue", "-h", "--name", first.name) == ""
        assert list(slurm.jobs().values()) == ["RUNNING"]
        second.until_steps(3)
        assert second.verb("stop").code == 0
        assert ended(second.manager) == 0, second.said()
        first.check(undisturbed)
        second.check(undisturbed)
    finally:
        first.close()
        second.close()
        slurm.clear()


def test_a_partition_that_is_for_others_is_refused_with_what_to_look_at(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    as_nobody = "exec setpriv --reuid 65534 --regid 65534 --clear-groups"
    for path in (*slurm.folder.parents, slurm.folder):
        if not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(0o755)  # so that nobody reads the cluster's configuration
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ncd / && {as_nobody} {shutil.which("sbatch")} "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"not permitted to use this partition.*Look at --partition, --account"):
        engine_of("slurm:staff", EnginePlace(run_dir=tmp_path, most=4), {})


@pytest.mark.parametrize(
    ("on", "options", "said"),
    [
        pytest.param("slurm:nowhere", {}, "Partitions of this cluster: spot, urgent, staff, short.", id="partition"),
        pytest.param("slurm:short", {}, "give --time, of at least 10 minutes", id="default-limit"),
        pytest.param("slurm:spot", {"time": "0:30"}, "--time is 0:30", id="limit"),
        pytest.param("slurm", {"gpus-per-node": "8"}, "Invalid generic resource", id="gpus"),
        pytest.param("slurm", {"sbatch": "--constraint=nvlink"}, "Invalid feature", id="sbatch"),
    ],
)
def test_what_slurm_would_refuse_is_refused_at_once(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, on: str, options: dict[str, str], said: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    with pytest.raises(UsageError, match=re.escape(said)):
        engine_of(on, EnginePlace(run_dir=tmp_path, most=4), options)
    assert slurm.jobs() == {}


@pytest.mark.nightly
def test_jobs_that_fail_at_once_are_told_and_not_submitted_again_and_again(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents' Varuna, or their script, is not what the head has."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    engine = engine_of("slurm:spot", EnginePlace(run_dir=tmp_path, most=3), {})
    engine.start(AgentCommand(join=f"varuna://{'t' * 20}@127.0.0.1:9/{'ab' * 32}", script=tmp_path / "train.py"))
    (tmp_path / "slurm" / "agent.sh").write_text("echo the manager refused this agent; exit 1\n")
    said: list[str] = []

    def is_hopeless() -> bool:
        try:
            engine.resize(3)
        except CapacityError as error:
            said.append(str(error))
        except FleetError as error:
            said.append(str(error))
            return True
        return False

    wait_for(is_hopeless, 60)
    assert "jobs failed at once and none works" in said[-1]
    assert "said: the manager refused this agent" in said[-1]
    engine.close()
    assert slurm.jobs() == {}
