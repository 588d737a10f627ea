"""``varuna run --on ray`` where only a head is: Ray's autoscaler brings nodes, some die, and then the head."""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.scenarios.launch import JOB, json_log, processes_with, python
from tests.waiting import wait_for
from varuna.fleet.run_folder.past_events import read_events

if TYPE_CHECKING:
    from tests.scenarios.ray_autoscaling import AutoscalingCluster

pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
]
STEPS = 200
BOUND_S = 200.0


@pytest.fixture
def cluster() -> "Iterator[AutoscalingCluster]":
    from tests.scenarios.ray_autoscaling import AutoscalingCluster

    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = AutoscalingCluster(Path(folder), most=3)
        try:
            yield made
        finally:
            made.close()


def test_nodes_that_are_asked_for_come_and_are_replaced_and_without_a_head_nothing_stays(
    cluster: "AutoscalingCluster", tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "gpt", tmp_path / "log.jsonl"

    def newest() -> int:
        return max((line["step"] for line in json_log(log)), default=-1) if log.exists() else -1

    def events(kind: str) -> list[Any]:
        found = read_events(run_dir) if newest() >= 0 else []  # before, its journal may be half made
        return [event for event in found if event.kind == kind]

    with ThreadPoolExecutor(1) as pool:
        undisturbed = pool.submit(python, "--steps", str(STEPS), "--dropout", "0.1")
        command = ["run", "--on", "ray", "--cpus-per-worker", "1", "--workers", "1", "--nodes", "1:3"]
        command += ["--run-dir", str(run_dir), "--json-log", str(log)]
        driver = cluster.start(tmp_path, *command, JOB, "--steps", "100000", "--dropout", "0.1", "--slow", "0.4")
        wait_for(lambda: any(len(event.record.ranks) == 3 for event in events("generation_started")), BOUND_S)
        begun = newest()
        wait_for(lambda: newest() >= begun + 3, BOUND_S)
        assert len(cluster.nodes()) == 3

        lost, pid = sorted(cluster.nodes().items())[0]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: events("worker_lost"), BOUND_S)
        lost_after = newest()
        wait_for(lambda: len({event.worker for event in events("worker_joined")}) >= 4, BOUND_S)
        assert len(cluster.nodes()) == 3
        assert lost not in cluster.nodes()
        joined_after = newest()
        wait_for(lambda: newest() >= joined_after + 3, BOUND_S)
        alone = undisturbed.result()

    losses = {line["step"]: line["loss"] for line in json_log(log)}
    assert sorted(losses) == list(range(len(losses)))
    assert lost_after + 3 < STEPS
    compared = [step for step in losses if step < STEPS]
    assert all(losses[step] == pytest.approx(alone.losses[step], rel=1e-5) for step in compared)

    cluster.kill_head()
    assert driver.wait(BOUND_S) == 1
    said = (tmp_path / "err").read_text()
    # Ray's own code ends the process after a minute, and may let nobody speak before.
    assert "the Ray cluster did not answer for 45 s" in said or "GCS may have been killed" in said, said
    wait_for(lambda: processes_with(str(run_dir)) == [] and cluster.nodes() == {}, BOUND_S)
