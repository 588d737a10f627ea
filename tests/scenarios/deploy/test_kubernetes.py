"""``varuna run --on k8s``, against a local server that speaks the API server's part, and whose pods are real agents."""

import base64
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.scenarios.launch import JOB, Alone, environment, json_log, run
from tests.unit.extras.clouds.group_servers import Kubernetes
from tests.unit.fleet.metadata import serving
from varuna.fleet.net.join_string import parse_invitation

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
CLI = [sys.executable, "-m", "varuna.cli.main"]
ARGS = ("--steps", "12", "--dropout", "0.1")


class Cluster(Kubernetes):
    """Behind ``kubectl proxy``; its controller starts an agent for each replica, and ends those that are too many."""

    folder: ClassVar[Path]
    pods_there: ClassVar[list["subprocess.Popen[bytes]"]] = []
    ending: ClassVar[list["subprocess.Popen[bytes]"]] = []
    most: ClassVar[int] = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    def is_denied(self) -> bool:
        return False

    def change(self, nodes: int) -> bool:
        with self.lock:
            done = super().change(nodes)
            type(self).most = max(self.most, nodes)
            while len(self.pods_there) < nodes:
                self.pods_there.append(self.pod(len(self.pods_there)))
            while len(self.pods_there) > nodes:
                self.ending.append(self.pods_there.pop())
                self.ending[-1].terminate()
        return done

    def pod(self, number: int) -> "subprocess.Popen[bytes]":
        join = self.folder / "join"
        join.write_bytes(base64.b64decode(self.secret["join"]))
        command = [
            "agent",
            "--join-file",
            str(join),
            "--state-dir",
            str(self.folder / f"pod-{number}"),
            "--workers",
            "1",
        ]
        with (self.folder / f"pod-{number}.log").open("ab") as log:
            none = environment(AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:9")
            return subprocess.Popen([*CLI, *command, "--", JOB, *ARGS], stdout=log, stderr=log, env=none)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    Cluster.begin()
    Cluster.desired, Cluster.folder, Cluster.pods_there, Cluster.most = 0, tmp_path, [], 0
    Cluster.ending = []
    with serving(Cluster) as url:
        yield url
    try:
        for process in Cluster.ending:
            process.wait(60)  # of SIGTERM, or because the manager says that the run is over
    finally:
        for process in (*Cluster.ending, *Cluster.pods_there):
            process.kill()
            process.wait()


def test_a_run_scales_its_agents_trains_and_gives_them_back(server: str, tmp_path: Path, alone: Alone) -> None:
    log = tmp_path / "log.jsonl"
    place = ("--on", "k8s:ml/agents", "--api-server", server, "--nodes", "2:2", "--advertise", "127.0.0.1")
    done = run([*CLI, "run", *place, "--run-dir", str(tmp_path / "run"), "--json-log", str(log), JOB, *ARGS])
    assert done.code == 0, done.err
    assert "agents are the pods of StatefulSet ml/agents" in done.err
    assert (Cluster.most, Cluster.desired) == (2, 0)
    assert parse_invitation(base64.b64decode(Cluster.secret["join"]).decode()).host == "127.0.0.1"
    losses: dict[int, Any] = {line["step"]: line["loss"] for line in json_log(log)}
    assert losses == {step: pytest.approx(loss, rel=1e-5) for step, loss in alone(12, "--dropout", "0.1").items()}
