"""Notices of three clouds, against local servers that speak their metadata services, or lie."""

import json
import queue
import time
from collections.abc import Iterator

import pytest

from tests.depth import of_depth
from tests.unit.fleet.metadata import (
    LIES,
    AzureMetadata,
    GoogleMetadata,
    Metadata,
    lying,
    metadata_service,
    serving,
)
from varuna.core.node_notices import (
    LEAST_LEAD_S,
    NodeNotice,
    Preemptible,
    PreemptionNotice,
    RebalanceAdvice,
    ZoneNotice,
    spot_notice,
)
from varuna.fleet.net.bounded_http import NoAnswerError
from varuna.fleet.notices.aws import AwsNotices
from varuna.fleet.notices.azure import AzureNotices, parse_events
from varuna.fleet.notices.gcp import GcpNotices, parse_maintenance
from varuna.fleet.notices.metadata import MetadataService
from varuna.fleet.notices.spot_notices import CloudNotices, SpotNotices, clouds

ACTION = json.dumps({"action": "terminate", "time": "2017-09-18T08:22:00Z"})
AT_S = 1505722920.0
NOTICED = spot_notice("terminate", 120.0)
ADVICE = json.dumps({"noticeTime": "2017-09-18T08:00:00Z"})


@pytest.fixture
def aws() -> Iterator[AwsNotices]:
    with metadata_service() as url:
        yield AwsNotices(MetadataService(url), now=lambda: AT_S - 120)


@pytest.fixture
def azure() -> Iterator[AzureNotices]:
    AzureMetadata.events, AzureMetadata.approved, AzureMetadata.priority = [], [], "Regular"
    with serving(AzureMetadata) as url:
        yield AzureNotices(MetadataService(url), now=lambda: AT_S - 40)


@pytest.fixture
def google() -> Iterator[GcpNotices]:
    GoogleMetadata.preempted, GoogleMetadata.maintenance, GoogleMetadata.preemptible = "FALSE", "NONE", "FALSE"
    GoogleMetadata.changed.clear()
    GoogleMetadata.held.clear()
    with serving(GoogleMetadata) as url:
        yield GcpNotices(MetadataService(url), has_gpu=False)
        GoogleMetadata.changed.set()


def event(**other: object) -> dict[str, object]:
    return {
        "EventId": "A-1",
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["trainers_3"],
        "NotBefore": "Mon, 18 Sep 2017 08:22:00 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **other,
    }


# -- AWS


def test_aws_says_nothing_and_one_token_serves_many_questions(aws: AwsNotices) -> None:
    assert aws.is_here()
    assert [aws.poll() for _ in range(3)] == [[]] * 3
    assert Metadata.tokens_given == 1


def test_aws_says_when_the_machine_goes_and_that_it_may(aws: AwsNotices) -> None:
    Metadata.rebalance = ADVICE
    assert aws.poll() == [RebalanceAdvice(reason="AWS recommends to rebalance")]
    Metadata.action = ACTION
    assert aws.poll() == [NOTICED, RebalanceAdvice(reason="AWS recommends to rebalance")]
    Metadata.rebalance = "soon"
    assert aws.poll() == [NOTICED]  # what can be read counts


@pytest.mark.parametrize(("life_cycle", "found"), [("spot", True), ("on-demand", False), (None, False)])
def test_aws_says_whether_the_machine_is_a_spot_instance(aws: AwsNotices, life_cycle: str | None, found: bool) -> None:
    Metadata.life_cycle = life_cycle
    assert aws.is_here()
    assert aws.is_preemptible() == found


@pytest.mark.parametrize(("priority", "found"), [("Spot", True), ("Regular", False), ("", False)])
def test_azure_says_whether_the_machine_is_a_spot_vm(azure: AzureNotices, priority: str, found: bool) -> None:
    AzureMetadata.priority = priority
    assert azure.is_here()
    assert azure.is_preemptible() == found


@pytest.mark.parametrize(("preemptible", "found"), [("TRUE", True), ("FALSE", False), ("maybe", False)])
def test_google_says_whether_the_machine_is_a_spot_vm(google: GcpNotices, preemptible: str, found: bool) -> None:
    GoogleMetadata.preemptible = preemptible
    assert google.is_here()
    assert google.is_preemptible() == found


def test_a_time_that_has_passed_is_another_clocks(aws: AwsNotices) -> None:
    """Whoever is told still runs, so there are some seconds: an agent that took it literally would drop its state."""
    Metadata.action = json.dumps({"action": "terminate", "time": "2017-09-18T07:22:00Z"})
    assert aws.poll() == [spot_notice("terminate", LEAST_LEAD_S)]


