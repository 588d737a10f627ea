"""Cables that are out: a manager and four machines, each in a network namespace of its own, and real packets lost.

Every loss is compared with that of one process, every step is accounted for, and each return has a bound.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import by_depth
from tests.scenarios.cluster import Cluster, ended
from tests.scenarios.launch import Alone
from tests.scenarios.network import Network, why_not
from tests.waiting import wait_for

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not())]
ARGS = ("--steps", "100000", "--dropout", "0.1")
"""Of the job: a person ends it."""
LEASE_S = 6.0
WORTH_S = 25.0
MACHINES = ("a", "b", "c", "d")


class Scene:
    """Four machines with a worker each, 2 stages and 2 replicas, and a network to pull cables of."""

    def __init__(self, folder: Path) -> None:
        self.network = Network("manager", *MACHINES)
        self.cluster: Cluster | None = None
        try:
            where = ("--host", "0.0.0.0", "--advertise", self.network.addresses["manager"])
            self.cluster = Cluster(
                folder, "--workers", "4", "--stages", "2", *where, whereabouts=self.network.environment
            )
            for number, name in enumerate(MACHINES):
                self.run.until_agents(number)
                self.run.agent(name, *ARGS, "--compute", "0.03")  # so long that noise makes nobody slow
            self.run.until_step(5)
            self.began = len(self.run.events("generation_started"))
        except BaseException:
            self.close()
            raise

    @property
    def run(self) -> Cluster:
        assert self.cluster is not None
        return self.cluster

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
        self.network.close()

    def trained(self) -> int:
        """Steps that ranks have printed, whoever manages."""
        logs = [log for machine in MACHINES for log in (self.run.folder / machine).glob("logs/**/*.log")]
        return max(log.read_bytes().count(b"\nstep ") for log in logs)

    def trains_on(self, steps: int = 10, bound_s: float = 60.0) -> None:
        """New steps are recorded."""
        self.run.until_step(max(self.run.steps()) + steps, bound_s)

    def generations(self) -> list[Any]:
        return [event.record for event in self.run.events("generation_started")]

    def nothing_lost(self) -> None:
        """No worker, and no step; on a busy machine somebody may have been left out as slow, after a vote."""
        assert not self.run.events("worker_lost"), self.run.said()
        redone = [record.cause for record in self.generations()[1:] if record.steps_redone]
        assert not redone

    def end(self, alone: Alone) -> None:
        """A person ends the run: whatever happened, each step was recorded once, with the loss of one process."""
        assert self.run.verb("stop").code == 0
        assert ended(self.run.manager) == 0, self.run.said()
        steps = self.run.events("step_recorded")
        assert [event.step for event in steps] == list(range(len(steps)))
        undisturbed = alone(len(steps), "--dropout", "0.1")
        for event in steps:
            assert event.loss == pytest.approx(undisturbed[event.step], rel=1e-5), event
        assert not any(record.rollback for record in self.generations()[1:])


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def cut_off(scene: Scene, seconds: float) -> None:
    """The manager's cable is out for so long; nothing is lost by it."""
    before, step = scene.trained(), max(scene.run.steps())
    scene.network.part(["manager"])
    time.sleep(seconds)
    assert scene.trained() > before + seconds, "training stood still"
    scene.network.heal()
    wait_for(lambda: max(scene.run.steps()) > step + seconds, 30)  # all that happened meanwhile is recorded


def test_what_parts_a_manager_from_its_machines_costs_no_step_and_no_worker(scene: Scene, alone: Alone) -> None:
    for seconds in by_depth((8,), (2, 12)):  # a lease is shorter than the last
        cut_off(scene, seconds)
    assert "this manager is cut off" in scene.run.said()
    wait_for(lambda: "machines are back in contact" in scene.run.said(), 30)

    # One machine out of the manager's sight, with all links between machines in order.
    for at, source in (("manager", "d"), ("d", "manager")):
        scene.network.drop(at, source)
    wait_for(lambda: "is out of sight" in scene.run.said(), 20)
    scene.trains_on(20)
    assert scene.run.verb("status").code == 0
    scene.network.heal()
    wait_for(lambda: "is back in contact" in scene.run.said(), 30)

    # Packets get lost one way: from two machines to the manager, and from one machine to another.
    for at, source in (("manager", "a"), ("manager", "c"), ("b", "c")):
        scene.network.drop(at, source, percent=30)
    scene.trains_on(by_depth(20, 60), 120)
    scene.network.heal()
    scene.trains_on(5, 120)
    time.sleep(LEASE_S + 2)  # whoever would be given up, would be by now
    scene.nothing_lost()
    scene.end(alone)


@pytest.mark.parametrize("far", [["d"], ["c", "d"], pytest.param(["b", "c", "d"], marks=pytest.mark.nightly)])
def test_machines_without_a_cable_cost_the_step_in_flight_and_come_back(
    scene: Scene, alone: Alone, far: list[str]
) -> None:
    """One of four; half of them; all but the one on the manager's side: with it and with a section's only holder."""
    record = scene.generations()[-1]
    seats = {name.rpartition(".")[0]: rank for rank, name in enumerate(record.grid)}
    nodes = {machine: scene.run.node(machine) for machine in MACHINES}
    stages = [{seats[nodes[m]] % 2 for m in MACHINES if m not in far}]
    covered = stages[0] == {0, 1}
    if not covered:  # state is waited for as long as it would take to train it again
        trained_s, steps = time.monotonic(), len(scene.run.steps())
        wait_for(lambda: time.monotonic() - trained_s > WORTH_S and len(scene.run.steps()) > steps, 60)
    began_s = time.monotonic()
    scene.network.part(far)
    if covered:
        wait_for(lambda: len(scene.generations()) > scene.began, LEASE_S + 15)
        taken_s = time.monotonic() - began_s
        scene.trains_on(5)
        scene.network.heal()
        print(f"the run went on {taken_s:.1f} s after the cables of {far} were out")
        assert scene.generations()[scene.began].steps_redone <= 1
    else:  # nobody else holds what is out of sight: it is waited for
        time.sleep(12)
        scene.network.heal()
    back_s = time.monotonic()
    everybody = {scene.run.node(machine) for machine in MACHINES}
    wait_for(lambda: {name.rpartition(".")[0] for name in scene.generations()[-1].grid} == everybody, 120)
    print(f"all were back {time.monotonic() - back_s:.1f} s after their cables were in")
    scene.trains_on(5)
    scene.end(alone)


@pytest.mark.nightly
def test_a_manager_may_be_cut_off_for_a_minute(scene: Scene, alone: Alone) -> None:
    cut_off(scene, 60)
    time.sleep(LEASE_S + 2)  # whoever would be given up, would be by now
    scene.nothing_lost()
    scene.end(alone)
