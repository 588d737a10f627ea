"""Groups with a desired size on Azure, Google Cloud and Kubernetes, against local servers that speak their APIs."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import of_depth
from tests.unit.extras.clouds.group_servers import TOKEN, Azure, Google, Group, Kubernetes
from tests.unit.fleet.metadata import LIES, Service, lying, serving
from varuna.core.errors import FleetError, UsageError
from varuna.extras.clouds.azure import ScaleSet
from varuna.extras.clouds.gcp import InstanceGroup
from varuna.extras.clouds.group import GroupApi, GroupProvider
from varuna.extras.clouds.kubernetes import AgentSet
from varuna.extras.clouds.original_size import OriginalSize
from varuna.extras.clouds.rest import Rest
from varuna.fleet.engines.provider import CapacityError

Make = Callable[[str], GroupApi]


def scale_set(url: str, where: str = "s-1/rg/trainers", **bounds: Any) -> ScaleSet:
    return ScaleSet(where, api=Rest("Azure", url, lambda: TOKEN, **bounds))


def instance_group(url: str, where: str = "p-1/us-central1-a/trainers", **bounds: Any) -> InstanceGroup:
    return InstanceGroup(where, api=Rest("Google Cloud", f"{url}/compute/v1", lambda: TOKEN, **bounds))


def agent_set(url: str, where: str = "ml/agents", **bounds: Any) -> AgentSet:
    return AgentSet(where, api=Rest("Kubernetes", url, lambda: TOKEN, **bounds))


CLOUDS: dict[str, tuple[type[Group], Callable[..., GroupApi]]] = {
    "azure": (Azure, scale_set),
    "gcp": (Google, instance_group),
    "k8s": (Kubernetes, agent_set),
}


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Iterator[tuple[type[Group], Callable[..., GroupApi], str]]:
    server, make = CLOUDS[request.param]
    server.begin()
    with serving(server) as url:
        yield server, make, url


def provider(api: GroupApi, run_dir: Path) -> GroupProvider:
    return GroupProvider(api, OriginalSize(run_dir, "g"))


def test_two_runs_on_one_group_do_not_take_turns_for_ever(cloud: Any, tmp_path: Path) -> None:
    server, make, url = cloud
    (tmp_path / "other").mkdir()
    ours, other = provider(make(url), tmp_path), provider(make(url), tmp_path / "other")
    for _ in range(3):
        ours.resize(2)
        other.resize(5)
    with pytest.raises(FleetError, match="Give each run a group of its own") as refused:
        ours.resize(2)
    assert not isinstance(refused.value, CapacityError)
    other.resize(5)
    other.resize(5)
    with pytest.raises(FleetError, match=r"keeps the size 5, .* before this run it was 1\. .* back by hand"):
        ours.close()
    assert server.desired == 5


def test_a_size_that_the_cloud_itself_takes_back_is_asked_for_again(cloud: Any, tmp_path: Path) -> None:
    server, make, url = cloud
    api = make(url)
    group = provider(api, tmp_path)

    def complain() -> None:
        raise CapacityError("no such machines now")

    api.complain = complain
    for _ in range(9):
        group.resize(3)
        server.desired = 1
    assert len(server.asked) == 9


def test_a_group_grows_and_shrinks_as_wished_and_is_given_back(cloud: Any, tmp_path: Path) -> None:
    server, make, url = cloud
    group = provider(make(url), tmp_path)
    assert len(group.rehearse(5)) == 1
    assert server.asked == []  # a rehearsal changes nothing
    group.resize(5)
    assert (server.desired, group.size()) == (5, 5)
    group.resize(5)
    assert len(server.asked) == 1
    group.resize(3)
    assert (server.desired, group.size()) == (3, 3)
    again = provider(make(url), tmp_path)  # a manager that starts again
    again.resize(4)
    again.close()
    assert server.desired == 1


def test_a_group_that_does_not_exist_is_named(cloud: Any, tmp_path: Path) -> None:
    _, make, url = cloud
    where = {"scale_set": "s-1/rg/nobody", "instance_group": "p-1/us-central1-a/nobody"}.get(make.__name__, "ml/nobody")
    with pytest.raises(FleetError, match=r"knows no such group: .*nobody.* Check the names") as caught:
        provider(make(url, where), tmp_path)
    assert type(caught.value) is FleetError


@pytest.mark.parametrize("lie", of_depth(LIES, LIES.keys() - {"a byte at a time"}))
def test_what_no_api_says_is_asked_again_and_never_waited_for(lie: str) -> None:
    began_s = time.monotonic()
    with serving(lying(LIES[lie])) as url:
        for _, make in CLOUDS.values():
            with pytest.raises(CapacityError):
                make(url, timeout_s=0.3, largest_bytes=1 << 16).read()
    assert time.monotonic() - began_s < 30


def test_nobody_there_is_asked_again(cloud: Any) -> None:
    _, make, _ = cloud
    with pytest.raises(CapacityError, match=r"did not answer: .*refused"):
        make("http://127.0.0.1:9").read()


def azure(status: int, code: str, message: str = "m") -> tuple[int, Any]:
    return status, {"error": {"code": code, "message": message}}


def google(status: int, reason: str, message: str = "m") -> tuple[int, Any]:
    return status, {"error": {"code": status, "message": message, "errors": [{"reason": reason}]}}


def k8s(status: int, reason: str, message: str = "m") -> tuple[int, Any]:
    return status, {"kind": "Status", "reason": reason, "message": message}


QUOTA = "Operation could not be completed as it results in exceeding approved Low Priority Cores quota."


@pytest.mark.parametrize(
    ("name", "instead", "kind", "words"),
    [
        ("azure", azure(429, "TooManyRequests"), CapacityError, "asks to retry later"),
        ("azure", azure(409, "AnotherOperationInProgress"), CapacityError, "asks to retry later"),
        ("azure", azure(409, "OperationNotAllowed", QUOTA), CapacityError, "quota is used up.*Raise the quota"),
        ("azure", azure(409, "SkuNotAvailable"), CapacityError, "has no such machines now.*Other sizes"),
        ("azure", azure(403, "AuthorizationFailed"), FleetError, "permissions are missing.*Give the permissions"),
        ("azure", azure(400, "InvalidParameter"), FleetError, "did not accept the request"),
        ("azure", (500, {}), CapacityError, "has a fault of its own: status 500"),
        ("gcp", google(403, "rateLimitExceeded"), CapacityError, "asks to retry later"),
        ("gcp", google(429, "strange"), CapacityError, "asks to retry later"),
        ("gcp", google(403, "quotaExceeded"), CapacityError, "quota is used up"),
        ("gcp", google(403, "forbidden", "Required 'compute.x.update'"), FleetError, "permissions are missing"),
        ("gcp", (503, {"error": "x"}), CapacityError, "has a fault of its own"),
        ("k8s", k8s(403, "Forbidden", "cannot patch resource"), FleetError, "permissions are missing: cannot patch"),
        ("k8s", k8s(403, "Forbidden", "pods x is forbidden: exceeded quota: gpus"), CapacityError, "quota is used up"),
        ("k8s", k8s(409, "Conflict"), CapacityError, "asks to retry later"),
        ("k8s", k8s(422, "Invalid"), FleetError, "did not accept the request"),
    ],
    ids=str,
)
def test_refusals_are_told_apart_with_the_next_move(
    name: str, instead: tuple[int, Any], kind: type[FleetError], words: str, tmp_path: Path
) -> None:
    server, make = CLOUDS[name]
    server.begin()
    with serving(server) as url:
        group = provider(make(url), tmp_path)
        server.instead = instead
        with pytest.raises(FleetError, match=words) as caught:
            group.resize(4)
    assert type(caught.value) is kind


def test_azure_says_how_a_change_ended_and_is_asked_again_if_it_gave_up(tmp_path: Path) -> None:
    Azure.begin()
    with serving(Azure) as url:
        group = provider(scale_set(url), tmp_path)
        group.resize(4)
        Azure.missing = 2
        group.resize(4)  # still in progress
        error = {"code": "OverconstrainedAllocationRequest", "message": "Allocation failed."}
        Azure.ends_with, Azure.state = {"status": "Failed", "error": error}, "Failed"
        with pytest.raises(CapacityError, match=r"no such machines now: Allocation failed \(Overconstrained"):
            group.resize(4)
        assert len(Azure.asked) == 2  # again, since Azure does not try again by itself
        assert group.size() == 2


def test_evicted_machines_that_keep_their_places_are_no_machines(tmp_path: Path) -> None:
    Azure.begin()
    with serving(Azure) as url:
        group = provider(scale_set(url), tmp_path)
        group.resize(5)
        Azure.stopped = 3
        assert group.size() == 2
        with pytest.raises(CapacityError, match=r"taken machines back.*3 evicted machines.*Let the group delete"):
            group.resize(5)


def test_a_page_on_another_host_gets_no_token(tmp_path: Path) -> None:
    heard: list[str | None] = []

    def hear(service: Service) -> None:
        heard.append(service.headers.get("Authorization"))
        service.say(200, "{}")

    Azure.begin()
    with serving(Azure) as url, serving(lying(hear)) as elsewhere:
        Azure.desired, Azure.next_host = 9, elsewhere
        with pytest.raises(CapacityError, match="points to another host"):
            scale_set(url).read()
    assert heard == []


@pytest.mark.parametrize(
    ("code", "words"),
    [("ZONE_RESOURCE_POOL_EXHAUSTED", "has no such machines now"), ("QUOTA_EXCEEDED", "quota is used up")],
)
def test_google_says_why_machines_do_not_start(code: str, words: str, tmp_path: Path) -> None:
    Google.begin()
    with serving(Google) as url:
        group = provider(instance_group(url), tmp_path)
        Google.missing, Google.error = 3, {"code": code, "message": "The zone does not have enough resources."}
        group.resize(4)  # the request was only just made
        with pytest.raises(CapacityError, match=words):
            group.resize(4)
        assert group.size() == 1


def test_kubernetes_says_why_a_pod_waits_or_is_missing(tmp_path: Path) -> None:
    Kubernetes.begin()
    with serving(Kubernetes) as url:
        group = provider(agent_set(url), tmp_path)
        group.resize(3)
        Kubernetes.missing = 1
        with pytest.raises(CapacityError, match=r"pod agents-2 has no node: 0/3 nodes .* Insufficient nvidia"):
            group.resize(3)
        assert group.size() == 2
        said = 'pods "agents-2" is forbidden: exceeded quota: few, requested: pods=1'
        newest = {"lastTimestamp": "2026-11-24T00:00:02Z", "message": said}
        Kubernetes.events = [newest, {"lastTimestamp": None, "eventTime": "2026-11-24T00:00:01Z", "message": "old"}]
        with pytest.raises(
            CapacityError, match=r"does not allow more: the quota is used up: pods .*exceeded quota: few"
        ):
            group.resize(3)


@pytest.mark.parametrize("where", ["", "a/b", "s/g/n/x", "s/../n", "s/g/n?x=1", "s/g/n#", "s g/n/x"])
def test_names_that_are_none_are_refused(where: str) -> None:
    for make in (scale_set, instance_group):
        with pytest.raises(UsageError, match="name a"):
            make("http://127.0.0.1:9", where)


def test_a_scale_sets_whole_id_names_it() -> None:
    assert scale_set("http://127.0.0.1:9", Azure.PATH)._path == Azure.PATH


def test_a_token_travels_over_tls_or_not_at_all() -> None:
    with pytest.raises(UsageError, match="must begin with https"):
        scale_set("http://management.example.com")


def test_azures_own_library_gets_the_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """azure-identity, against a local server that speaks the managed identity of App Service."""
    pytest.importorskip("azure.identity")

    class Identity(Service):
        def do_GET(self) -> None:
            assert self.headers["X-IDENTITY-HEADER"] == "h"
            answer = {"access_token": TOKEN, "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"}
            self.say(200, json.dumps(answer), "application/json")

    Azure.begin()
    with serving(Identity) as identity, serving(Azure) as url:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{identity}/token")
        monkeypatch.setenv("IDENTITY_HEADER", "h")
        monkeypatch.setenv("ARM_ENDPOINT", url)
        group = provider(ScaleSet("s-1/rg/trainers"), tmp_path)
        group.resize(2)
    assert Azure.desired == 2


def test_googles_own_library_gets_the_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """google-auth, against a local server that speaks the metadata service."""
    pytest.importorskip("google.auth")

    class Metadata(Service):
        def do_GET(self) -> None:
            found: dict[str, Any] = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
            if "/token" not in self.path:
                found = {"email": "robot@p-1", "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}
            self.say(200, json.dumps(found), "application/json", Metadata_Flavor="Google")

    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    Google.begin()
    with serving(Metadata) as metadata, serving(Google) as url:
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
            monkeypatch.setenv(name, metadata.removeprefix("http://"))
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", f"{url}/compute/v1/")
        group = provider(InstanceGroup("p-1/us-central1-a/trainers"), tmp_path)
        group.resize(2)
    assert Google.desired == 2
