"""Azure virtual machine scale sets, by Azure Resource Manager's REST API.

Needs the extra ``azure``, and these permissions: Microsoft.Compute/virtualMachineScaleSets/read and /write, and
Microsoft.Compute/virtualMachineScaleSets/virtualMachines/read (the role Virtual Machine Contributor has them).
"""

import os
import re
from collections.abc import Callable
from typing import Any

from varuna.core.errors import FleetError, UsageError
from varuna.extras.clouds.group import GroupState
from varuna.extras.clouds.refusals import Refusal, by_status, refused
from varuna.extras.clouds.rest import Bearer, Rest, RestAnswer
from varuna.fleet.engines.provider import CapacityError
from varuna.fleet.net.bounded_http import HttpRequest

ENDPOINT_VARIABLE = "ARM_ENDPOINT"
"""Names another Resource Manager, such as that of Azure Government."""
_ENDPOINT = "https://management.azure.com"
_API = "api-version=2024-07-01"
_PART = r"[\w()-][\w.()-]{0,89}"
_PAGES = 40
_QUOTA = ("quota",)
_CODES = {
    "SkuNotAvailable": Refusal.CAPACITY,
    "AllocationFailed": Refusal.CAPACITY,
    "ZonalAllocationFailed": Refusal.CAPACITY,
    "OverconstrainedAllocationRequest": Refusal.CAPACITY,
    "OverconstrainedZonalAllocationRequest": Refusal.CAPACITY,
    "QuotaExceeded": Refusal.QUOTA,
    "TooManyRequests": Refusal.THROTTLED,
    "SubscriptionRequestsThrottled": Refusal.THROTTLED,
    "AnotherOperationInProgress": Refusal.THROTTLED,
    "OperationPreempted": Refusal.THROTTLED,
}


def resource_path(where: str) -> str:
    """Return the path of a scale set, from ``SUBSCRIPTION/GROUP/NAME`` or its whole resource ID.

    Raises:
        UsageError: it is neither.
    """
    found = re.fullmatch(
        rf"/?(?:subscriptions/)?({_PART})/(?:resourceGroups/)?({_PART})/"
        rf"(?:providers/Microsoft\.Compute/virtualMachineScaleSets/)?({_PART})",
        where,
        re.IGNORECASE,
    )
    if found is None:
        raise UsageError(f"--on azure:{where}: name a scale set as SUBSCRIPTION/RESOURCE_GROUP/NAME, or by its ID.")
    subscription, group, name = found.groups()
    return (
        f"/subscriptions/{subscription}/resourceGroups/{group}"
        f"/providers/Microsoft.Compute/virtualMachineScaleSets/{name}"
    )


def explain(status: int, error: object) -> FleetError:
    """Return the error that ``{"code": ..., "message": ...}`` means; operations that failed later have status 200."""
    fields = error if isinstance(error, dict) else {}
    code, message = str(fields.get("code", "")), str(fields.get("message", ""))
    why = _CODES.get(code)
    if why is None and any(word in message.lower() for word in _QUOTA):
        why = Refusal.QUOTA  # as OperationNotAllowed
    if why is None:
        why = Refusal.FAULT if 200 <= status < 300 else by_status(status)
    return refused("Azure", why, message or f"status {status}", code)


def is_evicted(machine: dict[str, Any]) -> bool:
    """Return whether a machine was stopped and keeps its place, as spot machines that are evicted do by default."""
    statuses = machine.get("properties", {}).get("instanceView", {}).get("statuses", [])
    return any(status.get("code") in ("PowerState/deallocated", "PowerState/deallocating") for status in statuses)


class ScaleSet:
    """One scale set.

    Args:
        where: ``SUBSCRIPTION/RESOURCE_GROUP/NAME``.
        api: Resource Manager; None: where the environment says, with the token that azure-identity finds, as for
            Azure's own tools.

    Raises:
        UsageError: the name or the address is none, or azure-identity is not installed.
    """

    def __init__(self, where: str, *, api: Rest | None = None) -> None:
        self._path = resource_path(where)
        self.name = f"scale set {self._path.rpartition('/')[2]}"
        self._rest = api or _resource_manager()
        self._sku: dict[str, Any] = {}
        self._operation = ""  # of the newest resize
        self._evicted = 0

    def read(self) -> GroupState:
        """Read the scale set's sizes; errors as of ``GroupApi``."""
        found = self._asked(self._rest.request("GET", f"{self._path}?{_API}")).content
        sku = found.get("sku")
        if not isinstance(sku, dict) or not isinstance(sku.get("capacity"), int):
            raise CapacityError(f"Azure did not answer: no capacity of {self.name}")
        self._sku = sku
        machines = self._machines()
        self._evicted = sum(map(is_evicted, machines))
        failed = sum(machine.get("properties", {}).get("provisioningState") == "Failed" for machine in machines)
        state = found.get("properties", {}).get("provisioningState")
        running = max(0, len(machines) - self._evicted - failed)
        return GroupState(desired=sku["capacity"], running=running, gave_up=state == "Failed")

    def resizing(self, nodes: int) -> str:
        """Return the call of ``resize``, to show."""
        return str(self._resizing(nodes))

    def resize(self, nodes: int) -> None:
        """Set the capacity; errors as of ``GroupApi``."""
        answer = self._asked(self._resizing(nodes))
        self._operation = answer.headers.get("azure-asyncoperation", "")

    def complain(self) -> None:
        """Raise how the newest resize ended, or that machines were evicted and stay stopped."""
        if self._operation:
            content = self._asked(self._rest.request("GET", self._operation)).content
            if content.get("status") in ("Failed", "Canceled"):
                self._operation = ""
                raise explain(200, content.get("error"))
        if self._evicted:
            said = f"{self._evicted} evicted machines of {self.name} are stopped, and keep their places"
            raise refused("Azure", Refusal.EVICTED, said)

    def _machines(self) -> list[dict[str, Any]]:
        path, machines = f"{self._path}/virtualMachines?{_API}&$expand=instanceView", list[dict[str, Any]]()
        for _ in range(_PAGES):
            content = self._asked(self._rest.request("GET", path)).content
            listed = content.get("value", [])
            machines += [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
            path = str(content.get("nextLink") or "")
            if not path:
                return machines
        raise CapacityError(f"Azure did not answer: the list of machines of {self.name} does not end")

    def _resizing(self, nodes: int) -> HttpRequest:
        sku = {name: self._sku[name] for name in ("name", "tier") if name in self._sku}
        return self._rest.request("PATCH", f"{self._path}?{_API}", {"sku": {**sku, "capacity": nodes}})

    def _asked(self, request: HttpRequest) -> RestAnswer:
        answer = self._rest.send(request)
        if not answer.is_ok:
            raise explain(answer.status, answer.content.get("error"))
        return answer


def _resource_manager() -> Rest:
    url = (os.environ.get(ENDPOINT_VARIABLE) or _ENDPOINT).rstrip("/")
    return Rest("Azure", url, _identity(url))


def _identity(url: str) -> Callable[[], str]:
    """Get tokens of the caller: a managed identity, a service principal, or ``az login``."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        needed = "Azure scale sets need azure-identity. Install it: pip install azure-identity"
        raise UsageError(needed) from error
    credential = DefaultAzureCredential(exclude_powershell_credential=True)
    scope = f"{url}/.default"
    remedy = "Run `az login`, or use a machine with a managed identity."
    return Bearer("Azure", lambda: str(credential.get_token(scope).token), remedy).token
