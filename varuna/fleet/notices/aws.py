"""AWS: IMDSv2 says two minutes ahead when a spot instance is taken back, and often earlier that it may be."""

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime

from varuna.core.node_notices import NodeNotice, PreemptionNotice, RebalanceAdvice, spot_notice_at
from varuna.fleet.net.bounded_http import Answer, NoAnswerError
from varuna.fleet.notices.metadata import MetadataService

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Names another address of the service, for us as for AWS's own tools."""
_TOKEN_TTL_S = 21600
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_LIFE_CYCLE = "/latest/meta-data/instance-life-cycle"
_REGION, _ZONE = "/latest/meta-data/placement/region", "/latest/meta-data/placement/availability-zone"


def parse_instance_action(body: str, now_s: float) -> PreemptionNotice:
    """``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``.

    Raises:
        ValueError: it says something else.
    """
    content = _object(body)
    action, moment = content.get("action"), _moment(content.get("time"))
    if not isinstance(action, str):
        raise ValueError("no action")
    return spot_notice_at(action, moment.timestamp(), now_s)


def parse_rebalance(body: str) -> RebalanceAdvice:
    """``{"noticeTime": "2020-10-27T08:22:00Z"}``, the time of the advice.

    Raises:
        ValueError: it says something else.
    """
    _moment(_object(body).get("noticeTime"))
    return RebalanceAdvice(reason="AWS recommends to rebalance")


def _object(body: str) -> dict[str, object]:
    content = json.loads(body)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    return content


def _moment(text: object) -> datetime:
    if not isinstance(text, str):
        raise ValueError("no time")
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class AwsNotices:
    """Asks IMDSv2.

    Args:
        service: where it is.
        now: the wall clock, with which AWS writes the time.
    """

    name = "AWS"
    every_s = 5.0  # as AWS recommends

    def __init__(self, service: MetadataService, now: Callable[[], float] = time.time) -> None:
        self._service, self._now = service, now
        self._token = ""

    def is_here(self) -> bool:
        """Return whether the service gives a session token."""
        try:
            self._renew()
        except NoAnswerError:
            return False
        return True

    def is_preemptible(self) -> bool:
        """Return whether it is a spot instance.

        Raises:
            NoAnswerError: the service does not say.
        """
        return self._ask(_LIFE_CYCLE).body.strip() == "spot"

    def zone(self) -> str:
        """Return this machine's region and zone.

        Raises:
            NoAnswerError: the service does not say.
        """
        region, zone = self._ask(_REGION), self._ask(_ZONE)
        if region.status != 200 or zone.status != 200:
            raise NoAnswerError(f"status {zone.status}")
        return f"{region.body.strip()}/{zone.body.strip()}"

    def poll(self) -> list[NodeNotice]:
        """Return the notices that the service gives now.

        Raises:
            NoAnswerError: nothing that makes sense.
        """
        found: list[NodeNotice] = []
        try:
            if (action := self._ask(_ACTION)).status == 200:
                found.append(parse_instance_action(action.body, self._now()))
            if (advice := self._ask(_REBALANCE)).status == 200:
                found.append(parse_rebalance(advice.body))
        except ValueError as error:
            if not found:
                raise NoAnswerError(str(error)) from error
        return found

    def acknowledge(self) -> None:
        """AWS waits for nobody."""

    def _ask(self, path: str) -> Answer:
        """With a token; one that has expired is answered with 401 and made anew. 404: there is nothing."""
        if not self._token:
            self._renew()
        answer = self._service.ask(path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:
            self._renew()
            answer = self._service.ask(path, {"X-aws-ec2-metadata-token": self._token})
        return answer

    def _renew(self) -> None:
        self._token = ""
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        answer = self._service.ask("/latest/api/token", ttl, method="PUT")
        if answer.status != 200 or not re.fullmatch(r"[!-~]{1,1024}", answer.body):
            raise NoAnswerError(f"no token, but status {answer.status}")
        self._token = answer.body
