"""Rollbacks in which old state and old votes turn up again; ``machine`` must not count them."""

from tests.unit.fleet.support import Driver, Machine, two_stages
from varuna.core.messages import StopReport, Suspect
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import StepRecorded


def abandoned_timeline(machine: Machine) -> None:
    """A worker that has not reloaded yet offers its state and its vote."""
    driver = _running(3, 4, machine)
    old = driver.vote(3)
    driver.kill("w1")  # the only holder of the second stage: w2 is a spare
    driver.held("w0", 4)
    driver.held("w2", None)
    assert driver.fleet.record.first_step == 2
    driver.say("w0", Suspect(generation=1, reason="?"))
    driver.wait(1.2)
    driver.say("w2", StopReport(generation=1, next_step=2, sections=(2, 3)))
    driver.say("w0", StopReport(generation=1, next_step=4, sections=(0, 1), votes=(old,)))  # had not reloaded yet
    assert (driver.fleet.generation, driver.fleet.record.first_step, driver.fleet.record.rollback) == (2, 2, True)
    assert len(driver.told(StepRecorded)) == 4


def spare_of_a_rollback(machine: Machine) -> None:
    """A spare, which loads nothing, offers the state that it had before."""
    driver = _running(5, 2, machine)
    driver.kill("w1")
    driver.kill("w3")  # both holders of the second stage
    driver.all_held(2)
    assert driver.fleet.record.rollback
    [spare] = set(driver.fleet.members) - set(driver.fleet.record.grid)
    first, second = driver.fleet.record.grid
    driver.kill(second)
    driver.held(first, 2)
    driver.say(spare, StopReport(generation=1, next_step=2, sections=(2, 3)))  # had not dropped its old state yet
    assert (driver.fleet.generation, driver.fleet.record.rollback) == (2, True)


def _running(workers: int, steps: int, machine: Machine) -> Driver:
    """With a checkpoint of step 1, and nobody to replace the dead."""
    driver = Driver(FleetConfig(workers=workers, replace=False), plan=two_stages, machine=machine)
    driver.begin(*range(steps))
    driver.checkpoint = Checkpoint("ck/step-2", 2, 2)
    return driver
