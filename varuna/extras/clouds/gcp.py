"""Google Cloud managed instance groups, by Compute Engine's REST API.

Needs the extra ``gcp``, and these permissions: compute.instanceGroupManagers.get and .update (the role
roles/compute.instanceAdmin.v1 has them).
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

ENDPOINT_VARIABLE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
"""Names another address of the API, for us as for gcloud."""
_ENDPOINT = "https://compute.googleapis.com/compute/v1/"
_SCOPE = "https://www.googleapis.com/auth/compute"
_NAME = r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
_RUNS = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING")
_PAGES = 40
_CODES = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": Refusal.CAPACITY,
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": Refusal.CAPACITY,
    "QUOTA_EXCEEDED": Refusal.QUOTA,
    "quotaExceeded": Refusal.QUOTA,
    "rateLimitExceeded": Refusal.THROTTLED,
    "userRateLimitExceeded": Refusal.THROTTLED,
    "RATE_LIMIT_EXCEEDED": Refusal.THROTTLED,
    "resourceNotReady": Refusal.THROTTLED,
}


def resource_path(where: str) -> str:
    """Return the path of a managed instance group, from ``PROJECT/ZONE/NAME`` or ``PROJECT/REGION/NAME``.

    Raises:
        UsageError: it is neither.
    """
    found = re.fullmatch(rf"((?:[a-z0-9.]+:)?{_NAME})/({_NAME})/({_NAME})", where)
    if found is None:
        raise UsageError(
            f"--on gcp:{where}: name a managed instance group as PROJECT/ZONE/NAME or PROJECT/REGION/NAME."
        )
    project, place, name = found.groups()
    kind = "zones" if re.search(r"-[a-z]$", place) else "regions"
    return f"/projects/{project}/{kind}/{place}/instanceGroupManagers/{name}"


def explain(status: int, error: object) -> FleetError:
    """Return the error that Google's ``{"code": 403, "message": ..., "errors": [{"reason": ...}]}`` means."""
    fields = error if isinstance(error, dict) else {}
    reasons = [str(one.get("reason", "")) for one in _dicts(fields.get("errors"))]
    known = [reason for reason in reasons if reason in _CODES]
    code = (known or reasons or [str(fields.get("status", ""))])[0]
    why = _CODES.get(code) or by_status(status)
    return refused("Google Cloud", why, str(fields.get("message") or f"status {status}"), code)


def complaint(instances: list[dict[str, Any]]) -> FleetError | None:
    """Say why machines of a group do not start: the error of one's newest attempt, or nothing."""
    for instance in instances:
        attempt = instance.get("lastAttempt")
        errors = attempt.get("errors") if isinstance(attempt, dict) else None
        if instance.get("instanceStatus") in _RUNS or not isinstance(errors, dict):
            continue
        for error in _dicts(errors.get("errors")):
            code = str(error.get("code", ""))
            return refused("Google Cloud", _CODES.get(code, Refusal.FAULT), str(error.get("message", "")), code)
    return None


def _dicts(listed: object) -> list[dict[str, Any]]:
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


class InstanceGroup:
    """One managed instance group, of a zone or a region.

    Args:
        where: ``PROJECT/ZONE/NAME`` or ``PROJECT/REGION/NAME``.
        api: Compute Engine's; None: where the environment says, with the token that google-auth finds, as for Google's
            own tools.

    Raises:
        UsageError: the name or the address is none, or google-auth is not installed.
    """

    def __init__(self, where: str, *, api: Rest | None = None) -> None:
        self._path = resource_path(where)
        self.name = f"instance group {where.rpartition('/')[2]}"
        self._rest = api or Rest("Google Cloud", os.environ.get(ENDPOINT_VARIABLE) or _ENDPOINT, _adc())
        self._instances: list[dict[str, Any]] = []

    def read(self) -> GroupState:
        """Read the group's sizes; errors as of ``GroupApi``."""
        found = self._asked(self._rest.request("GET", self._path)).content
        if not isinstance(found.get("targetSize"), int):
            raise CapacityError(f"Google Cloud did not answer: no target size of {self.name}")
        self._instances = self._listed()
        running = sum(instance.get("instanceStatus") in _RUNS for instance in self._instances)
        return GroupState(desired=found["targetSize"], running=running)

    def resizing(self, nodes: int) -> str:
        """Return the call of ``resize``, to show."""
        return str(self._resizing(nodes))

    def resize(self, nodes: int) -> None:
        """Set the target size; errors as of ``GroupApi``."""
        self._asked(self._resizing(nodes))

    def complain(self) -> None:
        """Raise why a machine does not start, as of the newest ``read``: the group tries again by itself."""
        if (error := complaint(self._instances)) is not None:
            raise error

    def _listed(self) -> list[dict[str, Any]]:
        page, found = "", list[dict[str, Any]]()
        for _ in range(_PAGES):
            content = self._asked(self._rest.request("POST", f"{self._path}/listManagedInstances{page}")).content
            found += _dicts(content.get("managedInstances"))
            following = str(content.get("nextPageToken") or "")
            if not re.fullmatch(r"[\w=+/.-]+", following):
                return found
            page = f"?pageToken={following.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}"
        raise CapacityError(f"Google Cloud did not answer: the list of machines of {self.name} does not end")

    def _resizing(self, nodes: int) -> HttpRequest:
        return self._rest.request("POST", f"{self._path}/resize?size={nodes}")

    def _asked(self, request: HttpRequest) -> RestAnswer:
        answer = self._rest.send(request)
        if not answer.is_ok:
            raise explain(answer.status, answer.content.get("error"))
        return answer


def _adc() -> Callable[[], str]:
    """Get tokens of the caller: a VM's service account, a key file, or ``gcloud auth application-default login``."""
    try:
        import google.auth
        from google.auth.transport.requests import Request as Transport
    except ImportError as error:
        needed = "managed instance groups need google-auth. Install it: pip install 'google-auth[requests]'"
        raise UsageError(needed) from error
    found: list[Any] = []

    def token() -> str:
        if not found:
            found.append(google.auth.default(scopes=[_SCOPE])[0])
        [credentials] = found
        if not credentials.valid:
            credentials.refresh(Transport())
        return str(credentials.token)

    return Bearer("Google Cloud", token, "Run `gcloud auth application-default login`, or use a VM of Google's.").token
