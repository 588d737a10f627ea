"""Groups with a desired size as engines: what the group starts, starts an agent by itself."""

from collections.abc import Mapping

from varuna.core.errors import UsageError
from varuna.extras.clouds.group import GroupApi, GroupProvider
from varuna.extras.clouds.kubernetes import AgentSet
from varuna.extras.clouds.original_size import OriginalSize, user_of
from varuna.fleet.engines.engine import AgentCommand, Engine, EngineKind, EngineOption, EnginePlace
from varuna.fleet.run_folder.connection_file import known_runs
from varuna.fleet.run_folder.join_file import keep_join


class GroupEngine(GroupProvider):
    """A group whose machines get the JOIN string from where their boot script finds it.

    Args:
        api: the group.
        key: names the group among others, in the run's database.
        place: where the group's size before the run, and the JOIN string, are kept.

    Raises:
        UsageError: another run of this user's, on this machine, uses the group.
        CapacityError: the cloud does not answer now.
        FleetError: there is no such group, or no permission.
    """

    def __init__(self, api: GroupApi, key: str, place: EnginePlace) -> None:
        others = (run.folder for run in known_runs() if run.is_live and run.folder != place.run_dir)
        if (other := user_of(key, others)) is not None:
            raise UsageError(
                f"the run in {other} uses {api.name}, and a group serves one run: its machines join that one. Give "
                f"this run a group of its own, or end the other one: varuna stop --run {other}"
            )
        super().__init__(api, OriginalSize(place.run_dir, key))
        self._run_dir = place.run_dir

    def start(self, command: AgentCommand) -> None:
        """Keep the JOIN string for the person or script that gives it to the machines."""
        keep_join(self._run_dir, command.join)

    def describe(self) -> str:
        """Say where machines come from."""
        join = self._run_dir / "join"
        return f"machines come from {self._api.name}; what they start needs the JOIN string in {join}"


class AgentSetEngine(GroupEngine):
    """A StatefulSet, whose pods mount a Secret with the JOIN string.

    Args:
        agents: the set.
        cluster: its API server, if it is not the one of this pod.
        place: where its size before the run is kept.
    """

    def __init__(self, agents: AgentSet, cluster: str, place: EnginePlace) -> None:
        super().__init__(agents, f"{agents.name} {cluster}".rstrip(), place)
        self._agents = agents

    def start(self, command: AgentCommand) -> None:
        """Put the JOIN string into the Secret."""
        self._agents.keep_join(command.join)

    def describe(self) -> str:
        """Say where agents run."""
        return f"agents are the pods of {self._agents.name}: kubectl get pods"


def _aws(place: EnginePlace, options: Mapping[str, str]) -> Engine:
    from varuna.extras.clouds.aws import AutoScalingGroup

    group = options["group"]
    if not group:
        raise UsageError("--on aws needs the name of an Auto Scaling group: --on aws:GROUP")
    api = AutoScalingGroup(group)
    return GroupEngine(api, f"aws {api.region}/{group}", place)


def _azure(place: EnginePlace, options: Mapping[str, str]) -> Engine:
    from varuna.extras.clouds.azure import ScaleSet

    return GroupEngine(ScaleSet(options["scale-set"]), f"azure {options['scale-set']}", place)


def _gcp(place: EnginePlace, options: Mapping[str, str]) -> Engine:
    from varuna.extras.clouds.gcp import InstanceGroup

    return GroupEngine(InstanceGroup(options["instance-group"]), f"gcp {options['instance-group']}", place)


def _k8s(place: EnginePlace, options: Mapping[str, str]) -> Engine:
    return AgentSetEngine(AgentSet(options["stateful-set"], url=options["api-server"]), options["api-server"], place)


AWS = EngineKind(
    name="aws",
    summary="an AWS Auto Scaling group, whose machines start agents as they boot",
    options=(EngineOption("group", "GROUP", "Auto Scaling group to ask for machines; its VMs must start agents."),),
    make=_aws,
)
AZURE = EngineKind(
    name="azure",
    summary="an Azure scale set, whose machines start agents as they boot",
    options=(EngineOption("scale-set", "SUBSCRIPTION/RESOURCE_GROUP/NAME", "Scale set to ask for machines."),),
    make=_azure,
)
GCP = EngineKind(
    name="gcp",
    summary="a managed instance group of Google Cloud, whose machines start agents as they boot",
    options=(EngineOption("instance-group", "PROJECT/ZONE/NAME", "Group to ask for machines; also of a region."),),
    make=_gcp,
)
K8S = EngineKind(
    name="k8s",
    summary="a Kubernetes StatefulSet, whose pods are agents",
    options=(
        EngineOption("stateful-set", "[NAMESPACE/]NAME", "StatefulSet of agents to scale.", "varuna-agent"),
        EngineOption("api-server", "URL", "API server, such as that of `kubectl proxy`. Default: this pod's."),
    ),
    make=_k8s,
)
