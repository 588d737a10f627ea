"""AWS Auto Scaling: the run sets a desired size, and the group supplies instances that start an agent as they boot.

Needs the extra ``aws``, and these permissions of ``autoscaling``: SetDesiredCapacity, DescribeAutoScalingGroups,
DescribeScalingActivities.
"""

from typing import Any

from varuna.core.errors import FleetError, UsageError
from varuna.fleet.clouds.original_size import OriginalSize
from varuna.fleet.clouds.provider import CapacityError

# Words of Auto Scaling for a launch that failed because there were no machines, rather than no permission.
_NO_CAPACITY = ("capacity", "max spot instance count", "limit", "no spot")
_AGAIN = (
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "ScalingActivityInProgress",
    "ResourceContention",
)
_TIMEOUT_S = 10


class AutoScalingProvider:
    """One Auto Scaling group, whose own bounds stand above ours.

    Args:
        group: its name.
        before: keeps the size that it has before the first request, over managers' restarts.
        region: such as ``us-east-1``; by default the environment's.
        endpoint_url: of a stand-in for AWS; by default AWS itself.

    Raises:
        UsageError: boto3 is not installed, or knows no region.
        FleetError: there is no such group, or no permission.
    """

    def __init__(
        self, group: str, *, before: OriginalSize, region: str | None = None, endpoint_url: str | None = None
    ) -> None:
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise UsageError("AWS Auto Scaling needs boto3. Install it: pip install boto3") from error
        config = Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"max_attempts": 2})
        self._group, self._before = group, before
        try:
            self._client: Any = boto3.client("autoscaling", region, endpoint_url=endpoint_url, config=config)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"AWS cannot be used: {error}. Set AWS_REGION and credentials.") from error
        self._wished: int | None = None
        self._describe()

    def resize(self, nodes: int) -> None:
        """Set the group's desired capacity, within its bounds; says so if its last launch found no machine.

        Raises:
            CapacityError: the group's maximum is lower, AWS asks to retry later, or it has no such machines now.
            FleetError: no permission, or the group is gone.
        """
        group = self._describe()
        self._before.keep(group["DesiredCapacity"])
        allowed = min(max(nodes, group["MinSize"]), group["MaxSize"])
        if group["DesiredCapacity"] != allowed:
            self._call("set_desired_capacity", AutoScalingGroupName=self._group, DesiredCapacity=allowed)
        self._wished = allowed
        if allowed < nodes:
            raise CapacityError(f"the maximum size of Auto Scaling group {self._group} is {allowed}")
        if len(group["Instances"]) < allowed and (reason := self._refusal()):
            raise CapacityError(f"Auto Scaling group {self._group} could not start a machine: {reason}")

    def size(self) -> int:
        """Instances that run or start.

        Raises:
            CapacityError: AWS asks to retry later.
            FleetError: no permission, or the group is gone.
        """
        states = [instance["LifecycleState"] for instance in self._describe()["Instances"]]
        return sum(state.startswith(("Pending", "InService")) for state in states)

    def close(self) -> None:
        """Put the desired capacity back to what it was before the run, unless somebody else has changed it."""
        if self._wished is None:
            return
        now, before = self._describe()["DesiredCapacity"], self._before.keep(self._wished)
        if now == self._wished != before:
            self._call("set_desired_capacity", AutoScalingGroupName=self._group, DesiredCapacity=before)
        self._before.drop()

    def _describe(self) -> dict[str, Any]:
        found = self._call("describe_auto_scaling_groups", AutoScalingGroupNames=[self._group])["AutoScalingGroups"]
        if not found:
            raise FleetError(f"there is no Auto Scaling group {self._group!r} in this region. Check name and region.")
        group: dict[str, Any] = found[0]
        return group

    def _refusal(self) -> str:
        """Why the newest launch failed, if there were no machines."""
        activities = self._call("describe_scaling_activities", AutoScalingGroupName=self._group, MaxRecords=5)
        for activity in activities["Activities"]:
            message = str(activity.get("StatusMessage", ""))
            if activity["StatusCode"] == "Successful":
                return ""
            if activity["StatusCode"] == "Failed" and any(word in message.lower() for word in _NO_CAPACITY):
                return message
        return ""

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer: dict[str, Any] = getattr(self._client, operation)(**arguments)
        except ClientError as error:
            code, text = error.response["Error"]["Code"], error.response["Error"]["Message"]
            if code in _AGAIN:
                raise CapacityError(f"AWS asks to retry later ({code})") from error
            raise FleetError(f"AWS refused {operation} for group {self._group!r}: {text} ({code})") from error
        except BotoCoreError as error:
            raise CapacityError(f"AWS did not answer: {error}") from error
        return answer