def test_an_expired_token_is_renewed(aws: AwsNotices) -> None:
    aws.poll()
    Metadata.token, Metadata.action = "t1", ACTION
    assert aws.poll() == [NOTICED]
    assert Metadata.tokens_given == 2


@pytest.mark.parametrize("body", ["", "{", "[]", '{"action": "stop"}', '{"action": "stop", "time": 3}', '"x"'])
def test_an_action_that_makes_no_sense_is_no_notice(aws: AwsNotices, body: str) -> None:
    Metadata.action = body
    with pytest.raises(NoAnswerError):
        aws.poll()


# -- Azure


def test_azure_names_this_vm_and_waits_for_a_yes(azure: AzureNotices) -> None:
    assert azure.is_here()
    assert azure.poll() == []
    AzureMetadata.events = [event(Resources=["trainers_4"], EventId="B-2"), event(EventType="Freeze", EventId="C-3")]
    assert azure.poll() == []
    azure.acknowledge()
    assert AzureMetadata.approved == []
    AzureMetadata.events.append(event(Resources=["trainers_1", "TRAINERS_3"]))
    assert azure.poll() == [spot_notice("Preempt", 40.0)]
    azure.acknowledge()
    assert AzureMetadata.approved == ["A-1"]
    AzureMetadata.events = []
    with pytest.raises(NoAnswerError, match="status 400"):
        azure.acknowledge()


@pytest.mark.parametrize(
    ("other", "notices"),
    [
        ({"NotBefore": "", "EventStatus": "Started"}, [spot_notice("Preempt", LEAST_LEAD_S)]),
        ({"NotBefore": "Mon, 18 Sep 2007 08:22:00 GMT"}, [spot_notice("Preempt", LEAST_LEAD_S)]),
        ({"NotBefore": "tomorrow"}, [spot_notice("Preempt", LEAST_LEAD_S)]),
        ({"NotBefore": 7}, [spot_notice("Preempt", LEAST_LEAD_S)]),
        ({"EventType": "Reboot"}, [spot_notice("Reboot", 40.0)]),
        ({"EventType": "Party"}, []),
        ({"EventId": 7}, []),
        ({"Resources": "trainers_3"}, []),
        ({"Resources": [3, None]}, []),
        ({"Resources": []}, []),
    ],
)
def test_events_of_azure_are_read_with_care(other: dict[str, object], notices: list[PreemptionNotice]) -> None:
    body = json.dumps({"DocumentIncarnation": 1, "Events": ["junk", event(**other)]})
    assert [found.notice for found in parse_events(body, "trainers_3", AT_S - 40)] == notices


# -- Google Cloud


def test_google_says_so_as_soon_as_it_is_known(google: GcpNotices) -> None:
    assert google.is_here()
    assert google.poll() == []
    told: queue.Queue[NodeNotice] = queue.Queue()
    asking = SpotNotices(told.put, among=[google])
    asking.start()
    assert GoogleMetadata.held.wait(20)  # the question is open
    GoogleMetadata.preempted = "TRUE"
    GoogleMetadata.changed.set()
    assert told.get(timeout=20) == ZoneNotice(zone="us-central1/us-central1-a")
    assert told.get(timeout=20) == spot_notice("preempted", 30.0)
    asking.close()


def test_maintenance_ends_a_vm_that_cannot_migrate(google: GcpNotices) -> None:
    GoogleMetadata.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    assert google.poll() == []
    GoogleMetadata.changed.set()
    GoogleMetadata.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    assert google.poll() == [spot_notice("host maintenance", 60.0)]
    assert parse_maintenance("TERMINATE_ON_HOST_MAINTENANCE", has_gpu=True) == spot_notice("host maintenance", 3600.0)


# -- whichever it is


def every_cloud(service: MetadataService) -> list[CloudNotices]:
    return [AwsNotices(service), AzureNotices(service), GcpNotices(service)]


