"""A cloud on this machine: its API and its metadata services are local servers, its instances are real agents.

What the group should have, a thread makes true. An instance begins with the boot script of the cloud's own page in
``docs/run-on``, in which only the places are others; the cloud's command line, which that script asks for the JOIN
string, is a stand-in. When an instance is lost, the group starts another one.
"""

import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, ClassVar

from tests.scenarios.cluster import CLI, kill
from tests.scenarios.launch import JOB, environment
from tests.scenarios.on_engine import ARGS
from tests.scenarios.stand_ins import StandIns
from tests.scenarios.warm import Process
from tests.unit.extras.clouds.group_servers import TOKEN, Azure, Google
from tests.unit.fleet.metadata import AzureMetadata, GoogleMetadata, Metadata, Server, Service, serving

PAGES = Path(__file__).parents[2] / "docs" / "run-on"
LEAD_S = 20.0
"""From a notice to an instance's end, where the cloud says when that is."""
SLOW = ("--slow", "0.3")
"""Of the job: notices last long, and each step is computed in one process too."""
_LOOK_S = 0.3
_CLI = """#!/bin/sh
for last; do :; done
case "$0 $*" in
  "$BIN/aws secretsmanager get-secret-value --secret-id varuna-join --query SecretString --output text" | \\
  "$BIN/az keyvault secret show --vault-name VAULT --name varuna-join --query value --output tsv" | \\
  "$BIN/gcloud secrets versions access latest --secret varuna-join") exec cat "$SECRET" ;;
  "$BIN/aws secretsmanager put-secret-value --secret-id varuna-join --secret-string file://"* | \\
  "$BIN/az keyvault secret set --vault-name VAULT --name varuna-join --file "* | \\
  "$BIN/gcloud secrets versions add varuna-join --data-file "*)
    cp "${last#file://}" "$SECRET.new" && mv "$SECRET.new" "$SECRET" ;;
  "$BIN/az login --identity") ;;
  *) echo "there is no $0 $*" >&2; exit 2 ;;
esac
"""
_PROGRAMS = {
    "aws": _CLI,
    "az": _CLI,
    "gcloud": _CLI,
    "sleep": "#!/bin/sh\nexec /bin/sleep 0.2\n",
    "systemd-run": '#!/bin/sh\nwhile [ "$1" != varuna ]; do shift; done\nexec "$@"\n',
}


@dataclass
class Instance:
    """One machine of the group."""

    folder: Path
    service: Server
    """Its own metadata service."""
    says: Any
    """Answers of that service: a class, whose fields are changed."""
    process: "subprocess.Popen[bytes] | None" = None
    """Its agent, once it has booted."""

    @property
    def agent(self) -> "subprocess.Popen[bytes]":
        assert self.process is not None
        return self.process


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """One cloud, as a run and its instances see it.

    Args:
        name: of its engine, and of its page.
        where: the group.
        variables: of the manager.
        desired: how many instances there should be.
        metadata: handler of an instance's metadata service, and the fields that each has for itself.
        endpoint: variable that names it.
        notify: has a service say that its instance goes.
        fail: the API answers nobody from now on.
    """

    name: str
    where: str
    variables: dict[str, str]
    desired: Callable[[], int]
    metadata: Callable[[], type[Service]]
    endpoint: Callable[[str], dict[str, str]]
    notify: Callable[[Any], None]
    fail: Callable[[], None]

    def page(self) -> str:
        return (PAGES / f"{self.name}.md").read_text()

    def boot_script(self) -> str:
        [script] = re.findall(r"^```\n(#!/bin/bash\n.*?)^```", self.page(), re.M | re.S)
        return str(script)

    def secret_command(self) -> str:
        """With which the page puts the JOIN string where instances find it."""
        [command] = re.findall(r"^(?:aws|az|gcloud) .*runs/gpt2/join$", self.page(), re.M)
        return str(command)


@dataclass
class Machines:
    """The instances of a cloud's group; ``close`` ends all."""

    cloud: Cloud
    folder: Path
    there: list[Instance] = field(default_factory=list)
    taken: list[Instance] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.secret = self.folder / "secret"
        self.programs = StandIns(self.folder / "bin", _PROGRAMS)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._booting: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def put_secret(self, run_dir: Path) -> None:
        """As the page says, once the JOIN string is known."""
        self.programs.shell(
            self.cloud.secret_command().replace("runs/gpt2", str(run_dir)), self.folder, SECRET=str(self.secret)
        )

    def living(self) -> list[Instance]:
        """Those that are there, the oldest first."""
        assert not self.errors, self.errors
        return list(self.there)

    def vanish(self, lost: Instance) -> None:
        """It is gone at once, and its metadata service with it; the group makes another one."""
        kill(lost.agent)
        lost.service.shutdown()
        with self._lock:
            self.there.remove(lost)
            self.taken.append(lost)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(30)
        for thread in self._booting:
            thread.join(110)
        for instance in (*self.there, *self.taken):
            instance.service.shutdown()
            instance.service.server_close()
            if instance.process is not None:
                kill(instance.process)

    def _look_on(self) -> None:
        try:
            while not self._closed.wait(_LOOK_S):
                desired = self.cloud.desired()
                with self._lock:
                    while len(self.there) < desired:
                        self._launch()
                    while len(self.there) > desired:  # as a shutdown does
                        self.taken.append(self.there.pop())
                        if (process := self.taken[-1].process) is not None and process.poll() is None:
                            process.terminate()
        except Exception as error:  # the test says what the group could not do
            self.errors.append(error)

    def _launch(self) -> None:
        number = len(self.there) + len(self.taken)
        folder = self.folder / f"{self.cloud.name}-{number}"
        (folder / "run").mkdir(parents=True)
        says = self.cloud.metadata()
        service = Server(("127.0.0.1", 0), says)
        threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        instance = Instance(folder, service, says)
        self.there.append(instance)
        thread = threading.Thread(target=self._boot, args=(instance,), daemon=True)
        self._booting.append(thread)
        thread.start()

    def _boot(self, instance: Instance) -> None:
        try:
            script = self.cloud.boot_script()
            for place in ("/run/", "/var/lib/"):
                script = script.replace(f" {place}", f" {instance.folder}{place}")
            assert script.count("/srv/job/train.py --lr 1e-3") == 1
            script = script.replace("/srv/job/train.py --lr 1e-3", shlex.join([JOB, *ARGS, *SLOW]))
            words = self.programs.varuna(script, instance.folder, SECRET=str(self.secret))
            own = environment(**self.cloud.endpoint(f"http://127.0.0.1:{instance.service.server_port}"))
            with (instance.folder / "agent.err").open("wb") as log:
                instance.process = Process(
                    [*CLI, *words], env=own, stdout=log, stderr=log, cwd=str(instance.folder), start_new_session=True
                )
        except Exception as error:
            self.errors.append(error)


