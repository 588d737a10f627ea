"""Machines of two regions in one run: no pipeline reaches over both, and losses are those of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.cluster import Cluster, ended, kill
from tests.scenarios.launch import Alone
from tests.waiting import wait_for
from varuna.core.devices import region_of
from varuna.fleet.state.run_events import GenerationRecord

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
STEPS = 40
ARGS = ("--steps", str(STEPS), "--dropout", "0.1", "--slow", "0.15")
REGIONS = {"e": "east", "w": "west"}


def where(machine: str) -> dict[str, str]:
    """Machines are called after their regions."""
    return {"VARUNA_ZONE": f"{REGIONS[machine[0]]}/{machine}"} if machine != "manager" else {}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, "--workers", "5", "--stages", "2", whereabouts=where)
    yield cluster
    cluster.close()


def regions(cluster: Cluster, record: GenerationRecord) -> list[set[str]]:
    """By replica, where its workers are."""
    by_node = {cluster.node(path.parent.name): REGIONS[path.parent.name[0]] for path in cluster.agents}
    found = []
    for replica in range(record.plan.replicas):
        names = [record.members[rank] for rank in record.plan.ranks_of(replica)]
        found.append({by_node[name.rpartition(".")[0]] for name in names})
    return found


@pytest.mark.usefixtures("cold_start")
def test_each_pipeline_is_in_one_region_also_after_a_loss(cluster: Cluster, alone: Alone) -> None:
    machines = {}
    for number, name in enumerate(("e1", "w1", "e2", "w2", "w3")):
        machines[name] = cluster.agent(name, *ARGS)
        cluster.until_agents(number + 1)

    def newest() -> GenerationRecord:
        found: GenerationRecord = cluster.events("generation_started")[-1].record
        return found

    cluster.until_step(3)
    assert sorted(map(sorted, regions(cluster, newest()))) == [["east"], ["west"]]
    workers = cluster.status()["workers"]
    assert {worker["zone"] for worker in workers} == {f"{REGIONS[name[0]]}/{name}" for name in machines}
    assert {region_of(worker["device_class"]) for worker in workers} == {"east", "west"}
    kill(machines["w1"])
    wait_for(lambda: newest().generation > 0)
    assert sorted(map(sorted, regions(cluster, newest()))) == [["east"], ["west"]]
    assert ended(cluster.manager) == 0
    cluster.check(alone(STEPS, "--dropout", "0.1"))
