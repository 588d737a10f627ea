"""A Slurm of one's own on this machine: a real controller and real node daemons, with own ports and folders."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.waiting import wait_for

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.sock
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PartitionName=spot Nodes=ALL State=UP Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10
PartitionName=staff Nodes=ALL State=UP AllowGroups=staff
PartitionName=short Nodes=ALL State=UP DefaultTime=5
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [tool for tool in TOOLS if shutil.which(tool, path=path) is None]


class Slurm:
    """Starts a controller and some nodes; ``close`` leaves nothing running."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        self.host = socket.gethostname().split(".")[0]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self._all = {**os.environ, **self.environment, "PATH": path}
        (folder / "state").mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        user = subprocess.run(["id", "-un"], capture_output=True, check=True, text=True).stdout.strip()
        lines = [_CONFIGURATION.format(host=self.host, port=_free_port(), folder=folder, user=user)]
        names = [f"vn{number}" for number in range(1, nodes + 1)]
        for name in names:
            lines.insert(0, f"NodeName={name} NodeHostname={self.host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=1")
        (folder / "slurm.conf").write_text("\n".join(lines))
        files = [f"--{what}={folder}/munge.{end}" for what, end in _MUNGE]
        self._start("munged", "--foreground", "--force", *files)
        wait_for(lambda: (folder / "munge.sock").exists(), 20)
        self.controller = self.start_controller()
        for name in names:
            self._start("slurmd", "-D", "-N", name)
        wait_for(lambda: self.ask("sinfo", "-h", "-N", "-p", "spot", "-o", "%T").split() == ["idle"] * nodes, 30)

    def start_controller(self) -> "subprocess.Popen[bytes]":
        self.controller = self._start("slurmctld", "-D")
        return self.controller

    def stop_controller(self) -> None:
        """In order, as for an upgrade: it saves what it knows."""
        self.controller.terminate()
        self.controller.wait(30)

    def forget_jobs(self) -> None:
        """A controller that was killed has not saved them; it does so when it likes."""
        for path in (self.folder / "state").glob("job_state*"):
            path.unlink()

    def ask(self, *command: str) -> str:
        """Return the output of one of Slurm's commands; empty if it fails."""
        return subprocess.run(command, env=self._all, capture_output=True, text=True, timeout=30, check=False).stdout

    def jobs(self, partition: str = "spot") -> dict[str, str]:
        """State of each job that is not over, by its number; those that are about to be are left out."""
        lines = self.ask("squeue", "-h", "-r", "-p", partition, "-o", "%i %T").splitlines()
        return {number: state for number, state in map(str.split, lines) if state != "COMPLETING"}

    def clear(self) -> None:
        """End all jobs, at once."""
        self.ask("scancel", "--signal=KILL", "--full", "-u", str(os.getuid()))
        self.ask("scancel", "-u", str(os.getuid()))
        wait_for(lambda: not self.ask("squeue", "-h"))

    def close(self) -> None:
        self.clear()
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def _start(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{len(self.processes)}-{command[0]}.out").open("wb") as out:
            process = subprocess.Popen(
                command, env=self._all, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.processes.append(process)
        return process


_MUNGE = (
    ("key-file", "key"),
    ("socket", "sock"),
    ("pid-file", "pid"),
    ("log-file", "log"),
    ("seed-file", "seed"),
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
