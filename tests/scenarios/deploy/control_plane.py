"""A real control plane of Kubernetes on this machine: etcd, API server, controllers and scheduler, without any node."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.waiting import wait_for

SERVER = Path(__file__).parents[3] / ".kubernetes-tools" / "server"
_PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_TOKEN = "of-the-administrator"
_MERGE = "application/merge-patch+json"
_START_S = 60.0


def why_not() -> str:
    """Say why there can be no control plane here; empty if there can."""
    missing = [part for part in _PARTS if _program(part) is None]
    return f"no {', '.join(missing)} in PATH or {SERVER}" if missing else ""


def _program(part: str) -> str | None:
    return shutil.which(str(SERVER / part)) or shutil.which(part)


class Reply(NamedTuple):
    """An answer of the API server."""

    status: int
    content: dict[str, Any]


class ControlPlane:
    """Starts in a second or two, and ends with ``close``.

    Args:
        folder: of its data, logs and keys.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        etcd, peers, self.port = (_free_port() for _ in range(3))
        self.url = f"https://127.0.0.1:{self.port}"
        self.authority = folder / "certs" / "apiserver.crt"
        self._tls: ssl.SSLContext | None = None
        key, tokens = folder / "accounts.key", folder / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True, timeout=60)
        tokens.write_text(f'{_TOKEN},administrator,1,"system:masters"\n')
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(_kubeconfig(self.url))
        self.kubeconfig.chmod(0o600)
        try:
            self._start(
                "etcd", f"--data-dir={folder}/etcd", "--unsafe-no-fsync", f"--listen-peer-urls=http://127.0.0.1:{peers}",
                f"--listen-client-urls=http://127.0.0.1:{etcd}", f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            )  # fmt: skip
            issuer = "https://kubernetes.default.svc"
            self._start(
                "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1", f"--secure-port={self.port}", f"--cert-dir={folder}/certs",
                f"--token-auth-file={tokens}", "--authorization-mode=RBAC", f"--service-account-issuer={issuer}",
                f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
                "--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none",
                "--disable-admission-plugins=TaintNodesByCondition",  # no kubelet says that a node is ready
            )  # fmt: skip
            wait_for(self._is_ready, _START_S)
            clouds = ("nodelifecycle", "nodeipam", "route", "service", "cloud-node-lifecycle")
            without = ",".join(f"-{name}" for name in clouds)
            common = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1")
            self._start(
                "kube-controller-manager", *common, f"--controllers=*,{without}", f"--secure-port={_free_port()}",
                f"--service-account-private-key-file={key}", f"--root-ca-file={self.authority}",
            )  # fmt: skip
            self._start("kube-scheduler", *common, f"--secure-port={_free_port()}")
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, path: str, content: object = None, token: str = _TOKEN) -> Reply:
        """One request; a PATCH is a merge patch."""
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context(cafile=str(self.authority))
        kind = _MERGE if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind, "Accept": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:
                return Reply(answer.status, json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, json.loads(error.read()))

    def done(self, method: str, path: str, content: object = None) -> dict[str, Any]:
        """The answer to a request that is granted."""
        reply = self.ask(method, path, content)
        assert 200 <= reply.status < 300, (method, path, reply)
        return reply.content

    def add_node(self, name: str, **capacity: str) -> None:
        """A node that is ready, and on which nothing runs by itself."""
        self.done("POST", "/api/v1/nodes", {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}})
        has = {"pods": "20", **capacity}
        ready = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
        status = {"capacity": has, "allocatable": has, "conditions": ready}
        self.done("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})

    def token_of(self, namespace: str, account: str) -> str:
        """A token of a service account, as the kubelet gets it for a pod."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token: str = self.done("POST", path, {"spec": {"expirationSeconds": 3600}})["status"]["token"]
        return token

    def helm(self, helm: str, words: Sequence[str]) -> str:
        """Return the output of a command of Helm's; it must succeed."""
        done = subprocess.run(
            [helm, *words, "--kubeconfig", str(self.kubeconfig)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """End it; what it knew is lost."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)

    def _start(self, part: str, *words: str) -> None:
        with (self.folder / f"{part}.log").open("ab") as log:
            self._processes.append(subprocess.Popen([_program(part) or part, *words], stdout=log, stderr=log))

    def _is_ready(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, f"ended: {process.args!r}, see {self.folder}"
        if not self.authority.exists():
            return False
        with contextlib.suppress(OSError, ValueError):  # nobody listens yet, or says "ok" as plain text
            return self.ask("GET", "/api/v1/namespaces/default").status == 200
        return False


def _kubeconfig(url: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port
