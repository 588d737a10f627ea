"""Scripts that train again and again, while workers and managers die at any point of that."""

import random

import pytest

from tests.depth import by_depth
from tests.unit.fleet.machine.test_storms import Act, FleetOfAgents, storm, usual
from tests.unit.fleet.simulated_fleet import SECTIONS, SimulatedFleet, SimulatedWorker, stormy
from tests.unit.fleet.support import Driver, make_job
from varuna.core.messages import Assignment, Finish, Leaving, Suspect, TrainingOver, Voted
from varuna.fleet.state.outputs import Instruction, Publish
from varuna.fleet.state.run_events import TrainingEnded
from varuna.fleet.state.worker import WorkerStatus

STEPS = 4


class Trainings(SimulatedFleet):
    """Workers whose scripts begin the next training when one is over, for ever."""

    def __init__(self, driver: Driver, *, checkpoints: bool) -> None:
        self.trainings: dict[str, int] = {}
        """By worker: the training that its script is in."""
        super().__init__(driver, checkpoints=checkpoints)

    def begin(self, worker: SimulatedWorker, training: int) -> None:
        """The script comes to a training: of the one before the process has nothing that counts."""
        kept = {name: getattr(worker, name) for name in ("inbox", "outbox", "record")}
        vars(worker).update(vars(SimulatedWorker(worker.name, worker.shared)), **kept)
        self.trainings[worker.name] = training
        worker.say(self.driver.hello_of(worker.name).model_copy(update={"training": training}))

    def hello(self, worker: SimulatedWorker) -> None:
        known = self.driver.fleet.workers.get(worker.name)
        if worker.name not in self.trainings and worker.alive and known is not None:
            assert known.standing is WorkerStatus.STARTING
            self.begin(worker, 0)

    def leave(self, worker: SimulatedWorker) -> None:
        if worker.alive and worker.over:
            worker.left = True
            worker.say(*(Voted(vote=vote) for vote in worker.votes if vote.step > worker.recorded_step))
            worker.say(Leaving(step=self.steps, training=self.trainings[worker.name]))
            self.begin(worker, self.trainings[worker.name] + 1)

    def obey(self, worker: SimulatedWorker) -> None:
        message = worker.inbox[0] if worker.inbox and worker.alive else None
        if not isinstance(message, TrainingOver | Finish):
            super().obey(worker)
            return
        worker.inbox.pop(0)
        mine = self.trainings.get(worker.name, 0)
        assert isinstance(message, TrainingOver), f"nobody is sent home: {message}"
        if message.training == mine:
            assert message.steps == self.steps
            assert message.last is None or message.last.step == self.steps - 1
            self.begin(worker, mine + 1)

    def carry_out(self, instruction: Instruction) -> None:
        super().carry_out(instruction)
        match instruction:
            case Publish(event=TrainingEnded(training=training, steps=steps)):
                assert steps == self.steps, "no training ends before its last step"
                assert training == len(self.driver.told(TrainingEnded)) - 1
                self.recorded, self.timeline, self.base, self.driver.checkpoint = [], -1, 0, None
            case _:
                pass

    def members(self, assignment: Assignment) -> tuple[str, ...]:
        record = self.driver.fleet.record_of(assignment.generation)
        return () if record is None else record.members

    def vote(self) -> None:
        grid = self.driver.fleet.record.grid if self.driver.fleet.history else ()
        if not any(self.workers[name].over for name in grid):  # the last step is done
            super().vote()

    def find_out(self, worker: SimulatedWorker) -> None:
        """Its link to a rank breaks that has begun the next training, and takes no part any more."""
        fleet = self.driver.fleet
        if not fleet.history or not worker.alive or worker.over or worker.generation != fleet.generation:
            return
        if any(self.trainings.get(name, 0) > fleet.training for name in fleet.record.grid):
            worker.say(Suspect(generation=worker.generation, reason="link broke"))

    def round(self) -> None:
        super().round()
        for worker in list(self.workers.values()):
            self.find_out(worker)
        for worker in list(self.workers.values()):
            self.leave(worker)


class TrainingsOfAgents(FleetOfAgents, Trainings):
    """The same on two machines, whose agents remember what a new manager must know."""


def go_on(fleet: Trainings) -> None:
    """Left alone, the script comes to its next trainings.

    A worker that froze between two trainings may still come, so each training gathers for ``gather_s`` (300 rounds).
    """
    goal = fleet.driver.fleet.training + 2
    for _ in range(1_000):
        if fleet.driver.fleet.training >= goal:
            return
        fleet.round()
    raise AssertionError(f"training {fleet.driver.fleet.training} does not end: {fleet.driver.fleet.phase}")


def _weights(fleet: Trainings, deaths: float) -> dict[Act, float]:
    return {**usual(fleet, deaths, votes=20), fleet.leave: 20}


@pytest.mark.parametrize("seed", range(by_depth(8, 100)))
def test_whoever_dies_in_or_between_trainings_each_has_all_of_its_steps_once(seed: int) -> None:
    choose = random.Random(seed)
    driver = stormy(choose.randint(2, 5), ["deep", "two stages", "one stage"][seed % 3])
    driver.job = make_job(sections=SECTIONS, steps=STEPS)
    fleet = Trainings(driver, checkpoints=choose.random() < 0.5)
    for _ in range(choose.randint(1, 12)):
        fleet.round()
    storm(fleet, choose, _weights(fleet, choose.choice([0.3, 1])), 600)
    go_on(fleet)


@pytest.mark.parametrize("seed", range(by_depth(8, 100)))
def test_a_manager_that_dies_in_or_between_trainings_comes_back_to_the_same_one(seed: int) -> None:
    choose = random.Random(seed)
    fleet = TrainingsOfAgents(
        choose.randint(2, 5), ["one stage", "two stages"][seed % 2], checkpoints=seed % 3 == 0, steps=STEPS
    )
    for _ in range(choose.randint(0, 12)):
        fleet.round()
    weights = {**_weights(fleet, 0.5), fleet.restart_manager: choose.choice([0.5, 3])}
    storm(fleet, choose, weights, 600)
    go_on(fleet)
