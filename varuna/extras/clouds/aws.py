"""AWS Auto Scaling: a group supplies instances that start an agent as they boot.

Needs the extra ``aws``, and these permissions of ``autoscaling``: SetDesiredCapacity, DescribeAutoScalingGroups,
DescribeScalingActivities.
"""

import os
from typing import Any

from varuna.core.errors import UsageError
from varuna.extras.clouds.group import GroupState
from varuna.extras.clouds.refusals import Refusal, refused

_AGAIN = (
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "ScalingActivityInProgress",
    "ResourceContention",
)
_QUOTA = ("max spot instance count", "limit", "quota")
_CAPACITY = ("capacity", "no spot")
_TIMEOUT_S = 10


def explain_activity(message: str) -> Refusal | None:
    """Read the refusal from a failed launch's message, if it is about machines: Auto Scaling gives no codes."""
    words = message.lower()
    if any(word in words for word in _QUOTA):
        return Refusal.QUOTA
    return Refusal.CAPACITY if any(word in words for word in _CAPACITY) else None


class AutoScalingGroup:
    """One Auto Scaling group.

    Args:
        group: its name.
        region: such as ``us-east-1``; by default that of AWS_REGION, which boto3 does not read, or what boto3 finds.
        endpoint_url: of a stand-in for AWS; by default AWS itself.

    Raises:
        UsageError: boto3 is not installed, or knows no region.
    """

    def __init__(self, group: str, *, region: str | None = None, endpoint_url: str | None = None) -> None:
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise UsageError("AWS Auto Scaling needs boto3. Install it: pip install boto3") from error
        config = Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"max_attempts": 2})
        self._group, self.name = group, f"Auto Scaling group {group}"
        try:
            region = region or os.environ.get("AWS_REGION")
            self._client: Any = boto3.client("autoscaling", region, endpoint_url=endpoint_url, config=config)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(
                f"AWS cannot be used: {str(error).rstrip('.')}. Set AWS_REGION and credentials."
            ) from error

        self.region = str(self._client.meta.region_name)

    def read(self) -> GroupState:
        """Read the group's sizes; errors as of ``GroupApi``."""
        found = self._call("describe_auto_scaling_groups", AutoScalingGroupNames=[self._group])["AutoScalingGroups"]
        if not found:
            raise refused("AWS", Refusal.GONE, f"no Auto Scaling group {self._group!r} in this region")
        [group] = found
        states = [instance["LifecycleState"] for instance in group["Instances"]]
        return GroupState(
            desired=group["DesiredCapacity"],
            running=sum(state.startswith(("Pending", "InService")) for state in states),
            least=group["MinSize"],
            most=group["MaxSize"],
        )

    def resizing(self, nodes: int) -> str:
        """Return the call of ``resize``, to show."""
        return f"autoscaling SetDesiredCapacity AutoScalingGroupName={self._group} DesiredCapacity={nodes}"

    def resize(self, nodes: int) -> None:
        """Set the desired capacity; errors as of ``GroupApi``."""
        self._call("set_desired_capacity", AutoScalingGroupName=self._group, DesiredCapacity=nodes)

    def complain(self) -> None:
        """Raise why the newest launch failed, if there were no machines."""
        activities = self._call("describe_scaling_activities", AutoScalingGroupName=self._group, MaxRecords=5)
        for activity in activities["Activities"]:
            message = str(activity.get("StatusMessage", ""))
            if activity["StatusCode"] == "Successful":
                return
            if activity["StatusCode"] == "Failed" and (why := explain_activity(message)) is not None:
                raise refused("AWS", why, message)

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            answer: dict[str, Any] = getattr(self._client, operation)(**arguments)
        except ClientError as error:
            code, text = error.response["Error"]["Code"], error.response["Error"]["Message"]
            why = Refusal.THROTTLED if code in _AGAIN else Refusal.FORBIDDEN if "Denied" in code else Refusal.WRONG
            raise refused("AWS", why, f"{operation} for group {self._group!r}: {text}", code) from error
        except NoCredentialsError as error:
            raise refused("AWS", Refusal.FORBIDDEN, str(error)) from error
        except BotoCoreError as error:
            raise refused("AWS", Refusal.FAULT, f"no answer: {error}") from error
        return answer
