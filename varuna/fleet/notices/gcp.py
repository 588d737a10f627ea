"""Google Cloud: the metadata server answers as soon as a VM is preempted, half a minute before it is gone."""

from pathlib import Path
from urllib.parse import quote

from varuna.core.node_notices import NodeNotice, PreemptionNotice, spot_notice
from varuna.fleet.net.bounded_http import Answer, NoAnswerError
from varuna.fleet.notices.metadata import MetadataService

ENDPOINT_VARIABLE = "GCE_METADATA_HOST"
"""Names another host of the service (``HOST`` or ``HOST:PORT``), for us as for Google's own tools."""
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
_SCHEDULING = "/computeMetadata/v1/instance/scheduling/preemptible"
_ZONE = "/computeMetadata/v1/instance/zone"
_FLAVOUR = {"Metadata-Flavor": "Google"}
_HANGS_S = 10
"""Seconds for which the server may keep a question open until something changes."""
_PREEMPTION_LEAD_S = 30.0
_MAINTENANCE_LEAD_S = 60.0
_GPU_MAINTENANCE_LEAD_S = 3600.0  # VMs with GPUs cannot be migrated, and are told an hour ahead


def parse_preempted(body: str) -> PreemptionNotice | None:
    """``TRUE`` or ``FALSE``.

    Raises:
        ValueError: it is neither.
    """
    match body.strip():
        case "TRUE":
            return spot_notice("preempted", _PREEMPTION_LEAD_S)
        case "FALSE":
            return None
    raise ValueError(f"preempted is {body[:40]!r}")


def parse_maintenance(body: str, *, has_gpu: bool) -> PreemptionNotice | None:
    """``TERMINATE_ON_HOST_MAINTENANCE`` ends the VM. ``NONE`` does not, nor does ``MIGRATE_ON_HOST_MAINTENANCE``."""
    if body.strip() != "TERMINATE_ON_HOST_MAINTENANCE":
        return None
    return spot_notice("host maintenance", _GPU_MAINTENANCE_LEAD_S if has_gpu else _MAINTENANCE_LEAD_S)


class GcpNotices:
    """Asks the metadata server.

    Args:
        service: where it is.
        has_gpu: whether this VM is told of maintenance an hour ahead; by default, whether there is an NVIDIA device.
    """

    name = "Google Cloud"
    every_s = 1.0  # the server itself holds the question until something changes

    def __init__(self, service: MetadataService, has_gpu: bool | None = None) -> None:
        self._service = service
        self._has_gpu = Path("/dev/nvidiactl").exists() if has_gpu is None else has_gpu
        self._etag = ""

    def is_here(self) -> bool:
        """Return whether Google's own header is in the answer."""
        try:
            self._ask(_PREEMPTED)
        except NoAnswerError:
            return False
        return True

    def is_preemptible(self) -> bool:
        """Return whether it is a Spot VM, or a preemptible one.

        Raises:
            NoAnswerError: the server does not say.
        """
        return self._ask(_SCHEDULING).body.strip() == "TRUE"

    def zone(self) -> str:
        """Return this machine's region and zone: a zone is called as its region, with a dash and a letter.

        Raises:
            NoAnswerError: the server does not say.
        """
        zone = self._ask(_ZONE).body.strip().rpartition("/")[2]  # projects/123/zones/us-central1-a
        return f"{zone.rpartition('-')[0]}/{zone}"

    def poll(self) -> list[NodeNotice]:
        """Return the notices that the server gives now, or as soon as they change; the first time at once.

        Raises:
            NoAnswerError: nothing that makes sense.
        """
        # With the tag of what was heard last, a change between two questions is answered at once.
        known = f"?wait_for_change=true&timeout_sec={_HANGS_S}&last_etag={quote(self._etag)}" if self._etag else ""
        answer = self._ask(_PREEMPTED + known, 5.0 + _HANGS_S)
        try:
            preempted = parse_preempted(answer.body)
        except ValueError as error:
            raise NoAnswerError(str(error)) from error
        self._etag = answer.headers.get("etag", "")
        if preempted is not None:
            return [preempted]
        maintenance = parse_maintenance(self._ask(_MAINTENANCE).body, has_gpu=self._has_gpu)
        return [] if maintenance is None else [maintenance]

    def acknowledge(self) -> None:
        """Google waits for nobody."""

    def _ask(self, path: str, timeout_s: float = 2.0) -> Answer:
        answer = self._service.ask(path, _FLAVOUR, timeout_s=timeout_s)
        if answer.headers.get("metadata-flavor") != "Google":
            raise NoAnswerError("the answer has no Metadata-Flavor: Google")
        if answer.status != 200:
            raise NoAnswerError(f"status {answer.status}")
        return answer
