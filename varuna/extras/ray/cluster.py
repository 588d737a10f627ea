"""A Ray cluster as this process sees it: connected to, its nodes, its named actors, its autoscaler.

Everything of a run is in the namespace ``varuna``: the manager's actor NAME/manager and agents NAME/agent-RUN-NUMBER.
Ray is imported inside functions: Varuna does without it where no cluster of Ray's is used.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from varuna.core.errors import FleetError, UsageError
from varuna.extras.ray.placement import Node

NAMESPACE = "varuna"
_CONNECT_S = 60.0
_INSTALL = "pip install ray==VERSION, the version of the cluster"
_HEAD = "node:__internal_head__"
T = TypeVar("T")


def connect(runtime_env: Mapping[str, Any] | None = None) -> None:
    """Connect this process with its cluster, once: the one of ``RAY_ADDRESS``, else the one that this machine is in.

    Raises:
        UsageError: Ray is not installed, or the address is one of Ray Client.
        FleetError: there is no cluster, or it does not take this process.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--on ray needs Ray. Install it: {_INSTALL}") from error
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        raise UsageError(
            f"RAY_ADDRESS is {address}, and --on ray needs a process inside the cluster. From outside: "
            "RAY_ADDRESS=http://HEAD:8265 ray job submit --working-dir . -- varuna run --on ray ..."
        )
    try:
        bounded(
            lambda: ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env=dict(runtime_env) if runtime_env else None,
            ),
            _CONNECT_S,
            f"the Ray cluster at {address}",
        )
    except ConnectionError as error:
        raise FleetError(
            f"no Ray cluster was found ({address}). Run this on a node of the cluster, set RAY_ADDRESS=HOST:6379, or "
            "submit it: ray job submit --address http://HEAD:8265 --working-dir . -- varuna run --on ray ..."
        ) from error
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise FleetError(f"the Ray cluster at {address} does not take this process: {text}. Use {_INSTALL}.") from error


def bounded(call: Callable[[], T], bound_s: float, what: str) -> T:
    """Call something of Ray's that may wait for ever, on a thread that is then left behind.

    Raises:
        FleetError: no answer within the bound.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 it is raised by who asked
            errors.append(error)

    thread = threading.Thread(target=ask, name="varuna-ray", daemon=True)
    thread.start()
    thread.join(bound_s)
    if errors:
        raise errors[0]
    if not answers:
        raise FleetError(f"{what} did not answer for {bound_s:.0f} s. Is its head node there? Look at `ray status`.")
    return answers[0]


def last_line(error: BaseException) -> str:
    """Return the last line of an error of Ray's, which follows the stacks of several processes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def living_nodes(cpus_per_worker: float | None) -> list[Node]:
    """List the nodes that live and are not about to leave; ``cpus_per_worker`` None counts GPUs."""
    import ray

    leaving = draining()
    found = []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in leaving:
            has = node["Resources"]
            fits = has.get("GPU", 0) if cpus_per_worker is None else has.get("CPU", 0) // cpus_per_worker
            found.append(Node(node["NodeID"], node["NodeManagerAddress"], int(fits), _HEAD in has))
    return found


def draining() -> dict[str, int]:
    """Return the moments at which nodes will be taken away, by identifier (ms since 1970; 0 or none if unknown)."""
    with contextlib.suppress(Exception):  # not part of Ray's public interface; without it there are no notices
        import ray

        found: dict[str, int] = ray._private.state.state.get_draining_nodes()
        return found
    return {}


def agents_of(name: str) -> list[str]:
    """List names of all agents' actors of a run, also of those that are starting."""
    import ray

    return [actor for actor in ray.util.list_named_actors() if actor.startswith(f"{name}/agent-")]


def kill(actor: Any) -> None:
    """End an actor, if it is still there."""
    import ray

    with contextlib.suppress(Exception):  # it is gone, or its node is
        ray.kill(actor, no_restart=True)


def ask_autoscaler(bundle: Mapping[str, float], nodes: int) -> None:
    """Ask for ``nodes`` of this size; Ray keeps one such request per cluster, and none takes it back."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[dict(bundle)] * nodes)


def give_back(name: str) -> None:
    """End all agents of a run, and take back what was requested of the autoscaler."""
    import ray

    for agent in agents_of(name):
        with contextlib.suppress(ValueError):  # it has just ended
            kill(ray.get_actor(agent))
    ask_autoscaler({}, 0)
