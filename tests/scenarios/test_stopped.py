"""A manager, or an agent, that stands still for longer than every lease (SIGSTOP, as a suspended VM does)."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.depth import by_depth
from tests.scenarios.cluster import Cluster, ended
from tests.scenarios.launch import Alone

pytestmark = pytest.mark.timeout(200)
DROPOUT = ("--dropout", "0.1")
STOPPED_S = by_depth(9.0, 12.0)
"""Longer than the lease of 6 s, and than the 8 s after which an agent takes its connection for dead."""
STEP_S, SOON_S = 0.5, 6.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, "--workers", "2", "--stages", "2")
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    "turns", [("manager a",), pytest.param(("manager", "a", "b"), marks=pytest.mark.nightly)], ids=" then ".join
)
def test_who_is_stopped_costs_no_step_and_no_worker(cluster: Cluster, turns: tuple[str, ...], alone: Alone) -> None:
    who = {"manager": cluster.manager}
    for number, name in enumerate("ab"):
        cluster.until_agents(number)
        who[name] = cluster.agent(name, "--steps", "800", *DROPOUT, "--slow", str(STEP_S))
    cluster.until_step(5)
    for turn in turns:  # one of the agents has rank 0, which reports steps
        recorded = max(cluster.steps())
        for name in turn.split():
            who[name].send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        for name in turn.split():
            who[name].send_signal(signal.SIGCONT)
        # More than can be done from now on: training went on, and what was done meanwhile is heard of.
        goal = recorded + int(SOON_S / STEP_S) + 2
        cluster.until_step(goal, SOON_S)
    time.sleep(8)  # whoever would be given up, would be by now
    assert not cluster.events("worker_lost"), cluster.said()
    assert not any(event.record.steps_redone for event in cluster.events("generation_started"))
    assert cluster.verb("stop").code == 0
    assert ended(cluster.manager) == 0, cluster.said()
    steps = cluster.events("step_recorded")
    assert [event.step for event in steps] == list(range(len(steps)))
    undisturbed = alone(len(steps), *DROPOUT)
    for event in steps:
        assert event.loss == pytest.approx(undisturbed[event.step], rel=1e-5), event
