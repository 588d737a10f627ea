"""``varuna run --on ray`` in a real Ray cluster of several nodes, whose nodes, actors and drivers are killed."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.launch import JOB, Done, environment, json_log, parent_of, processes_with, python, run
from tests.scenarios.warm import Process
from tests.waiting import wait_for
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.state.run_events import RunEvent

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]
CLI = [sys.executable, "-m", "varuna.cli.main"]
ROOT = str(Path(__file__).parents[2])
ARGS = ("--dropout", "0.1", "--slow", "0.4")
"""Steps are slow, for what is waited for takes a minute, and each step is computed in one process too."""
STEPS = 200
BOUND_S = 120.0
QUERY = """
import ray, sys
ray.init(address="auto", namespace="varuna", logging_level="ERROR", log_to_driver=False)
from ray._private.state import state
print(len(ray.util.list_named_actors()), ray.available_resources().get("CPU", 0))
"""


class RayCluster:
    """Its nodes, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.environment = environment(
            PYTHONPATH=ROOT,
            RAY_worker_niceness="0",  # by default what Ray starts yields to everything else on the machine
            RAY_raylet_start_wait_time_s="120",
            RAY_TMPDIR=str(folder),
            XDG_STATE_HOME=str(folder / "state"),
        )
        self.said = folder / "cluster.err"
        with self.said.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("ray_nodes.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=self.environment,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.environment["RAY_ADDRESS"] = self.process.stdout.readline().decode().strip()
        assert self.environment["RAY_ADDRESS"], self.said.read_text()[-2000:]

    def order(self, words: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{words}\n".encode())
        self.process.stdin.flush()
        answer = self.process.stdout.readline().decode().strip()
        assert answer, self.said.read_text()[-2000:]
        return answer

    def run(self, *words: str) -> Done:
        """A command of Varuna's, to its end."""
        return run([*CLI, *words], **self.environment)

    def start(self, folder: Path, *words: str) -> "subprocess.Popen[Any]":
        with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
            return Process([*CLI, *words], env=self.environment, stdout=out, stderr=err, start_new_session=True)

    def left(self) -> tuple[int, float]:
        """Varuna's actors, and free CPUs."""
        done = subprocess.run(
            [sys.executable, "-c", QUERY], env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        actors, cpus = done.stdout.split()[-2:]
        return int(actors), float(cpus)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.stdout.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = RayCluster(Path(folder))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def undisturbed() -> Iterator["Future[Done]"]:
    """Computed while the cluster starts."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(python, "--steps", str(STEPS), "--dropout", "0.1")


def events(run_dir: Path, kind: str) -> list[Any]:
    found: list[RunEvent] = read_events(run_dir) if (run_dir / "run.db").exists() else []
    return [event for event in found if event.kind == kind]


def test_nodes_come_and_go_the_manager_and_the_driver_are_killed_and_no_loss_changes(
    undisturbed: "Future[Done]", cluster: RayCluster, tmp_path: Path
) -> None:
    first, _ = cluster.order("add 1"), cluster.order("add 1")
    run_dir, log = tmp_path / "gpt", tmp_path / "log.jsonl"
    command = [
        *("run", "--on", "ray", "--cpus-per-worker", "1", "--nodes", "2:3", "--run-dir", str(run_dir)),
        *("--json-log", str(log), JOB, "--steps", "100000", *ARGS),
    ]

    def said() -> str:
        return (tmp_path / "err").read_text()

    def until_step(step: int) -> None:
        wait_for(lambda: log.exists() and any(line["step"] >= step for line in json_log(log)), BOUND_S)

    def progress() -> int:
        newest: int = max(line["step"] for line in json_log(log))
        return newest

    driver = cluster.start(tmp_path, *command)
    until_step(3)
    assert "manager runs in the Ray cluster as actor gpt/manager" in said()

    # A node comes, and another one dies with all that ran on it.
    cluster.order("add 1")
    wait_for(lambda: len({event.worker for event in events(run_dir, "worker_joined")}) >= 3, BOUND_S)
    cluster.order(f"kill {first}")
    wait_for(lambda: events(run_dir, "worker_lost"), BOUND_S)
    until_step(progress() + 3)

    # The manager's actor is killed, and its process with it; training goes on meanwhile, and Ray starts it again.
    [manager] = [pid for pid in processes_with(str(run_dir)) if pid != driver.pid]
    os.kill(parent_of(manager), signal.SIGKILL)
    wait_for(lambda: manager not in processes_with(str(run_dir)), BOUND_S)
    wait_for(lambda: "the manager is back" in said(), BOUND_S)

    # The driver is killed; the run goes on, and people reach it from each node.
    driver.kill()
    driver.wait(10)
    until_step(progress() + 3)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(cluster.run, "status", "--run", "ray:gpt", "--json")
        other = cluster.run(*command[:-1], "0.2")
        status = asking.result()
    assert '"state": "training"' in status.out, status
    assert other.code == 2
    assert "a run named gpt is in this Ray cluster already" in other.err

    # The same command follows it again, to an end that gives everything back.
    driver = cluster.start(tmp_path, *command)
    wait_for(lambda: "following it again" in said(), BOUND_S)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(BOUND_S) == 0, said()
    assert cluster.left() == (0, 2.0)
    assert processes_with(str(run_dir)) == []
    losses = {line["step"]: line["loss"] for line in json_log(log)}
    assert sorted(losses) == list(range(len(losses)))
    alone = undisturbed.result()
    assert alone.code == 0, alone.err
    compared = [step for step in losses if step in alone.losses]
    assert len(compared) > 20
    assert all(losses[step] == pytest.approx(alone.losses[step], rel=1e-5) for step in compared)
