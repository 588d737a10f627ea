"""Finds out which cloud this machine is on, then listens for notices that it will be taken back."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from varuna.core.devices import is_zone
from varuna.core.node_notices import NodeNotice, Preemptible, PreemptionNotice, ZoneNotice
from varuna.fleet.net.bounded_http import NoAnswerError
from varuna.fleet.notices import aws as aws_notices
from varuna.fleet.notices import azure as azure_notices
from varuna.fleet.notices import gcp as gcp_notices
from varuna.fleet.notices.metadata import METADATA_URL, MetadataService

_LOOK_AFTER_S = (0.0, 5.0, 30.0)
"""Pauses before each look for a service: a machine that boots may have no network yet."""
_AFTER_A_FAULT_S = 5.0
_JOIN_S = 6.0


class CloudNotices(Protocol):
    """One cloud's metadata service, as far as it speaks of this machine."""

    name: str
    every_s: float
    """Seconds between two questions."""

    def is_here(self) -> bool:
        """Return whether this machine is on that cloud."""
        ...

    def is_preemptible(self) -> bool:
        """Return whether this machine was rented as one that may be taken back at any time.

        Raises:
            NoAnswerError: nobody says.
        """
        ...

    def zone(self) -> str:
        """Return this machine's place: its region, a slash and its zone, or the region alone.

        Raises:
            NoAnswerError: nobody says.
        """
        ...

    def poll(self) -> list[NodeNotice]:
        """Return the notices that the service gives now.

        Raises:
            NoAnswerError: nothing that makes sense.
        """
        ...

    def acknowledge(self) -> None:
        """This machine may be taken now.

        Raises:
            NoAnswerError: nobody took it.
        """
        ...


def clouds(environment: Mapping[str, str] = os.environ) -> list[CloudNotices]:
    """Those to look for: all three at the link-local address, or only those that the environment names."""
    aws, azure = environment.get(aws_notices.ENDPOINT_VARIABLE), environment.get(azure_notices.ENDPOINT_VARIABLE)
    gcp = environment.get(gcp_notices.ENDPOINT_VARIABLE)
    is_free = not (aws or azure or gcp)
    found: list[CloudNotices] = []
    if aws or is_free:
        found.append(aws_notices.AwsNotices(MetadataService(aws or METADATA_URL)))
    if azure or is_free:
        found.append(azure_notices.AzureNotices(MetadataService(azure or METADATA_URL)))
    if gcp or is_free:
        found.append(gcp_notices.GcpNotices(MetadataService(f"http://{gcp}" if gcp else METADATA_URL)))
    return found


class SpotNotices:
    """Asks on a thread, until the notice comes or it is closed; on a machine without a service it soon ends.

    Args:
        on_notice: gets each notice once, on that thread: where this machine is, that it is a spot machine, advice, and
            one end.
        among: clouds to look for.
        look_after_s: pauses before each look.
    """

    def __init__(
        self,
        on_notice: Callable[[NodeNotice], None],
        *,
        among: Sequence[CloudNotices] | None = None,
        look_after_s: Sequence[float] = _LOOK_AFTER_S,
    ) -> None:
        self._on_notice, self._look_after_s = on_notice, look_after_s
        self._among = clouds() if among is None else among
        self._cloud: CloudNotices | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="varuna-spot-notices", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop; returns once the thread is gone, or at most after six seconds: it holds nothing but a question."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def acknowledge(self) -> str:
        """Tell the cloud that this machine may be taken now; returns why it could not be told, or nothing."""
        try:
            if self._cloud is not None:
                self._cloud.acknowledge()
        except NoAnswerError as error:
            return f"{self._cloud.name} was not told that this machine may be taken now: {error}" if self._cloud else ""
        return ""

    def _run(self) -> None:
        self._cloud = self._find()
        told: list[type[NodeNotice]] = []
        is_placed = is_known = False
        while self._cloud is not None and not self._closed.is_set():
            pause_s = self._cloud.every_s
            notices: list[NodeNotice] = []
            with contextlib.suppress(NoAnswerError):  # then it is asked again; notices are worth more
                if not is_placed and is_zone(zone := self._cloud.zone()):
                    self._on_notice(ZoneNotice(zone=zone))
                is_placed = True
            with contextlib.suppress(NoAnswerError):
                if not is_known and self._cloud.is_preemptible():
                    self._on_notice(Preemptible())
                is_known = True
            try:
                notices = self._cloud.poll()
            except NoAnswerError:
                pause_s = _AFTER_A_FAULT_S  # the next poll asks again
            for notice in notices:
                if type(notice) not in told and not self._closed.is_set():
                    told.append(type(notice))
                    self._on_notice(notice)
            if PreemptionNotice in told:
                return
            self._closed.wait(pause_s)

    def _find(self) -> CloudNotices | None:
        for pause_s in self._look_after_s:
            if self._closed.wait(pause_s):
                return None
            for cloud in self._among:
                if cloud.is_here():
                    return cloud
        return None
