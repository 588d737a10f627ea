"""Local servers that speak as much of Azure's, Google's and Kubernetes' APIs as a group with a size needs."""

import json
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.unit.fleet.metadata import Service

TOKEN = "a-token"


class Group(Service):
    """A group's state, what was asked, and what is answered instead of the truth, if anything is."""

    desired: ClassVar[int] = 1
    missing: ClassVar[int] = 0
    """Of the desired machines, those that do not start."""
    instead: ClassVar[tuple[int, Any] | None] = None
    """Status and JSON of every answer to a change."""
    asked: ClassVar[list[str]] = []

    @classmethod
    def begin(cls) -> None:
        cls.desired, cls.missing, cls.instead, cls.asked = 1, 0, None, []

    def json(self, content: object, status: int = 200, **headers: str) -> None:
        self.say(status, json.dumps(content), "application/json", **headers)

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")

    def is_denied(self) -> bool:
        """Answers whoever has no token."""
        denied = self.headers.get("Authorization") != f"Bearer {TOKEN}"
        if denied:
            self.json({"error": {"code": "AuthenticationFailed", "message": "no token"}}, 401)
        return denied

    def change(self, nodes: int) -> bool:
        """Whether the change is done; else something was answered."""
        type(self).asked = [*self.asked, f"{self.command} {self.path}"]
        if self.instead is not None:
            self.json(self.instead[1], self.instead[0])
            return False
        type(self).desired = nodes
        return True


