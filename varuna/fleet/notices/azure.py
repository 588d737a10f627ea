"""Azure: Scheduled Events say half a minute or more ahead that this VM will be taken back, and wait for a yes."""

import json
import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from varuna.core.node_notices import NodeNotice, PreemptionNotice, spot_notice_at
from varuna.fleet.net.bounded_http import NoAnswerError
from varuna.fleet.notices.metadata import MetadataService

ENDPOINT_VARIABLE = "IMDS_ENDPOINT"
"""Names another address of the service, for us as for Azure's own tools."""
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_PRIORITY = "/metadata/instance/compute/priority?api-version=2021-02-01&format=text"
_LOCATION = "/metadata/instance/compute/location?api-version=2021-02-01&format=text"
_ZONE = "/metadata/instance/compute/zone?api-version=2021-02-01&format=text"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_HEADERS = {"Metadata": "true"}
_FIRST_TIMEOUT_S = 130.0  # the first question turns the service on for this VM, which takes up to two minutes
_TIMEOUT_S = 5.0
_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events that end the processes of a VM; ``Freeze`` only holds them for some seconds."""


class ScheduledEvent(NamedTuple):
    """An event of this VM."""

    identity: str
    notice: PreemptionNotice


def parse_events(body: str, vm: str, now_s: float) -> list[ScheduledEvent]:
    """Events that end this VM, the earliest first; those of other VMs of its scale set are listed beside them.

    Raises:
        ValueError: it is not a list of events.
    """
    content = json.loads(body)
    events = content.get("Events") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError("no list of events")
    ours = [found for event in events if (found := _parse_event(event, vm, now_s)) is not None]
    return sorted(ours, key=lambda event: event.notice.in_s)


def _parse_event(event: object, vm: str, now_s: float) -> ScheduledEvent | None:
    """``{"EventId": "A-1", "EventType": "Preempt", "Resources": ["vm_1"], "NotBefore": "Mon, 19 Sep 2016 ..."}``.

    An event that has begun has no time.
    """
    if not isinstance(event, dict):
        return None
    identity, kind, resources = event.get("EventId"), event.get("EventType"), event.get("Resources")
    if not isinstance(identity, str) or kind not in _ENDS or not isinstance(resources, list):
        return None
    if vm.lower() not in (name.lower() for name in resources if isinstance(name, str)):
        return None
    return ScheduledEvent(identity, spot_notice_at(kind, _time_of(event.get("NotBefore"), now_s), now_s))


def _time_of(text: object, now_s: float) -> float:
    """One that cannot be read is now: that the VM will go is the part that matters."""
    try:
        return parsedate_to_datetime(str(text)).timestamp() if text else now_s
    except (ValueError, OverflowError):
        return now_s


class AzureNotices:
    """Asks Scheduled Events.

    Args:
        service: where it is.
        now: the wall clock, with which Azure writes times.
    """

    name = "Azure"
    every_s = 1.0  # as Azure recommends, since the lead may be half a minute

    def __init__(self, service: MetadataService, now: Callable[[], float] = time.time) -> None:
        self._service, self._now = service, now
        self._vm, self._timeout_s = "", _FIRST_TIMEOUT_S
        self._told: tuple[str, ...] = ()

    def is_here(self) -> bool:
        """Return whether the service knows this VM's name."""
        try:
            answer = self._service.ask(_NAME, _HEADERS)
        except NoAnswerError:
            return False
        if answer.status != 200 or not re.fullmatch(r"[\w.-]{1,128}", answer.body):
            return False
        self._vm = answer.body
        return True

    def is_preemptible(self) -> bool:
        """Return whether it is a Spot VM.

        Raises:
            NoAnswerError: the service does not say.
        """
        return self._service.ask(_PRIORITY, _HEADERS).body.strip() == "Spot"

    def zone(self) -> str:
        """Return this machine's region and zone; many VMs are in no zone of their region.

        Raises:
            NoAnswerError: the service does not say.
        """
        region, zone = self._service.ask(_LOCATION, _HEADERS), self._service.ask(_ZONE, _HEADERS)
        if region.status != 200:
            raise NoAnswerError(f"status {region.status}")
        name = zone.body.strip() if zone.status == 200 else ""
        return f"{region.body.strip()}/{name}" if name else region.body.strip()

    def poll(self) -> list[NodeNotice]:
        """Return the notices that the service gives now.

        Raises:
            NoAnswerError: nothing that makes sense.
        """
        answer = self._service.ask(_EVENTS, _HEADERS, timeout_s=self._timeout_s)
        if answer.status != 200:
            raise NoAnswerError(f"status {answer.status}")
        try:
            events = parse_events(answer.body, self._vm, self._now())
        except ValueError as error:
            raise NoAnswerError(str(error)) from error
        self._timeout_s = _TIMEOUT_S
        self._told = tuple(event.identity for event in events)
        return [event.notice for event in events]

    def acknowledge(self) -> None:
        """Let the events begin that were told: nothing of value is on this VM any more.

        Raises:
            NoAnswerError: nobody took it; then they begin when they were announced for.
        """
        if self._told:
            asked = json.dumps({"StartRequests": [{"EventId": identity} for identity in self._told]})
            headers = {**_HEADERS, "Content-Type": "application/json"}
            answer = self._service.ask(_EVENTS, headers, method="POST", body=asked, timeout_s=_TIMEOUT_S)
            if answer.status >= 300:
                raise NoAnswerError(f"status {answer.status}")
