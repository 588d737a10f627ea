"""Several torchrun agents on this machine, whose rendezvous is a manager's."""

import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.scenarios.cluster import Cluster
from tests.scenarios.launch import environment
from tests.scenarios.warm import Process
from varuna.fleet.run_folder.registry import node_label

_ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"^step (\d+) loss (\S+)", re.MULTILINE)


class Torchruns:
    """Nodes of one run; ``close`` leaves none of their processes behind."""

    def __init__(self, cluster: Cluster, nodes: str, script: str, *args: str) -> None:
        self.cluster, self.folder, self._script, self._args = cluster, cluster.folder, script, args
        self.join_file = cluster.run_dir / "join"
        self.join_file.write_text(cluster.verb("join-token", "--uses", "20").out)
        self._nodes = nodes
        self.host = node_label(socket.gethostname())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = environment(
            PYTHONPATH=os.pathsep.join([str(entry_points(self.folder)), str(_ROOT)]), VARUNA_STAGES="1"
        )

    def start(self, name: str, *flags: str, endpoint: str = "", **more: str) -> "subprocess.Popen[bytes]":
        """One more node."""
        rendezvous = ["--rdzv-backend", "varuna", "--rdzv-endpoint", endpoint or str(self.join_file)]
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nnodes", self._nodes]
        command += ["--nproc-per-node", "1", "--max-restarts", "9", *flags, self._script, *self._args]
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            self.processes[name] = Process(
                command, env={**self._environment, **more}, stdout=out, stderr=err, start_new_session=True
            )
        return self.processes[name]

    def kill(self, name: str) -> None:
        """The machine is gone: torchrun and its workers at once."""
        process = self.processes[name]
        victims = [process.pid, *descendants(process.pid)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        process.wait(10)

    def lines(self) -> list[tuple[int, float]]:
        """Step and loss, as printed by any node."""
        texts = [(self.folder / f"{name}.out").read_text() for name in self.processes]
        return [(int(step), float(loss)) for text in texts for step, loss in _LINE.findall(text)]

    def newest(self) -> int:
        return max((step for step, _ in self.lines()), default=-1)

    def sizes(self) -> list[str]:
        """Nodes at each step, as node ``a`` has printed them."""
        return re.findall(r"nodes (\d+)$", (self.folder / "a.out").read_text(), re.MULTILINE)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                self.kill(name)


def entry_points(folder: Path) -> Path:
    """A folder for PYTHONPATH with what pyproject.toml declares, as an installed package would have it."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "installed" / f"varuna_train-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, found in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in found.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info.parent


def descendants(pid: int) -> list[int]:
    """Processes that this one has started, and theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found
