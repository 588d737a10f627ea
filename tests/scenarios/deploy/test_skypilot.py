"""The SkyPilot job, read by SkyPilot's own loader, where the command ``sky`` is installed."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from varuna.cli.agent import invited
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