class Azure(Group):
    """Resource Manager: one scale set, whose machines come on pages of two."""

    PATH = "/subscriptions/s-1/resourceGroups/rg/providers/Microsoft.Compute/virtualMachineScaleSets/trainers"
    ends_with: ClassVar[dict[str, Any]] = {"status": "InProgress"}
    """End of the newest change."""
    state: ClassVar[str] = "Succeeded"
    stopped: ClassVar[int] = 0
    next_host: ClassVar[str] = ""

    @classmethod
    def begin(cls) -> None:
        super().begin()
        cls.ends_with, cls.state, cls.stopped, cls.next_host = {"status": "InProgress"}, "Succeeded", 0, ""

    @property
    def here(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked = parse_qs(parts.query)
        if self.is_denied():
            return
        if "api-version" not in asked:
            self.json({"error": {"code": "MissingApiVersionParameter", "message": "api-version"}}, 400)
        elif parts.path == self.PATH:
            sku = {"name": "Standard_NC24ads_A100_v4", "tier": "Standard", "capacity": self.desired}
            self.json({"name": "trainers", "sku": sku, "properties": {"provisioningState": self.state}})
        elif parts.path == f"{self.PATH}/virtualMachines":
            self.json(self.machines(int(asked.get("$skiptoken", ["0"])[0])))
        elif parts.path == "/operations/1":
            self.json(self.ends_with)
        else:
            message = f"The Resource '{parts.path}' was not found."
            self.json({"error": {"code": "ResourceNotFound", "message": message}}, 404)

    def machines(self, first: int) -> dict[str, Any]:
        def machine(number: int) -> dict[str, Any]:
            power = "deallocated" if number < self.stopped else "running"
            view = {"statuses": [{"code": "ProvisioningState/succeeded"}, {"code": f"PowerState/{power}"}]}
            return {"name": f"trainers_{number}", "properties": {"instanceView": view}}

        there = range(max(0, self.desired - self.missing))
        page: dict[str, Any] = {"value": [machine(number) for number in there[first : first + 2]]}
        if first + 2 < len(there):
            host = self.next_host or self.here
            page["nextLink"] = f"{host}{self.PATH}/virtualMachines?api-version=1&$skiptoken={first + 2}"
        return page

    def do_PATCH(self) -> None:
        sku = self.body()["sku"]
        if not self.is_denied() and self.change(sku["capacity"]):
            assert sku["name"] == "Standard_NC24ads_A100_v4"
            self.json({}, 202, Azure_AsyncOperation=f"{self.here}/operations/1?api-version=1")


class Google(Group):
    """Compute Engine: one managed instance group."""

    PATH = "/compute/v1/projects/p-1/zones/us-central1-a/instanceGroupManagers/trainers"
    error: ClassVar[dict[str, Any] | None] = None
    """Of machines that do not start."""

    @classmethod
    def begin(cls) -> None:
        super().begin()
        cls.error = None

    def do_GET(self) -> None:
        if self.is_denied():
            return
        if self.path == self.PATH:
            self.json({"kind": "compute#instanceGroupManager", "targetSize": self.desired})
        else:
            error = {"code": 404, "message": f"{self.path} was not found", "errors": [{"reason": "notFound"}]}
            self.json({"error": error}, 404)

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        if self.is_denied():
            return
        if parts.path == f"{self.PATH}/listManagedInstances":
            self.json(self.instances())
        elif parts.path == f"{self.PATH}/resize" and self.change(int(parse_qs(parts.query)["size"][0])):
            self.json({"kind": "compute#operation", "status": "RUNNING"})

    def instances(self) -> dict[str, Any]:
        running = [{"instanceStatus": "RUNNING", "currentAction": "NONE"}] * (self.desired - self.missing)
        waiting: dict[str, Any] = {"currentAction": "CREATING"}
        if self.error is not None:
            waiting["lastAttempt"] = {"errors": {"errors": [self.error]}}
        return {"managedInstances": [*running, *[waiting] * self.missing]}


class Kubernetes(Group):
    """The API server: one StatefulSet's scale, its pods, and a Secret."""

    PATH = "/apis/apps/v1/namespaces/ml/statefulsets/agents/scale"
    secret: ClassVar[dict[str, str]] = {}
    events: ClassVar[list[dict[str, Any]] | None] = None
    """Of pods that cannot be made, which then are not there at all; None: the manager may not read them."""

    @classmethod
    def begin(cls) -> None:
        super().begin()
        cls.secret, cls.events = {}, None

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if self.is_denied():
            return
        if parts.path == self.PATH:
            self.json(self.scale())
        elif parts.path == "/api/v1/namespaces/ml/pods" and unquote(parts.query) == "labelSelector=app=agents,part=x/y":
            self.json({"kind": "PodList", "items": self.pods()})
        elif self.events is not None and unquote(parts.query).endswith(
            "involvedObject.name=agents,reason=FailedCreate"
        ):
            self.json({"kind": "EventList", "items": self.events})
        else:
            self.refuse(404, "NotFound", f'statefulsets.apps "{parts.path}" not found')

    def do_PATCH(self) -> None:
        body = self.body()
        if self.is_denied():
            return
        if self.headers["Content-Type"] != "application/merge-patch+json":
            self.refuse(415, "UnsupportedMediaType", "merge patches only")
        elif self.path == "/api/v1/namespaces/ml/secrets/agents-join":
            type(self).secret = body["data"]
            self.json({"kind": "Secret"})
        elif self.path == self.PATH and self.change(body["spec"]["replicas"]):
            self.json(self.scale())

    def refuse(self, status: int, reason: str, message: str) -> None:
        self.json({"kind": "Status", "status": "Failure", "reason": reason, "message": message}, status)

    def scale(self) -> dict[str, Any]:
        status = {"replicas": self.desired, "selector": "app=agents,part=x/y"}
        return {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": {"replicas": self.desired}, "status": status}

    def pods(self) -> list[dict[str, Any]]:
        running = {"spec": {"nodeName": "n"}, "status": {"phase": "Running"}}
        why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}]
        pending = {
            "metadata": {"name": "agents-2"},
            "spec": {},
            "status": {"phase": "Pending", "conditions": conditions},
        }
        return [running] * (self.desired - self.missing) + [pending] * (0 if self.events else self.missing)