@pytest.mark.parametrize("lie", of_depth(LIES, LIES.keys() - {"a byte at a time"}))
def test_what_no_metadata_service_says_is_no_notice(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is taken for a cloud, but for AWS and Azure whoever gives one word: their notices are read with care."""
    with serving(lying(LIES[lie])) as url:
        service = MetadataService(url)
        ask = service.ask
        monkeypatch.setattr(
            service, "ask", lambda path, headers, **more: ask(path, headers, **{**more, "timeout_s": 0.3})
        )
        began_s = time.monotonic()
        for cloud in every_cloud(service):
            assert not cloud.is_here() or (lie == "one word" and cloud.name != "Google Cloud")
            with pytest.raises(NoAnswerError):
                cloud.poll()
        assert time.monotonic() - began_s < 30  # each trickle would last twenty seconds


def test_each_cloud_is_recognised_by_its_own_service() -> None:
    AzureMetadata.events = []
    for handler, name in ((Metadata, "AWS"), (AzureMetadata, "Azure"), (GoogleMetadata, "Google Cloud")):
        with serving(handler) as url:
            here = [cloud.name for cloud in every_cloud(MetadataService(url)) if cloud.is_here()]
        assert here == [name]


def test_the_environment_names_services_as_for_the_clouds_own_tools() -> None:
    assert [cloud.name for cloud in clouds({})] == ["AWS", "Azure", "Google Cloud"]
    assert [cloud.name for cloud in clouds({"IMDS_ENDPOINT": "http://localhost:40342"})] == ["Azure"]
    with serving(GoogleMetadata) as url:
        [google] = clouds({"GCE_METADATA_HOST": url.removeprefix("http://")})
        assert google.is_here()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "https://127.0.0.1", "127.0.0.1", "http://[::", ""])
def test_a_machine_without_the_service_is_left_in_peace(url: str) -> None:
    told: queue.Queue[NodeNotice] = queue.Queue()
    asking = SpotNotices(told.put, among=every_cloud(MetadataService(url)), look_after_s=(0.0, 0.0))
    asking.start()
    asking._thread.join(20)
    assert not asking._thread.is_alive()
    assert told.empty()
    assert asking.acknowledge() == ""


def test_a_spot_machine_is_told_once_as_soon_as_the_service_says_so(
    aws: AwsNotices, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.Queue[NodeNotice] = queue.Queue()
    Metadata.life_cycle, Metadata.action, aws.every_s = "spot", None, 0.01
    answers, asks = iter([False, True]), aws.is_preemptible

    def sometimes() -> bool:
        if not next(answers):
            raise NoAnswerError("busy")
        return asks()

    monkeypatch.setattr(aws, "is_preemptible", sometimes)
    asking = SpotNotices(told.put, among=[aws])
    asking.start()
    assert told.get(timeout=20) == Preemptible()
    Metadata.action = ACTION
    assert told.get(timeout=20) == NOTICED
    asking._thread.join(20)
    assert told.empty()


def test_each_cloud_says_where_the_machine_is(aws: AwsNotices, azure: AzureNotices, google: GcpNotices) -> None:
    assert google.zone() == "us-central1/us-central1-a"
    AzureMetadata.zone = "2"
    assert azure.zone() == "westeurope/2"
    AzureMetadata.zone = ""
    assert azure.zone() == "westeurope", "many machines are in no zone"
    with pytest.raises(NoAnswerError):
        aws.zone()
    Metadata.zone = "us-east-1a"
    assert aws.zone() == "us-east-1/us-east-1a"


def test_where_the_machine_is_is_told_once_and_nonsense_never(aws: AwsNotices, monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[NodeNotice] = queue.Queue()
    aws.every_s, Metadata.zone = 0.01, None
    asking = SpotNotices(told.put, among=[aws])
    asking.start()
    time.sleep(0.1)
    Metadata.zone = "us-east-1a"
    assert told.get(timeout=20) == ZoneNotice(zone="us-east-1/us-east-1a")
    Metadata.action = ACTION
    assert told.get(timeout=20) == NOTICED
    asking._thread.join(20)
    assert told.empty()
    monkeypatch.setattr(aws, "zone", lambda: "<html>\n")
    asking = SpotNotices(told.put, among=[aws])
    asking.start()
    assert told.get(timeout=20) == NOTICED
    asking._thread.join(20)
    assert told.empty()


def test_advice_is_told_once_and_the_end_ends_the_thread(aws: AwsNotices) -> None:
    told: queue.Queue[NodeNotice] = queue.Queue()
    Metadata.rebalance, aws.every_s = ADVICE, 0.01
    asking = SpotNotices(told.put, among=[aws])
    asking.start()
    assert isinstance(told.get(timeout=20), RebalanceAdvice)
    Metadata.action = ACTION
    assert told.get(timeout=20) == NOTICED
    asking._thread.join(20)
    assert told.empty()
    assert not asking._thread.is_alive()


def test_a_cloud_that_takes_no_yes_is_named(azure: AzureNotices) -> None:
    AzureMetadata.events = [event()]
    told: queue.Queue[NodeNotice] = queue.Queue()
    asking = SpotNotices(told.put, among=[azure])
    asking.start()
    assert told.get(timeout=20) == ZoneNotice(zone="westeurope")
    assert told.get(timeout=20) == spot_notice("Preempt", 40.0)
    AzureMetadata.events = []
    assert asking.acknowledge() == "Azure was not told that this machine may be taken now: status 400"
    asking.close()
