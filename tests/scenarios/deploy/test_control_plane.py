"""The Helm chart and `--on k8s` against a real API server with its controllers and scheduler, where its programs are.

No container engine is needed: pods are processes of this machine, in mount namespaces (`kubelet.py`).
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.deploy import control_plane, kubelet
from tests.scenarios.deploy.control_plane import ControlPlane
from tests.scenarios.deploy.kubelet import Kubelet
from tests.scenarios.launch import JOB, Alone
from tests.waiting import wait_for
from varuna.core.errors import FleetError
from varuna.extras.clouds.kubernetes import AgentSet
from varuna.fleet.engines.provider import CapacityError

ROOT = Path(__file__).parents[3]
CHART, TOOLS = ROOT / "deploy" / "helm" / "varuna", ROOT / ".kubernetes-tools"
HELM = shutil.which("helm") or shutil.which(str(TOOLS / "helm"))
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(HELM is None, reason="no helm: `make kubernetes-tools` gets it"),
    pytest.mark.skipif(bool(control_plane.why_not()), reason=control_plane.why_not() or "there is one"),
]
ML = "/api/v1/namespaces/ml"
SETS = "/apis/apps/v1/namespaces/ml/statefulsets"
ARGS = ("--steps", "60", "--dropout", "0.1", "--slow", "0.1")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    started = ControlPlane(tmp_path_factory.mktemp("plane"))
    try:
        started.done("POST", "/api/v1/namespaces", {"metadata": {"name": "ml"}})
        yield started
    finally:
        started.close()


def install(plane: ControlPlane, release: str, *values: str, verb: str = "install") -> str:
    assert HELM is not None
    base = ("--set", "image=registry.example/job:1", "--set", f"script={JOB}", "--set", "agents.gpus=0")
    return plane.helm(HELM, [verb, release, str(CHART), "--namespace", "ml", *base, *values])


@pytest.fixture
def release(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    name = "r" + str(abs(hash(request.node.name)))[:6]
    yield name
    assert HELM is not None
    plane.helm(HELM, ["uninstall", name, "--namespace", "ml", "--ignore-not-found"])


def inside(
    plane: ControlPlane, release: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], AgentSet]:
    """Return a function that makes agent sets as the manager's pod of this release would."""
    (folder / "token").write_text(plane.token_of("ml", f"{release}-manager"))
    (folder / "namespace").write_text("ml")
    shutil.copy(plane.authority, folder / "ca.crt")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(plane.port))
    return lambda name: AgentSet(name, account=folder)


def replicas(plane: ControlPlane, release: str) -> Any:
    return plane.done("GET", f"{SETS}/{release}-agent")["spec"]["replicas"]


def test_the_manager_may_do_its_work_and_nothing_else(
    plane: ControlPlane, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(plane, release)
    make = inside(plane, release, tmp_path, monkeypatch)
    agents = make(f"{release}-agent")
    agents.keep_join("varuna://somewhere")
    agents.resize(3)
    assert agents.read().desired == replicas(plane, release) == 3
    wait_for(lambda: len(plane.done("GET", f"{ML}/pods")["items"]) >= 3)
    wait_for(lambda: agents._listed())
    assert agents.read().running == 0  # there is no node
    with pytest.raises(
        FleetError, match=r"permissions are missing: .*cannot get resource .statefulsets/scale"
    ) as denied:
        make(f"{release}-manager").read()
    assert not isinstance(denied.value, CapacityError)
    token = (tmp_path / "token").read_text()
    for method, path in (
        ("GET", f"{ML}/secrets/{release}-agent-join"),
        ("GET", f"{ML}/secrets"),
        ("DELETE", f"{ML}/pods/{release}-agent-0"),
        ("PATCH", f"{SETS}/{release}-agent"),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("GET", "/api/v1/nodes"),
    ):
        assert plane.ask(method, path, {} if method == "PATCH" else None, token).status == 403, path
    (tmp_path / "token").write_text("stale")
    with pytest.raises(FleetError, match="permissions are missing: Unauthorized"):
        agents.read()


def test_an_upgrade_leaves_the_number_of_agents_to_the_run(plane: ControlPlane, release: str) -> None:
    install(plane, release)
    assert replicas(plane, release) == 0
    plane.done("PATCH", f"{SETS}/{release}-agent/scale", {"spec": {"replicas": 2}})
    install(plane, release, "--set", "nodes=1:8", verb="upgrade")
    assert replicas(plane, release) == 2


def test_what_keeps_pods_away_is_said_in_kubernetes_words(
    plane: ControlPlane, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(plane, release, "--set", "agents.resources.requests.cpu=1000")
    agents = inside(plane, release, tmp_path, monkeypatch)(f"{release}-agent")
    agents.resize(1)
    agents.read()

    def complaint() -> str:
        try:
            agents.complain()
        except CapacityError as error:
            return str(error)
        return ""

    wait_for(complaint)
    assert re.search(rf"no such machines now: pod {release}-agent-0 has no node: .*nodes? .*available", complaint())
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    plane.done("POST", f"{ML}/resourcequotas", quota)
    try:
        agents.resize(0)
        wait_for(lambda: not agents._listed())
        wait_for(lambda: plane.done("GET", f"{ML}/resourcequotas/few").get("status", {}).get("used"))
        agents.resize(4)

        def is_said() -> bool:
            agents.read()
            return "exceeded quota" in complaint()

        wait_for(is_said, 20)
        assert "does not allow more: the quota is used up" in complaint()
    finally:
        plane.done("DELETE", f"{ML}/resourcequotas/few")


def test_a_run_in_pods_that_are_deleted_has_the_losses_of_one_process(
    plane: ControlPlane, tmp_path: Path, alone: Alone
) -> None:
    if why := kubelet.why_not():
        pytest.skip(why)
    assert HELM is not None
    undisturbed = alone(60, "--dropout", "0.1")
    volume = {"capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/none"}}
    plane.done("POST", "/api/v1/persistentvolumes", {"metadata": {"name": "run"}, "spec": volume})
    plane.add_node("here", cpu="16", memory="64Gi", **{"ephemeral-storage": "100Gi"})
    node = Kubelet(
        plane, "here", tmp_path / "node", {"varuna": kubelet.program(sys.executable, "-m", "varuna.cli.main")}
    )
    try:
        install(plane, "gpt2", "--set", "nodes=2:2", "--set-json", f"args={json.dumps(ARGS)}")

        def said() -> str:
            assert not node.errors, node.errors
            return node.said("gpt2-manager-0")

        def until_step(step: int) -> None:
            wait_for(lambda: re.search(rf"^step {step} loss", said(), re.MULTILINE))

        until_step(3)
        assert replicas(plane, "gpt2") == 2
        plane.done("DELETE", f"{ML}/pods/gpt2-agent-1")
        until_step(20)
        plane.done("DELETE", f"{ML}/pods/gpt2-manager-0")
        wait_for(lambda: "training is over" in said(), 200)
        wait_for(lambda: replicas(plane, "gpt2") == 0)
        # What a script prints while the manager is away is in its worker's log only.
        losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", said(), re.MULTILINE)}
        assert len(losses) >= 20
        assert all(loss == pytest.approx(undisturbed[step], rel=1e-5) for step, loss in losses.items())
        assert "done   60 steps in" in said()
        assert f"to {undisturbed[59]:.4f} " in said()
        plane.helm(HELM, ["uninstall", "gpt2", "--namespace", "ml"])
        wait_for(lambda: not plane.done("GET", f"{ML}/pods")["items"])
    finally:
        node.close()
