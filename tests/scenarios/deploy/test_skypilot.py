"""The SkyPilot job: read by SkyPilot's own loader, where the command ``sky`` is installed; and what it says is run."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.cluster import CLI, Cluster, ended
from tests.scenarios.launch import JOB, Alone, environment, json_log, processes_with
from tests.scenarios.on_engine import ARGS
from tests.scenarios.stand_ins import StandIns
from tests.scenarios.torchruns import descendants
from tests.scenarios.warm import Process
from tests.waiting import wait_for
from varuna.cli.agent import invited
from varuna.core.version import __version__
from varuna.fleet.net.join_string import JOIN_VARIABLE

YAML = Path(__file__).parents[3] / "deploy" / "skypilot" / "agent.yaml"
JOIN = f"varuna://{'t' * 20}@10.0.0.1:7070/{'ab' * 32}"
LOAD = """
import json, sys
import sky
task = sky.Task.from_yaml_config(sky.utils.yaml_utils.read_yaml(sys.argv[1]), secrets_overrides=[("VARUNA_JOIN", "j")])
found = [one.to_yaml_config() for one in task.resources]
print(json.dumps({"nodes": task.num_nodes, "run": task.run, "secrets": list(task.secrets), "resources": found}))
"""


def sky() -> str:
    """The interpreter of the command ``sky``, which needs an environment of its own."""
    command = shutil.which("sky")
    if command is None:
        pytest.skip("no sky: python -m venv ENV, ENV/bin/pip install skypilot, PATH=ENV/bin:$PATH")
    return Path(command).read_text().splitlines()[0].removeprefix("#!")


def test_skypilot_reads_the_job_and_agents_understand_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run(
        [sky(), "-c", LOAD, str(YAML)],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    assert task["nodes"] == 1
    assert task["secrets"] == [JOIN_VARIABLE]
    assert len(task["resources"]) == 3
    for one in task["resources"]:
        assert (one["use_spot"], one["infra"], one["job_recovery"]["strategy"]) == (True, "aws/us-east-1", "FAILOVER")
    words = task["run"].split()
    assert words[:3] == ["exec", "varuna", "agent"]
    monkeypatch.setenv(JOIN_VARIABLE, JOIN)
    assert invited(words[words.index("--") + 1 :], None)[1] == ["train.py", "--lr", "1e-3"]


class Jobs:
    """Managed jobs of SkyPilot's, each on a machine of its own: what the file says is done there, in that order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = StandIns(folder / "bin", {"pip": "#!/bin/sh\nprintf '%s\\n' \"$@\"\n"})
        text = YAML.read_text()
        self.setup, self.run = (_section(text, name) for name in ("setup", "run"))
        self.processes: list[subprocess.Popen[Any]] = []

    def machine(self, name: str) -> Path:
        """Its home, with the folder that SkyPilot has copied there."""
        home = self._folder / name
        (home / "sky_workdir").mkdir(parents=True)
        shutil.copy(JOB, home / "sky_workdir" / "train.py")
        (home / "sky_workdir" / f"varuna_train-{__version__}-py3-none-any.whl").touch()
        return home

    def start(self, home: Path, join: str) -> "subprocess.Popen[Any]":
        """A job; on a machine where it has run before, it is a restart."""
        variables = {
            "HOME": str(home),
            JOIN_VARIABLE: join,
            "SKYPILOT_TASK_ID": f"sky-managed-{home.name}_gpt2_1-0",
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NODE_IPS": "127.0.0.1",
            "SKYPILOT_NUM_NODES": "1",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        }
        workdir = home / "sky_workdir"
        installed = self._programs.shell(self.setup, workdir, **variables).split()
        assert installed == ["install", f"varuna_train-{__version__}-py3-none-any.whl[torch]"]
        script = self.run.replace("train.py --lr 1e-3", shlex.join(["train.py", *ARGS]))
        assert script != self.run
        words = self._programs.varuna(script, workdir, **variables)
        with (home / "job.log").open("ab") as log:
            own = environment(**variables, AWS_EC2_METADATA_SERVICE_ENDPOINT="http://127.0.0.1:9")
            job = Process([*CLI, *words], env=own, stdout=log, stderr=log, cwd=str(workdir), start_new_session=True)
        self.processes.append(job)
        return job

    def close(self) -> None:
        for job in self.processes:
            if job.poll() is None:
                kill_tree(job)


def kill_tree(job: "subprocess.Popen[Any]") -> None:
    """As SkyPilot ends a job, or as its machine goes."""
    for pid in (job.pid, *descendants(job.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait(10)


def _section(text: str, name: str) -> str:
    """A literal block of the file: tests need no YAML otherwise."""
    [block] = re.findall(rf"^{name}: \|\n((?:  .*\n|\n)+)", text, re.M)
    return textwrap.dedent(block)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_jobs_that_are_killed_and_recovered_train_with_the_losses_of_one_process(tmp_path: Path, alone: Alone) -> None:
    (tmp_path / "head").mkdir()
    cluster, jobs = Cluster(tmp_path / "head", "--workers", "3"), Jobs(tmp_path)
    try:
        join = cluster.verb("join-token", "--uses", "100", "--hours", "72").out.strip()
        homes = [jobs.machine(name) for name in ("one", "two", "three")]
        first, second, _ = (jobs.start(home, join) for home in homes)

        def until_there(nodes: int) -> None:
            wait_for(lambda: len(cluster.status()["connected"]) == nodes)
            begun = max(cluster.steps(), default=-1)
            cluster.until_step(begun + 3)

        until_there(3)
        kill_tree(first)  # its machine is taken: another one is another home
        until_there(2)
        jobs.start(jobs.machine("four"), join)
        until_there(3)
        names = set(cluster.status()["connected"])
        kill_tree(second)  # the job alone: it starts again where it was, and is the same machine
        until_there(2)
        jobs.start(homes[1], join)
        until_there(3)
        assert set(cluster.status()["connected"]) == names
        assert cluster.verb("stop").code == 0
        assert ended(cluster.manager) == 0, cluster.said()
        assert [job.wait(30) for job in jobs.processes] == [-signal.SIGKILL, -signal.SIGKILL, 0, 0, 0]
        wait_for(lambda: not processes_with(str(tmp_path)), 10)
    finally:
        jobs.close()
        cluster.close()
    log = json_log(cluster.log)
    assert sorted({line["step"] for line in log}) == list(range(len({line["step"] for line in log})))
    undisturbed = alone(len(log), "--dropout", "0.1")
    for line in log:
        assert line["loss"] == pytest.approx(undisturbed[line["step"]], rel=1e-5), line
