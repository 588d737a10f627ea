"""Without a calibration, plans are for the memory that every worker's device has for it."""

from dataclasses import replace

from tests.unit.fleet.support import Driver, make_job, two_stages
from varuna.core.devices import DeviceFacts, WorkerGroup, WorkerGroups, worker_bytes
from varuna.core.messages import Hello
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import SpawnRequested
from varuna.fleet.state.speeds import Speeds
from varuna.fleet.state.stutter import Straggler

BIG = [DeviceFacts(name=f"gpu{number}", memory_bytes=80 * 2**30) for number in range(8)]
SMALL = DeviceFacts(name="small", memory_bytes=16 * 2**30)


class Asked:
    """A planner that knows for how much memory it was asked."""

    def __init__(self) -> None:
        self.memory: list[int | None] = []

    def __call__(self, job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        self.memory += {group.memory_bytes for group in workers}
        return two_stages(job, workers, micro_batch)


def driven(planner: Asked, workers: int) -> Driver:
    return Driver(FleetConfig(workers=workers, replace=False), plan=planner, job=make_job(steps=100_000))


def hello(driver: Driver, worker: str, device: DeviceFacts | None, device_class: str = "") -> None:
    told = Hello(worker=worker, pid=1, version="1", job=driver.job, device=device, device_class=device_class)
    driver.say(worker, told)


def lose(driver: Driver, worker: str) -> None:
    driver.kill(worker)
    driver.all_held(1)


def test_workers_of_one_gpu_are_planned_with_its_halves() -> None:
    planner = Asked()
    driver = driven(planner, 2)
    hello(driver, "w0", BIG[0])
    hello(driver, "w1", BIG[0])
    assert planner.memory == [worker_bytes([BIG[0]] * 2)]
    assert driver.fleet.job == driver.job, "what a worker may fill is not part of what it trains"


def test_a_worker_that_comes_to_a_gpu_of_the_run_takes_its_memory_for_no_stranger_s() -> None:
    """The first one has left when the third comes: what it saw, when nobody was there, is still known."""
    driver = driven(Asked(), 3)
    for number, device in enumerate((BIG[0], _seen(BIG[0], 20), BIG[1])):
        hello(driver, f"w{number}", device)
    driver.voted(0)
    lose(driver, "w0")
    driver.feed(SpawnRequested(1))
    hello(driver, "w3", _seen(BIG[0], 30))
    assert memory(driver) == [worker_bytes([BIG[0]] * 2)]


def memory(driver: Driver) -> list[int | None]:
    return [group.memory_bytes for group in driver.fleet.groups_of(driver.fleet.joined)]


def test_memory_is_shared_out_within_a_class_and_told_of_each_speed_alike() -> None:
    driver = driven(Asked(), 5)
    for number, device in enumerate((BIG[0], BIG[0], BIG[1], SMALL, None)):
        hello(driver, f"w{number}", device, device_class="aaabb"[number])
    fleet = replace(driver.fleet, speeds=Speeds(slow={"w1": Straggler(ratio=2.0, until_s=1e9, speed=0.5)}))
    shared, alone = worker_bytes([BIG[0]] * 2), worker_bytes([SMALL])
    b = WorkerGroup(count=2, device_class="b", memory_bytes=alone)
    even = WorkerGroup(count=3, device_class="a", memory_bytes=shared)
    assert fleet.groups_of(fleet.joined) == (even, b)
    slow = even.model_copy(update={"count": 1, "speed": 0.5})
    assert fleet.groups_of(fleet.joined, by_speed=True) == (even.model_copy(update={"count": 2}), slow, b)


def _seen(device: DeviceFacts, others: int) -> DeviceFacts:
    return device.model_copy(update={"others_bytes": others * 2**30})


def test_workers_on_cpus_are_planned_as_before() -> None:
    planner = Asked()
    driver = driven(planner, 2)
    driver.gather()
    assert planner.memory == [None]


def five(planner: Asked) -> Driver:
    """A run of five workers with large GPUs, one of them a spare, that has done a step."""
    driver = driven(planner, 5)
    for number in range(5):
        hello(driver, f"w{number}", BIG[number])
    driver.voted(0)
    return driver


def test_a_spare_with_a_smaller_gpu_takes_no_seat_of_a_plan_that_was_made_for_larger_ones() -> None:
    planner = Asked()
    driver = five(planner)
    driver.feed(SpawnRequested(1))
    hello(driver, "w5", SMALL)
    lose(driver, "w0")
    assert planner.memory[0] == worker_bytes(BIG[:5])
    assert planner.memory[-1] == worker_bytes([SMALL])


def test_a_spare_like_the_others_takes_over_without_a_new_plan() -> None:
    planner = Asked()
    driver = five(planner)
    lose(driver, "w0")
    assert planner.memory == [worker_bytes(BIG[:5])]


def test_a_manager_that_has_started_again_hears_of_devices_again() -> None:
    driver = driven(Asked(), 2)
    driver.gather()
    assert memory(driver) == [None]
    for name in ("w0", "w1"):
        hello(driver, name, BIG[0])
    assert memory(driver) == [worker_bytes([BIG[0]] * 2)]
