"""Machines behind NAT, 80 ms apart, on lines that lose 1 % of packets: one announced port, calls back, and a relay."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.cluster import Cluster, ended, kill
from tests.scenarios.launch import Alone
from tests.scenarios.nat import Host, Hosts, why_not
from tests.waiting import wait_for
from varuna.fleet.state.run_events import GenerationRecord

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not())]
ARGS = ("--steps", "100000", "--dropout", "0.1", "--slow", "0.2")
"""Of the job: a person ends it."""
BOUND_S = 180.0
HOSTS = {
    "manager": Host("10.78.0.1"),
    "mapped": Host("10.78.1.1", is_behind_nat=True, mapped={"40001": 22000}),
    "home": Host("10.78.2.1", is_behind_nat=True),
    "other": Host("10.78.3.1", is_behind_nat=True),
}
ANNOUNCED = ("--announce", "10.78.1.1:40001", "--port", "22000")


class Scene:
    """A manager that all machines reach, and machines that do not all reach each other."""

    def __init__(self, folder: Path) -> None:
        self.hosts = Hosts(HOSTS, delay_s=0.04, lost=0.01)
        where = ("--host", "0.0.0.0", "--advertise", HOSTS["manager"].public)
        try:
            self.run = Cluster(folder, "--workers", "2", "--stages", "2", *where, whereabouts=self.hosts.environment)
        except BaseException:
            self.hosts.close()
            raise

    def end(self, alone: Alone) -> None:
        """A person ends the run: each loss is that of one process."""
        assert self.run.verb("stop").code == 0
        assert ended(self.run.manager, BOUND_S) == 0, self.run.said()
        self.run.check(alone(max(self.run.steps()) + 1, "--dropout", "0.1"))

    def close(self) -> None:
        self.run.close()
        self.hosts.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


@pytest.mark.nightly
def test_a_machine_without_a_port_calls_the_one_that_announces_one(scene: Scene, alone: Alone) -> None:
    run = scene.run
    run.agent("home", *ARGS)
    run.until_agents(1)
    run.agent("mapped", *ARGS, flags=ANNOUNCED)
    run.until_step(30, BOUND_S)
    scene.end(alone)
    assert "relaying" not in run.said()


def test_what_neither_of_two_machines_can_reach_is_relayed_and_what_one_announces_is_called(
    scene: Scene, alone: Alone
) -> None:
    """The second pair is there after a loss; the machine that is called at its port has the first one's part."""
    run = scene.run
    run.agent("manager", *ARGS, workers=0, flags=("--port", "7071"))
    run.until_agents(1)
    lost = run.agent("home", *ARGS)
    run.until_agents(2)
    run.agent("other", *ARGS)
    run.until_step(3, BOUND_S)
    assert "relaying between workers at 10.78.2.1 and 10.78.3.1, which cannot reach each other" in run.said()
    told = "relayed        through another machine: stage 0 to rank 1; stage 1 to rank 0"
    wait_for(lambda: told in run.verb("status").out, BOUND_S)
    kill(lost)
    run.agent("mapped", *ARGS, flags=ANNOUNCED)
    before = run.events("generation_started")[-1].record
    wait_for(lambda: _newest(run).generation > before.generation and len(_newest(run).grid) == 2, BOUND_S)
    run.until_step(max(run.steps()) + 5, BOUND_S)
    scene.end(alone)
    assert run.said().count("relaying") == 1


def _newest(run: Cluster) -> GenerationRecord:
    record: GenerationRecord = run.events("generation_started")[-1].record
    return record
