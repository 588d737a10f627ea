"""AWS Auto Scaling, against moto's server over HTTP; launch failures, which moto has none of, by botocore's stubber."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto.server")

from botocore.stub import Stubber  # noqa: E402

from varuna.core.errors import FleetError  # noqa: E402
from varuna.extras.clouds.aws import AutoScalingGroup  # noqa: E402
from varuna.extras.clouds.group import GroupProvider  # noqa: E402
from varuna.extras.clouds.original_size import OriginalSize  # noqa: E402
from varuna.fleet.engines.provider import CapacityError  # noqa: E402

REGION, GROUP = "us-east-1", "varuna"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def client(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    autoscaling = boto3.client("autoscaling", REGION, endpoint_url=endpoint)
    autoscaling.create_launch_configuration(
        LaunchConfigurationName="spot", ImageId="ami-12c6146b", InstanceType="g4dn.xlarge", SpotPrice="0.5"
    )
    autoscaling.create_auto_scaling_group(
        AutoScalingGroupName=GROUP,
        LaunchConfigurationName="spot",
        MinSize=0,
        MaxSize=6,
        DesiredCapacity=1,
        AvailabilityZones=[f"{REGION}a"],
    )
    yield autoscaling
    autoscaling.delete_auto_scaling_group(AutoScalingGroupName=GROUP, ForceDelete=True)
    autoscaling.delete_launch_configuration(LaunchConfigurationName="spot")


def provider_in(run_dir: Path, endpoint: str, group: str = GROUP) -> GroupProvider:
    api = AutoScalingGroup(group, region=REGION, endpoint_url=endpoint)
    return GroupProvider(api, OriginalSize(run_dir, group))


def desired(client: Any) -> int:
    [group] = client.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"]
    return int(group["DesiredCapacity"])


@pytest.mark.nightly
def test_the_group_grows_and_shrinks_as_wished_and_is_given_back(client: Any, endpoint: str, tmp_path: Path) -> None:
    provider = provider_in(tmp_path, endpoint)
    provider.resize(4)
    assert (desired(client), provider.size()) == (4, 4)
    provider.resize(2)
    assert (desired(client), provider.size()) == (2, 2)
    provider.close()
    assert desired(client) == 1


@pytest.mark.nightly
def test_a_manager_that_starts_again_knows_the_size_from_before_the_run(
    client: Any, endpoint: str, tmp_path: Path
) -> None:
    provider_in(tmp_path, endpoint).resize(4)  # and it dies
    second = provider_in(tmp_path, endpoint)
    second.resize(5)
    second.close()
    assert desired(client) == 1
    client.set_desired_capacity(AutoScalingGroupName=GROUP, DesiredCapacity=2)  # before another run in this folder
    third = provider_in(tmp_path, endpoint)
    third.resize(3)
    third.close()
    assert desired(client) == 2


def test_the_groups_own_maximum_is_a_lack_of_capacity(client: Any, endpoint: str, tmp_path: Path) -> None:
    provider = provider_in(tmp_path, endpoint)
    with pytest.raises(CapacityError, match="maximum size of Auto Scaling group varuna is 6"):
        provider.resize(9)
    assert desired(client) == 6


def test_a_size_that_somebody_else_set_is_left_alone(client: Any, endpoint: str, tmp_path: Path) -> None:
    provider = provider_in(tmp_path, endpoint)
    provider.resize(4)
    client.set_desired_capacity(AutoScalingGroupName=GROUP, DesiredCapacity=3)
    with pytest.raises(FleetError, match=r"keeps the size 3, .* before this run it was 1"):
        provider.close()
    assert desired(client) == 3


def test_the_region_is_that_of_the_variable_that_errors_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert AutoScalingGroup(GROUP).region == "eu-north-1"


def test_a_group_that_does_not_exist_is_named(client: Any, endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="no Auto Scaling group 'nobody'"):
        provider_in(tmp_path, endpoint, "nobody")


def stubbed(provider: GroupProvider) -> Stubber:
    assert isinstance(provider._api, AutoScalingGroup)
    return Stubber(provider._api._client)


def group(desired_capacity: int, instances: int) -> dict[str, Any]:
    one = {
        "AutoScalingGroupName": GROUP,
        "MinSize": 0,
        "MaxSize": 6,
        "DesiredCapacity": desired_capacity,
        "DefaultCooldown": 0,
        "AvailabilityZones": ["a"],
        "HealthCheckType": "EC2",
        "CreatedTime": "2024-01-01T00:00:00Z",
        "Instances": [
            {
                "InstanceId": f"i-{number}",
                "AvailabilityZone": "a",
                "LifecycleState": "InService",
                "HealthStatus": "Healthy",
                "ProtectedFromScaleIn": False,
            }
            for number in range(instances)
        ],
    }
    return {"AutoScalingGroups": [one]}


def activity(status: str, message: str) -> dict[str, Any]:
    return {
        "ActivityId": "a",
        "AutoScalingGroupName": GROUP,
        "Cause": "c",
        "StartTime": "2024-01-01T00:00:00Z",
        "StatusCode": status,
        "StatusMessage": message,
    }


SPOT = "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request."


def test_a_launch_that_found_no_machine_is_a_lack_of_capacity(client: Any, endpoint: str, tmp_path: Path) -> None:
    provider = provider_in(tmp_path, endpoint)
    with stubbed(provider) as aws:
        aws.add_response("describe_auto_scaling_groups", group(4, 1))
        aws.add_response("describe_scaling_activities", {"Activities": [activity("Failed", SPOT)]})
        with pytest.raises(CapacityError, match="AWS has no such machines now: Could not launch Spot"):
            provider.resize(4)


def test_an_old_failure_behind_a_success_is_no_news(client: Any, endpoint: str, tmp_path: Path) -> None:
    provider = provider_in(tmp_path, endpoint)
    with stubbed(provider) as aws:
        aws.add_response("describe_auto_scaling_groups", group(4, 1))
        answers = [activity("Successful", "launched"), activity("Failed", SPOT)]
        aws.add_response("describe_scaling_activities", {"Activities": answers})
        provider.resize(4)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("Throttling", CapacityError, "asks to retry later"),
        ("AccessDenied", FleetError, "AWS refused, because permissions are missing: set_desired_capacity"),
    ],
)
def test_throttling_is_asked_again_and_a_refusal_is_not(
    client: Any, endpoint: str, tmp_path: Path, code: str, kind: type[FleetError], message: str
) -> None:
    provider = provider_in(tmp_path, endpoint)
    with stubbed(provider) as aws:
        aws.add_response("describe_auto_scaling_groups", group(1, 1))
        aws.add_client_error("set_desired_capacity", code, "no")
        with pytest.raises(kind, match=message) as caught:
            provider.resize(4)
    assert type(caught.value) is kind
