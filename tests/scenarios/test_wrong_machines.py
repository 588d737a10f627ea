"""A machine that is wrong, and not dead, costs the others a morph, and not the run; a bug ends it with both places."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.cluster import Cluster, ended
from tests.scenarios.launch import Alone
from tests.scenarios.network import Network, why_not
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(400)
STEPS = 40
ARGS = ("--steps", str(STEPS), "--slow", "0.1")
SCRIPT = str(Path(__file__).with_name("wrong_machine.py"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, "--workers", "3", "--stages", "1")
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("strange:60", "Its machine may be to blame"),
        ("sums:30", "and no others. Its machine or device may compute wrongly. Its machine may be to blame"),
        pytest.param("disk:60", "lost its machine", marks=pytest.mark.nightly),
    ],
)
def test_wrong_machines_cost_a_morph_and_no_loss(wrong: str, said: str, cluster: Cluster, alone: Alone) -> None:
    undisturbed = alone(STEPS)
    cluster.whereabouts = lambda machine: {"c": {"WRONG": wrong}, "d": {"WRONG": "mount"}}.get(machine, {})
    for number, name in enumerate("abc", 1):
        cluster.agent(name, *ARGS, script=SCRIPT)
        cluster.until_agents(number)
    cluster.until_step(2)
    cluster.agent("d", *ARGS, script=SCRIPT)
    assert ended(cluster.manager) == 0
    text = " ".join(cluster.said().split())
    assert said in text
    assert "The run trains without it" in text
    log = cluster.check(undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS)), "no step was done twice"
    assert len(cluster.events("generation_started")) <= 3


@pytest.mark.nightly
def test_a_bug_ends_the_run_once_it_has_failed_on_two_machines(cluster: Cluster) -> None:
    cluster.whereabouts = lambda machine: {"WRONG": "bug:55"}
    for number, name in enumerate("abc", 1):
        cluster.agent(name, *ARGS, script=SCRIPT)
        cluster.until_agents(number)
    assert ended(cluster.manager) == 1
    text = " ".join(cluster.said().split())
    assert "sample 55 has no end" in text
    assert "had failed on machine" in text


@pytest.mark.nightly
@pytest.mark.skipif(bool(why_not("tc")), reason=why_not("tc"))
def test_two_machines_that_cannot_reach_each_other_cost_a_plan_without_one_within_a_minute(
    tmp_path: Path, alone: Alone
) -> None:
    network, names = Network("manager", *"abcd"), "abcd"
    where = ("--host", "0.0.0.0", "--advertise", network.addresses["manager"])
    cluster = Cluster(tmp_path, "--workers", "4", "--stages", "2", *where, whereabouts=network.environment)
    args = ("--steps", "100000", "--compute", "0.03")
    try:
        for number, name in enumerate(names):
            cluster.until_agents(number)
            cluster.agent(name, *args)
        cluster.until_step(5)
        network.silence("b", "d")
        step = max(cluster.steps())
        cluster.until_step(step + 20, 75)
        [lost] = cluster.events("worker_lost")
        assert "cannot reach node" in lost.cause
        assert "nothing gets through between nodes" in " ".join(cluster.said().split())
        network.unsilence("b", "d")
        wait_for(lambda: len(cluster.events("generation_started")[-1].record.grid) == 4, 150)
        cluster.until_step(max(cluster.steps()) + 5)
        assert cluster.verb("stop").code == 0
        assert ended(cluster.manager) == 0
        cluster.check(alone(max(cluster.steps()) + 1))
    finally:
        cluster.close()
        network.close()
