"""A machine that is wrong, and not dead, costs the others a morph, and not the run; a bug ends it with both places."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.cluster import Cluster, ended
from tests.scenarios.launch import Alone

pytestmark = pytest.mark.timeout(240)
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