def _of_its_own(handler: type[Service], **fields: Callable[[], Any]) -> Callable[[], type[Service]]:
    return lambda: type(handler.__name__, (handler,), {name: make() for name, make in fields.items()})


def _aws_notice(says: Any) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=LEAD_S)
    says.action = json.dumps({"action": "terminate", "time": moment.strftime("%Y-%m-%dT%H:%M:%SZ")})


def _azure_notice(says: Any) -> None:
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=LEAD_S), usegmt=True)
    says.events = [{"EventId": "A-1", "EventType": "Preempt", "Resources": ["trainers_3"], "NotBefore": moment}]


def _google_notice(says: Any) -> None:
    says.preempted = "TRUE"
    says.changed.set()


class _Failing(Service):
    """Hangs up once it has failed."""

    has_failed: ClassVar[bool] = False

    @classmethod
    def fail(cls) -> None:
        cls.has_failed = True

    def parse_request(self) -> bool:
        return not self.has_failed and super().parse_request()


@contextmanager
def aws() -> Iterator[Cloud]:
    """An Auto Scaling group, as moto serves it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        client = boto3.client(
            "autoscaling",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_launch_configuration(
            LaunchConfigurationName="spot", ImageId="ami-12c6146b", InstanceType="g4dn.xlarge", SpotPrice="0.5"
        )
        client.create_auto_scaling_group(
            AutoScalingGroupName="trainers",
            LaunchConfigurationName="spot",
            MinSize=0,
            MaxSize=6,
            DesiredCapacity=0,
            AvailabilityZones=["us-east-1a"],
        )

        def desired() -> int:
            [group] = client.describe_auto_scaling_groups(AutoScalingGroupNames=["trainers"])["AutoScalingGroups"]
            return int(group["DesiredCapacity"])

        yield Cloud(
            name="aws",
            where="aws:trainers",
            variables={**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url},
            desired=desired,
            metadata=_of_its_own(Metadata, action=lambda: None),
            endpoint=lambda own: {"AWS_EC2_METADATA_SERVICE_ENDPOINT": own},
            notify=_aws_notice,
            fail=server.stop,
        )
        client.delete_auto_scaling_group(AutoScalingGroupName="trainers", ForceDelete=True)
        client.delete_launch_configuration(LaunchConfigurationName="spot")
        client.close()
    finally:
        server.stop()


@contextmanager
def azure() -> Iterator[Cloud]:
    """A scale set; the manager's managed identity is App Service's."""

    class Identity(Service):
        def do_GET(self) -> None:
            answer = {"access_token": TOKEN, "expires_on": "4102444800", "token_type": "Bearer"}
            self.say(200, json.dumps(answer), "application/json")

    class Set(_Failing, Azure):
        pass

    Set.begin()
    Set.desired = 0
    with serving(Identity) as identity, serving(Set) as url:
        yield Cloud(
            name="azure",
            where="azure:s-1/rg/trainers",
            variables={"IDENTITY_ENDPOINT": f"{identity}/token", "IDENTITY_HEADER": "h", "ARM_ENDPOINT": url},
            desired=lambda: Set.desired,
            metadata=_of_its_own(AzureMetadata, events=list, approved=list),
            endpoint=lambda own: {"IMDS_ENDPOINT": own},
            notify=_azure_notice,
            fail=Set.fail,
        )


@contextmanager
def gcp() -> Iterator[Cloud]:
    """A managed instance group; the manager's token is that of its VM's service account."""

    class Identity(Service):
        def do_GET(self) -> None:
            found: dict[str, Any] = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
            if "/token" not in self.path:
                found = {"email": "robot@p-1", "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}
            self.say(200, json.dumps(found), "application/json", Metadata_Flavor="Google")

    class Managed(_Failing, Google):
        pass

    Managed.begin()
    Managed.desired = 0
    with serving(Identity) as identity, serving(Managed) as url:
        host = identity.removeprefix("http://")
        yield Cloud(
            name="gcp",
            where="gcp:p-1/us-central1-a/trainers",
            variables={
                "GCE_METADATA_HOST": host,
                "GCE_METADATA_IP": host,
                "CLOUDSDK_CONFIG": os.devnull,
                "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{url}/compute/v1/",
            },
            desired=lambda: Managed.desired,
            metadata=_of_its_own(
                GoogleMetadata,
                preempted=lambda: "FALSE",
                preemptible=lambda: "TRUE",
                changed=threading.Event,
                held=threading.Event,
            ),
            endpoint=lambda own: {"GCE_METADATA_HOST": own.removeprefix("http://")},
            notify=_google_notice,
            fail=Managed.fail,
        )
