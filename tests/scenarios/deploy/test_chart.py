"""The Helm chart, rendered by Helm and checked against Kubernetes' own schemas; `make kubernetes-tools` gets both."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from varuna.extras.clouds.kubernetes import AgentSet
from varuna.fleet.net.join_string import parse_invitation

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[3]
CHART, TOOLS = ROOT / "deploy" / "helm" / "varuna", ROOT / ".kubernetes-tools"
HELM = shutil.which("helm") or shutil.which(str(TOOLS / "helm"))
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: `make kubernetes-tools` gets it")
BASE = ("--set", "image=registry.example/job:1", "--set", "script=/job/train.py", "--set", "args={--lr,1e-3}")
ELABORATE = (
    *("--set", "agents.gpus=0", "--set", "networkPolicy=false", "--set", "manager.storageClass=fast"),
    *("--set", "nodes=4:32", "--set-json", 'env=[{"name":"AWS_REGION","value":"us-east-1"}]'),
    *("--set-json", 'envFrom=[{"secretRef":{"name":"bucket"}}]', "--set-json", 'imagePullSecrets=[{"name":"pull"}]'),
    *("--set-json", 'agents.nodeSelector={"cloud.google.com/gke-spot":"true"}'),
)

Objects = dict[tuple[str, str], dict[str, Any]]


def render(*values: str) -> str:
    assert HELM is not None
    done = subprocess.run(
        [HELM, "template", "gpt2", str(CHART), "--namespace", "ml", *BASE, *values],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(*values: str) -> Objects:
    found = [one for one in yaml.safe_load_all(render(*values)) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def container(one: dict[str, Any]) -> dict[str, Any]:
    [found] = one["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@needs_helm
@pytest.mark.parametrize("values", [(), ELABORATE], ids=["as it is", "elaborate"])
def test_all_that_is_rendered_is_what_kubernetes_accepts(values: tuple[str, ...], tmp_path: Path) -> None:
    if not (TOOLS / "lib" / "kubernetes_validate").exists():
        pytest.skip("no schemas: `make kubernetes-tools` gets them")
    file = tmp_path / "rendered.yaml"
    file.write_text(render(*values))
    done = subprocess.run(
        [sys.executable, "-m", "kubernetes_validate", "--kubernetes-version", "1.33", "--strict", str(file)],
        env={**os.environ, "PYTHONPATH": str(TOOLS / "lib")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed for resource") == len(objects(*values)) > 9


@needs_helm
def test_helm_finds_no_fault_and_asks_for_what_is_missing() -> None:
    assert HELM is not None
    lint = subprocess.run([HELM, "lint", "--strict", str(CHART), *BASE], capture_output=True, text=True, timeout=60)
    assert lint.returncode == 0, lint.stdout + lint.stderr
    bare = subprocess.run([HELM, "template", "x", str(CHART)], capture_output=True, text=True, timeout=60)
    assert "name one with Python, the script, and varuna-train[torch]" in bare.stderr


@needs_helm
def test_the_manager_may_scale_its_own_set_and_nothing_else() -> None:
    found = objects()
    agents = AgentSet("ml/gpt2-agent", url="http://127.0.0.1:9")  # whose calls these are
    assert agents._scale.endswith("/namespaces/ml/statefulsets/gpt2-agent/scale")
    assert agents._secret.endswith("/namespaces/ml/secrets/gpt2-agent-join")
    assert found["Role", "gpt2-manager"]["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": ["gpt2-agent"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["gpt2-agent-join"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["list"]},
    ]
    assert found["StatefulSet", "gpt2-agent"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@needs_helm
def test_manager_and_agents_run_the_same_job_and_find_each_other() -> None:
    found = objects("--set", "nodes=4:32")
    manager, agents = found["StatefulSet", "gpt2-manager"], found["StatefulSet", "gpt2-agent"]
    job = ["/job/train.py", "--lr", "1e-3"]
    shell, script, name, nodes, address, *rest = container(manager)["command"]
    assert (shell, script, name, nodes) == ("/bin/sh", "/etc/varuna/manager.sh", "gpt2-agent", "4:32")
    assert rest == ["/var/lib/varuna/run", *job]
    assert container(agents)["command"][-len(job) - 1 :] == ["--", *job]
    assert address == "gpt2-manager.ml.svc"
    assert parse_invitation(f"varuna://{'t' * 20}@{address}:7070/{'ab' * 32}").host == address
    service = found["Service", "gpt2-manager"]["spec"]
    assert service["selector"] == manager["spec"]["template"]["metadata"]["labels"]
    assert [port["port"] for port in service["ports"]] == [7070]
    assert (manager["spec"]["replicas"], agents["spec"]["replicas"]) == (1, 0)  # the run asks for agents
    pods = agents["spec"]["template"]["spec"]
    assert pods["terminationGracePeriodSeconds"] > 25  # what an agent has after SIGTERM
    assert pods["volumes"][0]["secret"]["secretName"] == "gpt2-agent-join"
    budget = found["PodDisruptionBudget", "gpt2-agent"]["spec"]
    assert budget["selector"]["matchLabels"] == agents["spec"]["template"]["metadata"]["labels"]
    assert container(agents)["resources"]["limits"] == {"nvidia.com/gpu": 1}
    reachable = found["NetworkPolicy", "gpt2-agent"]["spec"]["ingress"][0]["from"]
    assert reachable == [{"podSelector": {"matchLabels": agents["spec"]["template"]["metadata"]["labels"]}}]
