"""Kubernetes: a StatefulSet of agents, scaled through the API server's ``scale`` subresource alone.

Inside the cluster the pod's own service account is used. It needs the verbs get and patch on ``statefulsets/scale`` of
that one StatefulSet, list on pods, and patch on the one Secret ``NAME-join``. Outside, ``kubectl proxy`` answers on
loopback with the user's own rights.
"""

import base64
import os
import re
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

from varuna.core.errors import FleetError, UsageError
from varuna.extras.clouds.group import GroupState
from varuna.extras.clouds.refusals import Refusal, by_status, refused
from varuna.extras.clouds.rest import Bearer, Rest, RestAnswer
from varuna.fleet.engines.provider import CapacityError
from varuna.fleet.net.bounded_http import HttpRequest

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_QUOTA = "exceeded quota"
_MERGE = "application/merge-patch+json"


def explain(answer: RestAnswer) -> FleetError:
    """Return the error that Kubernetes' ``Status`` object means."""
    message, reason = str(answer.content.get("message", "")), str(answer.content.get("reason", ""))
    why = by_status(answer.status)
    if _QUOTA in message:
        why = Refusal.QUOTA
    return refused("Kubernetes", why, message or f"status {answer.status}", reason)


def unscheduled(pods: list[dict[str, Any]]) -> str:
    """Say why a pod has no node, in the scheduler's words; empty if all have one."""
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or []:
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                name = pod.get("metadata", {}).get("name", "a pod")
                return f"pod {name} has no node: {condition.get('message') or condition.get('reason')}"
    return ""


def not_created(events: list[dict[str, Any]]) -> str:
    """Say why a set cannot make its pods, by its newest event; empty if none says."""
    newest = max(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={})
    return str(newest.get("message", ""))


class AgentSet:
    """One StatefulSet of agents.

    Args:
        where: ``NAME`` in this pod's namespace, or ``NAMESPACE/NAME``.
        url: of the API server; by default this pod's.
        account: this pod's service account: token, authority and namespace.
        api: the API server's; None: that of ``url``, which asks for no token, or of this pod.

    Raises:
        UsageError: the name is none, or there is neither a pod nor an address.
    """

    def __init__(self, where: str, *, url: str = "", account: Path = ACCOUNT, api: Rest | None = None) -> None:
        self._account = account
        namespace, _, name = where.rpartition("/")
        is_inside = api is None and not url
        namespace = namespace or (self._of_account("namespace") if is_inside else "default")
        if not re.fullmatch(_NAME, name) or not re.fullmatch(_NAME, namespace):
            raise UsageError(f"--on k8s:{where}: name a StatefulSet as NAME or NAMESPACE/NAME.")
        self.name = f"StatefulSet {namespace}/{name}"
        self._scale = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}/scale"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        chosen = f"involvedObject.kind=StatefulSet,involvedObject.name={name},reason=FailedCreate"
        self._events = f"/api/v1/namespaces/{namespace}/events?fieldSelector={quote(chosen, safe='')}"
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{name}-join"
        self._rest = self._inside() if is_inside else api or Rest("Kubernetes", url, str)
        self._selector, self._desired = "", 0

    def read(self) -> GroupState:
        """Read the set's sizes; errors as of ``GroupApi``."""
        content = self._asked(self._rest.request("GET", self._scale)).content
        spec, status = content.get("spec"), content.get("status")
        if content.get("kind") != "Scale" or not isinstance(spec, dict) or not isinstance(status, dict):
            raise CapacityError(f"Kubernetes did not answer: no scale of {self.name}")
        self._selector = str(status.get("selector", ""))
        self._desired = int(spec.get("replicas", 0))
        return GroupState(desired=self._desired, running=self._running())

    def resizing(self, nodes: int) -> str:
        """Return the call of ``resize``, to show."""
        return str(self._resizing(nodes))

    def resize(self, nodes: int) -> None:
        """Set the number of replicas; errors as of ``GroupApi``."""
        self._asked(self._resizing(nodes))

    def complain(self) -> None:
        """Raise why a pod has no node, as the scheduler says, or why there is no pod, as the set's controller does."""
        pods = self._listed()
        if said := unscheduled(pods):
            raise refused("Kubernetes", Refusal.CAPACITY, said)
        if len(pods) < self._desired:
            answer = self._rest.get(self._events)
            items = answer.content.get("items")
            if answer.is_ok and isinstance(items, list) and (said := not_created(items)):
                raise refused("Kubernetes", Refusal.QUOTA if _QUOTA in said else Refusal.CAPACITY, said)

    def keep_join(self, join: str) -> None:
        """Put the JOIN string into the Secret that the pods mount; errors as of ``GroupApi``."""
        data = {"join": base64.b64encode(join.encode()).decode()}
        self._asked(self._rest.request("PATCH", self._secret, {"data": data}, _MERGE))

    def _running(self) -> int:
        """Return the pods that have a node and have not ended: a replica that waits for a node is no machine yet."""
        return sum(
            bool(pod.get("spec", {}).get("nodeName")) and pod.get("status", {}).get("phase") in ("Pending", "Running")
            for pod in self._listed()
        )

    def _listed(self) -> list[dict[str, Any]]:
        path = f"{self._pods}?labelSelector={quote(self._selector, safe='')}"
        content = self._asked(self._rest.request("GET", path)).content
        items = content.get("items")
        return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []

    def _resizing(self, nodes: int) -> HttpRequest:
        return self._rest.request("PATCH", self._scale, {"spec": {"replicas": nodes}}, _MERGE)

    def _asked(self, request: HttpRequest) -> RestAnswer:
        answer = self._rest.send(request)
        if not answer.is_ok:
            raise explain(answer)
        return answer

    def _inside(self) -> Rest:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise UsageError(
                "--on k8s: this is no pod of a cluster. Install the Helm chart, whose manager runs inside, or name an "
                "API server: --api-server http://127.0.0.1:8001 beside `kubectl proxy`."
            )
        self._of_account("ca.crt")
        tls = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        address = f"[{host}]" if ":" in host else host
        # The kubelet renews the file within the hour.
        bearer = Bearer("Kubernetes", lambda: self._of_account("token"), "The pod needs its service account's token.")
        return Rest("Kubernetes", f"https://{address}:{port}", bearer.token, tls)

    def _of_account(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--on k8s: this is no pod with a service account: {self._account / name} cannot be read. Install the "
                "Helm chart, whose manager runs inside the cluster, or add --api-server http://127.0.0.1:8001 beside "
                "`kubectl proxy`."
            ) from error
