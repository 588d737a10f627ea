"""As much of a kubelet as this chart's pods need: each pod is a process in its own mount namespace; no image is read.

The pod's volumes lie where its container mounts them, `/etc/hosts` names the services, and the service account's token
is a real one. It takes root, or the right to make mount namespaces.
"""

import base64
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.scenarios.deploy.control_plane import ControlPlane

_LOOK_S = 0.2
_MOUNT = """
set -e
pod=$1; shift
mount -t tmpfs none /run
mkdir -p /run/etc/upper /run/etc/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work /etc
mount -t tmpfs none /var/lib
cp "$pod/hosts" /etc/hosts
while read -r from to; do mkdir -p "$to"; mount --bind "$from" "$to"; done < "$pod/mounts"
exec "$@"
"""


def why_not() -> str:
    """Say why pods cannot run here; empty if they can."""
    tried = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /run && mkdir -p /run/u /run/w && "
         "mount -t overlay o -o lowerdir=/etc,upperdir=/run/u,workdir=/run/w /etc"],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    return "" if tried.returncode == 0 else f"mount namespaces cannot be made here: {tried.stderr.strip()[:200]}"


class Pod:
    """One pod on this node; its container is started again whenever it ends."""

    def __init__(self, plane: ControlPlane, found: dict[str, Any], folder: Path, environment: dict[str, str]) -> None:
        self.plane, self.found, self.environment = plane, found, environment
        self.name, self.uid = found["metadata"]["name"], found["metadata"]["uid"]
        self.path = f"/api/v1/namespaces/{found['metadata']['namespace']}/pods/{self.name}"
        self.folder = folder / f"{self.name}-{self.uid[:8]}"
        self.folder.mkdir()
        self.log = folder / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def look(self) -> bool:
        """Do what is to be done now; False once the pod is gone."""
        reply = self.plane.ask("GET", self.path)
        is_gone = reply.status == 404 or reply.content["metadata"]["uid"] != self.uid
        if is_gone or reply.content["metadata"].get("deletionTimestamp"):
            if self.process is not None and self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(30)
                finally:
                    self.process.kill()
            if not is_gone:
                self.plane.ask("DELETE", self.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}})
            return False
        if (self.process is None or self.process.poll() is not None) and self._mounted():
            self._start()
        return True

    def _start(self) -> None:
        [container] = self.found["spec"]["containers"]
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", str(self.folder), *container["command"]],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**self.environment, "HOSTNAME": self.name},
                start_new_session=True,
            )
        true = [
            {"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        self.plane.ask("PATCH", f"{self.path}/status", {"status": {"phase": "Running", "conditions": true}})

    def _mounted(self) -> bool:
        """Whether all volumes are there: a Secret without its key is waited for."""
        spec = self.found["spec"]
        [container] = spec["containers"]
        where = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        mounts = []
        for volume in spec["volumes"]:
            source = self.folder / volume["name"]
            if "persistentVolumeClaim" in volume:
                source = self.folder.parent / volume["persistentVolumeClaim"]["claimName"]
            source.mkdir(exist_ok=True)
            if not self._filled(volume, source):
                return False
            if volume.get("emptyDir", {}).get("medium") != "Memory":
                mounts.append(f"{source} {where[volume['name']].replace('/var/run/', '/run/')}")
        (self.folder / "mounts").write_text("".join(f"{line}\n" for line in mounts))
        names = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in self._services())
        (self.folder / "hosts").write_text(names)
        return True

    def _services(self) -> list[str]:
        namespace = self.found["metadata"]["namespace"]
        items = self.plane.done("GET", f"/api/v1/namespaces/{namespace}/services")["items"]
        return [f"{one['metadata']['name']}.{namespace}.svc" for one in items]

    def _filled(self, volume: dict[str, Any], folder: Path) -> bool:
        base = self.path.rpartition("/pods/")[0]
        if (secret := volume.get("secret")) is not None:
            data = self.plane.done("GET", f"{base}/secrets/{secret['secretName']}").get("data") or {}
            if any(item["key"] not in data for item in secret["items"]):
                return False
            for item in secret["items"]:
                (folder / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
        elif (config := volume.get("configMap")) is not None:
            data = self.plane.done("GET", f"{base}/configmaps/{config['name']}")["data"]
            for name, text in data.items():
                (folder / name).write_text(text)
        elif "projected" in volume or str(volume["name"]).startswith("kube-api-access"):
            self._account(folder)
        return True

    def _account(self, folder: Path) -> None:
        namespace = self.found["metadata"]["namespace"]
        (folder / "token").write_text(self.plane.token_of(namespace, self.found["spec"]["serviceAccountName"]))
        (folder / "namespace").write_text(namespace)
        shutil.copy(self.plane.authority, folder / "ca.crt")


class Kubelet:
    """Runs what the scheduler puts on one node, on a thread of its own.

    Args:
        plane: whose pods.
        node: its name there.
        folder: of the pods' files and logs.
        commands: what the image would have in its PATH, each a line of a shell.
    """

    def __init__(self, plane: ControlPlane, node: str, folder: Path, commands: dict[str, str]) -> None:
        self._plane, self._node, self.folder = plane, node, folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name, line in commands.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (programs / name).chmod(0o755)
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("KUBE")},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "VARUNA_CALIBRATION": "none",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(plane.port),
        }
        self.pods: dict[str, Pod] = {}
        self.errors: list[BaseException] = []
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def said(self, pod: str) -> str:
        """Return the output of the containers of all pods of that name."""
        log = self.folder / f"{pod}.log"
        return log.read_text() if log.exists() else ""

    def close(self) -> None:
        """End all that runs."""
        self._closed.set()
        self._thread.join(30)
        for thread in self._threads:
            thread.join(60)
        for pod in self.pods.values():
            if pod.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pod.process.pid, signal.SIGKILL)
                pod.process.wait(30)

    def _look_on(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                found = self._plane.done("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self._node}")["items"]
            except Exception as error:  # the test says what the node could not do
                self.errors.append(error)
                return
            for one in found:
                uid = one["metadata"]["uid"]
                if uid not in self.pods:
                    self.pods[uid] = Pod(self._plane, one, self.folder, self._environment)
                    thread = threading.Thread(target=self._care, args=(self.pods[uid],), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _care(self, pod: Pod) -> None:
        try:
            while not self._closed.wait(_LOOK_S) and pod.look():
                pass
        except Exception as error:
            self.errors.append(error)


def program(*words: str) -> str:
    """A line of a shell that runs this."""
    return shlex.join(words)
