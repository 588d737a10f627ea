"""Ray as an engine: an actor per node keeps an agent there; the autoscaler is asked for nodes that are missing."""

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from varuna.core.errors import FleetError, UsageError
from varuna.extras.ray import cluster as ray_cluster
from varuna.extras.ray.agent import AgentActor
from varuna.extras.ray.follower import follow
from varuna.extras.ray.manager import RUNTIME_ENV_VARIABLE, run_name
from varuna.extras.ray.placement import Node, NodeHistory, NodePlace, places
from varuna.fleet.engines.engine import AgentCommand, EngineKind, EngineOption, EnginePlace
from varuna.fleet.engines.provider import CapacityError

_LOOK_S = 1.0
_END_S = 10.0
"""For agents to end by themselves once the run is over."""


@dataclass
class _Agent:
    """An actor, the node that it is meant for (empty: not known yet), and the question that it has not answered."""

    name: str
    actor: Any
    node: str
    question: Any
    is_running: bool = False


class RayEngine:
    """Agents on the nodes of a Ray cluster. A thread looks every second what became of them, and starts others.

    Args:
        name: of the run, in this cluster.
        cpus_per_worker: None: a worker takes one GPU, and one CPU.
    """

    def __init__(self, name: str, cpus_per_worker: float | None) -> None:
        self._name, self._cpus_per_worker = name, cpus_per_worker
        self._command: AgentCommand | None = None
        self._wanted, self._bundles = 0, 0
        self._agents: list[_Agent] = []
        self._history = NodeHistory()
        self._address = self._trouble = ""
        self._lock = threading.Lock()  # guards all of the above
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="varuna-ray-keeper", daemon=True)

    # -- what a run wants ----------------------------------------------------------------------------------------

    def start(self, command: AgentCommand) -> None:
        """Connect, see whether the cluster is of use, and find agents that are there already.

        Raises:
            UsageError: Ray is not installed, or no node can hold a worker.
            FleetError: there is no cluster, or it does not take this process.
        """
        runtime_env = json.loads(os.environ.get(RUNTIME_ENV_VARIABLE) or "{}")
        ray_cluster.connect(runtime_env)
        import ray

        self._address = ray.get_runtime_context().gcs_address
        if runtime_env.get("working_dir"):  # each node has its own copy, which is where its actors begin
            command = replace(command, script=_below(command.script, Path.cwd()))
        self._command = command
        self._check_capable()
        prefix = f"{self._name}/agent-{command.run}-"
        for name in ray_cluster.agents_of(self._name):
            try:
                actor = ray.get_actor(name)
            except ValueError:
                continue  # it has just ended
            if name.startswith(prefix):
                self._agents.append(_Agent(name, actor, name.split("-")[-2], actor.state.remote()))
            else:
                ray_cluster.kill(actor)  # of a run that had this name before
        self._thread.start()

    def resize(self, nodes: int) -> None:
        """Want this many agents from now on.

        Raises:
            CapacityError: the cluster does not answer now, or agents fail.
            FleetError: agents fail again and again on every node.
        """
        with self._lock:
            self._wanted = nodes
            trouble = self._trouble
            capable = [node.id for node in self._nodes() if node.fits >= self._least()] if not trouble else []
            hopeless, complaint = self._history.is_hopeless(capable), self._history.complaint(capable)
        if hopeless and not any(agent.is_running for agent in self._agents):
            raise FleetError(f"agents failed on every node of the Ray cluster. {complaint}")
        if trouble or complaint:
            raise CapacityError(trouble or complaint)

    def size(self) -> int:
        """Return the number of agents that run or start."""
        with self._lock:
            return len(self._agents)

    def describe(self) -> str:
        """Say where agents run."""
        return (
            f"agents run in the Ray cluster at {self._address}, as actors {self._name}/agent-* in namespace "
            f"{ray_cluster.NAMESPACE}; `ray list actors` shows them"
        )

    def close(self) -> None:
        """End all agents, and take back the request for nodes; bounded.

        Raises:
            FleetError: the cluster does not answer any more.
        """
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s and self._agents:
            self._hear(time.monotonic())
            time.sleep(0.1)
        ray_cluster.bounded(lambda: ray_cluster.give_back(self._name), 30.0, "the Ray cluster, asked to end agents,")

    # -- what becomes of it --------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                with self._lock:
                    self._look(time.monotonic())
                    self._trouble = ""
            except Exception as error:  # noqa: BLE001 Ray's errors have no common root; the next look may succeed
                self._trouble = f"the Ray cluster does not answer: {ray_cluster.last_line(error)}"
            self._closed.wait(_LOOK_S)

    def _look(self, now_s: float) -> None:
        """Hear of all agents, start what is missing, and say what is wanted."""
        self._hear(now_s)
        nodes = self._nodes()
        taken = {agent.node for agent in self._agents}
        staying = len(taken & {node.id for node in nodes})  # those that leave soon are replaced now
        for place in places(
            nodes,
            taken=taken,
            avoided=self._history.avoided(now_s),
            missing=self._wanted - staying,
            workers=self._workers(),
        ):
            self._start(place, now_s)
        if self._bundles != self._wanted:  # nodes that are lost are replaced too: the request stays
            largest = max((node.fits for node in nodes), default=0)
            ray_cluster.ask_autoscaler(self._demand(self._workers() or largest or 1), self._wanted)
            self._bundles = self._wanted

    def _hear(self, now_s: float) -> None:
        """Note which agents have ended."""
        import ray

        if not self._agents:
            return
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        questions = [agent.question for agent in self._agents]
        answered = set(ray.wait(questions, num_returns=len(questions), timeout=0)[0])
        for agent in list(self._agents):
            if agent.node not in living:
                self._drop(agent)  # Ray tells of its actors only after a while
            elif agent.question in answered:
                self._take(agent, now_s)

    def _take(self, agent: _Agent, now_s: float) -> None:
        """Take an agent's answer, and ask again."""
        import ray

        try:
            code, said = ray.get(agent.question, timeout=5)
        except ray.exceptions.ActorUnavailableError:
            agent.question = agent.actor.state.remote()
            return
        except ray.exceptions.RayError as error:
            code, said = None, ray_cluster.last_line(error) if not agent.is_running else "it was killed"
        else:
            if code is None:
                agent.is_running, agent.question = True, agent.actor.state.remote()
                return
        why = f"the agent on node {agent.node[:8]} ended with exit code {code}: {said}"
        self._history.ended(agent.node, code, why if code is not None else f"node {agent.node[:8]}: {said}", now_s)
        self._drop(agent)

    def _drop(self, agent: _Agent) -> None:
        self._agents.remove(agent)
        ray_cluster.kill(agent.actor)

    def _start(self, place: NodePlace, now_s: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert self._command is not None
        name = f"{self._name}/agent-{self._command.run}-{place.node.id}-{time.time_ns():x}"
        demand = self._demand(place.workers)
        actor = (
            ray.remote(AgentActor)
            .options(
                name=name,
                lifetime="detached",
                num_cpus=demand["CPU"],
                num_gpus=demand.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node.id, soft=False),
            )
            .remote(self._command, place.workers)
        )
        self._agents.append(_Agent(name, actor, place.node.id, actor.state.remote()))
        self._history.started(place.node.id, now_s)

    # -- sizes ---------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[Node]:
        return ray_cluster.living_nodes(self._cpus_per_worker)

    def _workers(self) -> int | None:
        return self._command.workers if self._command is not None else None

    def _least(self) -> int:
        return self._workers() or 1

    def _demand(self, workers: int) -> dict[str, float]:
        """Return the resources of a node that some workers take."""
        if self._cpus_per_worker is not None:
            return {"CPU": workers * self._cpus_per_worker}
        return {"CPU": workers, "GPU": workers}

    def _check_capable(self) -> None:
        """Check that some node can hold a worker; one that is told how many GPUs to expect waits for an autoscaler.

        Raises:
            UsageError: none can.
        """
        nodes = self._nodes()
        if self._workers() is not None or any(node.fits for node in nodes):
            return
        what = "a GPU" if self._cpus_per_worker is None else f"{self._cpus_per_worker:g} CPUs"
        raise UsageError(
            f"none of the {len(nodes)} nodes of the Ray cluster at {self._address} has {what} for a worker. "
            "Give --cpus-per-worker 1 to train on CPUs, or --workers N if an autoscaler starts nodes of N GPUs."
        )


def _below(script: Path, folder: Path) -> Path:
    return script.relative_to(folder) if script.is_relative_to(folder) else script


def _make(place: EnginePlace, options: Mapping[str, str]) -> RayEngine:
    return RayEngine(run_name(place, options), _cpus(options["cpus-per-worker"]))


def _cpus(text: str) -> float | None:
    if not text:
        return None
    try:
        cpus = float(text)
    except ValueError:
        cpus = math.nan
    if not 0 < cpus < math.inf:
        raise UsageError(f"--cpus-per-worker {text} is not a number of CPUs, such as 1")
    return cpus


RAY = EngineKind(
    name="ray",
    summary="a Ray cluster, with an actor per node",
    options=(
        EngineOption("name", "NAME", "Name of the run in the cluster. Default: its folder's name."),
        EngineOption("cpus-per-worker", "N", "Train on CPUs: so many for a worker. Default: a GPU, and one CPU."),
    ),
    make=_make,
    elsewhere=follow,
    every_s=5.0,
    most_backoff_s=15.0,
)
