"""A Ray cluster on this machine that grows by itself: Ray's own autoscaler, with a provider of processes as nodes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.scenarios.launch import environment, processes_with
from tests.scenarios.warm import Process
from tests.waiting import wait_for

_ROOT = str(Path(__file__).parents[2])
_HEAD = "f" * 51 + "00000"
"""Identifier of the head node; the provider counts the others from there."""
_PROVIDER = {
    "type": "external",  # the package has no defaults for this provider's own type
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "launch_multiple": True,
    "head_node_id": _HEAD,
    "disable_node_updaters": True,  # else it would log in to nodes to install Ray there, and end those where it cannot
    "disable_launch_config_check": True,
}
_COMMANDS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
)


class AutoscalingCluster:
    """A head without CPUs, and up to ``most`` nodes of one CPU, once somebody asks for them."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder = folder
        address, port = _own_address(), _free_port()
        settings = folder / "autoscaling.json"
        settings.write_text(json.dumps(_settings(f"{address}:{port}", most)))
        self.environment = environment(
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            PYTHONPATH=_ROOT,
            AUTOSCALER_UPDATE_INTERVAL_S="1",
            RAY_FAKE_CLUSTER="1",
            RAY_enable_autoscaler_v2="1",
            RAY_worker_niceness="0",  # by default what Ray starts yields to everything else on the machine
            RAY_raylet_start_wait_time_s="120",
            XDG_STATE_HOME=str(folder / "state"),
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
        command += [
            "--num-cpus=0",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--ray-client-server-port={_free_port()}",
        ]
        command += ["--include-dashboard=false", f"--temp-dir={folder}", f"--autoscaling-config={settings}"]
        head = {"RAY_CLOUD_INSTANCE_ID": _HEAD, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD}
        self.said = folder / "head.out"
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                command, env={**self.environment, **head}, stdout=out, stderr=out, start_new_session=True
            )
        wait_for(lambda: "will now block" in self.said.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said.read_text()[-2000:]
        self.environment["RAY_ADDRESS"] = f"{address}:{port}"

    def start(self, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
        """A command of Varuna's."""
        command = [sys.executable, "-m", "varuna.cli.main", *words]
        with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
            return Process(command, env=self.environment, stdout=out, stderr=err, start_new_session=True)

    def nodes(self) -> dict[str, int]:
        """Process of each node but the head, by its identifier."""
        return {node: pid for node, pid in self._all_nodes().items() if node != _HEAD}

    def kill_head(self) -> None:
        """The machine is gone: its daemons, and with them the manager's actor."""
        for pid in (self.process.pid, *self._daemons("gcs/gcs_server"), self._all_nodes()[_HEAD]):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        for pid in {self.process.pid, *processes_with(str(self.folder))}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def _all_nodes(self) -> dict[str, int]:
        found = {}
        for pid in self._daemons("raylet/raylet"):
            with contextlib.suppress(OSError):  # it has just ended
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                named = dict(variable.partition("=")[::2] for variable in variables)
                found[named["RAY_OVERRIDE_NODE_ID_FOR_TESTING"]] = pid
        return found

    def _daemons(self, program: str) -> list[int]:
        ours = processes_with(str(self.folder))
        return [pid for pid in ours if program in _program(pid)]


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").partition("\0")[0]
    except OSError:
        return ""


def _settings(gcs_address: str, most: int) -> dict[str, object]:
    return {
        "cluster_name": "growing",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
        "provider": {**_PROVIDER, "gcs_address": gcs_address},
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        **{name: [] for name in _COMMANDS},
    }


def _own_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
