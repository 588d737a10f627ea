"""A GPU that fails is a lost worker; what is wrong on every GPU ends the run."""

from collections.abc import Callable

import pytest

from tests.unit.fleet.support import Driver, two_stages
from varuna.core.devices import DeviceFacts, DeviceFault, WorkerGroups
from varuna.core.messages import Failed, Leaving, Suspect
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import MorphRequested, WorkerExited, WorkerSpawned
from varuna.fleet.state.outputs import Ask, Kill, Spawn
from varuna.fleet.state.phases import Ended, Running
from varuna.fleet.state.questions import WhichPlan
from varuna.fleet.state.run_events import Notice, RunEnded, WorkerLost

GB = 2**30
ECC = "CUDA error: uncorrectable ECC error encountered"


class Gpus(Driver):
    """Worker w3 has GPU 3, unless told otherwise; all are of one class."""

    gpu_of: dict[str, str]

    def hello_of(self, worker, **changes):  # type: ignore[no-untyped-def]
        name = getattr(self, "gpu_of", {}).get(worker, worker.replace("w", "gpu"))
        device = DeviceFacts(name=name, memory_bytes=16 * GB)
        return super().hello_of(worker, **changes).model_copy(update={"device": device, "device_class": "T4"})


def running(workers: int = 4, **options: object) -> Gpus:
    driver = Gpus(FleetConfig(workers=workers, **options), plan=two_stages)  # type: ignore[arg-type]
    driver.begin(0, 1)
    return driver


def fails(driver: Driver, worker: str, error: str = ECC, *, is_memory: bool = False) -> None:
    device = driver.fleet.workers[worker].device
    fault = DeviceFault(error=error, device=device.name if device else "", is_memory=is_memory)
    driver.say(worker, Failed(summary=error, traceback="T", fault=fault))


def goes_on(driver: Driver) -> None:
    """The others stop, and form the next generation."""
    driver.wait(0.4)
    driver.all_held(driver.fleet.recorded.step + 1)
    assert isinstance(driver.fleet.phase, Running)


def spawned(driver: Driver) -> list[Spawn]:
    return [each for each in driver.done if isinstance(each, Spawn)]


def test_a_broken_gpu_is_a_lost_worker() -> None:
    driver = running()
    fails(driver, "w1")
    assert [each.worker for each in driver.done if isinstance(each, Kill)] == ["w1"]
    assert [event.cause for event in driver.told(WorkerLost)] == [f"worker w1 lost its GPU: {ECC}"]
    assert [event.text for event in driver.told(Notice) if event.warning] == [
        "GPU gpu1 (T4) gets no worker for 1m 00s, since it failed"
    ]
    goes_on(driver)
    driver.voted(2)
    assert driver.fleet.recorded.step == 2


def test_its_gpu_gets_no_worker_for_a_while_and_then_one_again() -> None:
    driver = running()
    driver.spawns = False
    before = len(spawned(driver))
    fails(driver, "w1")
    goes_on(driver)
    driver.wait(58)
    assert len(spawned(driver)) == before
    driver.wait(3)
    assert spawned(driver)[before:] == [Spawn(1)]


def test_another_lost_worker_is_replaced_meanwhile_on_another_gpu() -> None:
    driver = running()
    fails(driver, "w1")
    goes_on(driver)
    driver.kill("w2")
    assert spawned(driver)[-1] == Spawn(1, avoided=("w1",))


def test_it_rests_twice_as_long_each_time() -> None:
    driver = running()
    driver.gpu_of = {"w4": "gpu1"}
    fails(driver, "w1")
    goes_on(driver)
    driver.voted(2)
    driver.wait(62)
    driver.hello("w4")
    fails(driver, "w4", "another error")
    assert [event.text for event in driver.told(Notice) if event.warning][-1].startswith(
        "GPU gpu1 (T4) gets no worker for 2m"
    )


def test_a_gpu_that_breaks_again_and_again_does_not_count_as_replacements_that_die() -> None:
    driver = running(max_start_failures=1)
    driver.gpu_of = {"w4": "gpu1"}
    fails(driver, "w1")
    goes_on(driver)
    driver.wait(62)
    assert "w4" in driver.fleet.workers
    driver.say("w4", Failed(summary=ECC, traceback="", fault=DeviceFault(error=ECC, device="gpu1")))
    assert not driver.told(RunEnded)


def test_the_same_error_on_two_gpus_one_after_the_other_in_a_step_ends_the_run() -> None:
    driver = running()
    fails(driver, "w1")
    goes_on(driver)
    fails(driver, "w2")
    [end] = driver.told(RunEnded)
    assert end.exit_code == 1
    assert all(word in end.text for word in ("step 2", ECC, "gpu1", "w1", "gpu2", "w2", "CUDA_LAUNCH_BLOCKING"))


@pytest.mark.parametrize("how", ["at once", "another step", "another error"])
def test_two_gpus_break_by_chance(how: str) -> None:
    driver = running(6)
    fails(driver, "w1")
    if how != "at once":
        goes_on(driver)
    if how == "another step":
        driver.voted(2)
    fails(driver, "w2", "CUDA error: unspecified launch failure" if how == "another error" else ECC)
    assert not driver.told(RunEnded)
    assert len(driver.told(WorkerLost)) == 2


def test_before_the_first_generation_two_are_enough() -> None:
    driver = Gpus(FleetConfig(workers=3), plan=two_stages)
    for name in ("w0", "w1"):
        driver.say(name, Failed(summary=ECC, traceback="", fault=DeviceFault(error=ECC, device=f"gpu of {name}")))
    assert [each.exit_code for each in driver.told(RunEnded)] == [1]


def test_a_run_waits_for_a_gpu_that_it_cannot_do_without() -> None:
    driver = running(2)
    fails(driver, "w1")
    driver.wait(0.4)
    driver.held("w0", 2)
    driver.wait(58, still=False)
    assert not driver.told(RunEnded)
    driver.wait(4, still=False)
    driver.hello("w2")
    driver.wait(2, still=False)
    assert isinstance(driver.fleet.phase, Running)


def test_after_its_last_step_a_script_has_nobody_else_to_finish_it() -> None:
    driver = running()
    driver.say("w0", Leaving(step=2))
    fails(driver, "w0")
    assert [each.exit_code for each in driver.told(RunEnded)] == [1]


# -- memory


def sizes(driver: Driver) -> WorkerGroups:
    return driver.fleet.groups_of(driver.fleet.joined)


def test_out_of_memory_loses_the_worker_and_the_next_plan_fills_less() -> None:
    driver = running(5)  # a spare, with which the plan that ran could go on
    fails(driver, "w1", "CUDA out of memory.", is_memory=True)
    assert [size.memory_part for size in sizes(driver)] == [0.9]
    assert any("fill 10 % less" in event.text for event in driver.told(Notice))
    asked: list[WhichPlan] = []
    plan_answer = driver.answer

    def answer(ask: Ask):  # type: ignore[no-untyped-def]
        if isinstance(ask.question, WhichPlan):
            asked.append(ask.question)
        return plan_answer(ask)

    driver.answer = answer  # type: ignore[method-assign]
    goes_on(driver)
    assert [size.memory_part for size in asked[-1].workers] == [0.9]
    assert spawned(driver)[-1] == Spawn(1)  # its GPU is whole


def test_what_other_processes_held_is_said() -> None:
    driver = running(5)
    fault = DeviceFault(error="CUDA out of memory.", device="gpu1", is_memory=True, others_bytes=9 * GB)
    driver.say("w1", Failed(summary=fault.error, traceback="T", fault=fault))
    [said] = [event.text for event in driver.told(Notice) if "fill 10 % less" in event.text]
    assert "on a GPU of 16 GiB, of which other processes hold 9 GiB: " in said


def test_ranks_that_run_out_of_memory_at_once_lower_it_once() -> None:
    driver = running(6)
    for name in ("w1", "w3"):
        fails(driver, name, "CUDA out of memory.", is_memory=True)
    assert [size.memory_part for size in sizes(driver)] == [0.9]


def test_the_third_time_ends_the_run_with_the_figures() -> None:
    driver = running(8)
    for name in ("w1", "w2"):
        fails(driver, name, "CUDA out of memory.", is_memory=True)
        goes_on(driver)
    assert [size.memory_part for size in sizes(driver)] == [pytest.approx(0.81)]
    fails(driver, driver.fleet.members[1], "CUDA out of memory.", is_memory=True)
    [end] = driver.told(RunEnded)
    assert all(word in end.text for word in ("stage 1", "16 GiB", "19% less", "--memory-per-worker"))


def test_a_worker_that_survives_it_stays_and_the_generation_ends_at_once() -> None:
    driver = running(5)
    fault = DeviceFault(error="CUDA out of memory.", device="gpu1", is_memory=True)
    driver.say("w1", Suspect(generation=0, reason="rank 1 (stage 1) ran out of memory in step 2", fault=fault))
    assert driver.fleet.workers["w1"].is_joined
    assert not isinstance(driver.fleet.phase, Running)
    assert [size.memory_part for size in sizes(driver)] == [0.9]
    goes_on(driver)
    assert driver.fleet.record.cause == "worker w1 reported: rank 1 (stage 1) ran out of memory in step 2"


# ---- machines

EIO = "OSError: [Errno 5] Input/output error: '/data/x'"


def on_machines(workers: int = 4) -> Gpus:
    """Each worker on a machine of its own, as in a run of one machine, whose processes stand for VMs."""
    driver = Gpus(FleetConfig(workers=workers), plan=two_stages, node_of=lambda worker: worker)
    driver.begin(0, 1)
    return driver


def machine_fails(driver: Driver, worker: str, error: str = EIO) -> None:
    driver.say(worker, Failed(summary=error, traceback="T", fault=DeviceFault(error=error, of_machine=True)))


def test_a_disk_that_fails_loses_the_worker_and_its_machine_rests() -> None:
    driver = on_machines()
    machine_fails(driver, "w1")
    assert [event.cause for event in driver.told(WorkerLost)] == [f"worker w1 lost its machine: {EIO}"]
    assert [event.text for event in driver.told(Notice) if event.warning] == [
        "machine w1 gets no worker for 1m 00s, since it failed"
    ]
    goes_on(driver)
    driver.wait(30)
    assert len(spawned(driver)) == 1  # those of the beginning
    driver.wait(31)
    assert [each.count for each in spawned(driver)] == [4, 1]


@pytest.mark.parametrize("together", [True, False])
def test_before_the_first_step_a_machine_that_fails_ends_the_run_if_there_is_no_other(together: bool) -> None:
    driver = Gpus(FleetConfig(workers=2), plan=two_stages, node_of=lambda worker: "a" if together else worker)
    driver.gather()
    machine_fails(driver, "w1")
    ended = [each.text for each in driver.told(RunEnded)]
    assert ended == ([f"worker w1 (rank 1, generation 0) failed: {EIO}\nT"] if together else [])


def test_the_same_error_on_two_machines_one_after_the_other_in_a_step_ends_the_run() -> None:
    driver = on_machines()
    machine_fails(driver, "w1")
    goes_on(driver)
    machine_fails(driver, "w2")
    [end] = driver.told(RunEnded)
    assert "step 2 broke two machines in the same way" in end.text
    assert "machine w1 of w1" in end.text
    assert "if they share a disk or a mount" in end.text


def test_other_errors_on_two_machines_are_chance() -> None:
    driver = on_machines(6)
    machine_fails(driver, "w1")
    goes_on(driver)
    machine_fails(driver, "w2", EIO.replace("/data/x", "/data/y"))
    goes_on(driver)
    assert not driver.told(RunEnded)


# ---- newcomers

MISSING = "ModuleNotFoundError: No module named 'webdataset'"


def late(driver: Driver) -> str:
    """A worker that comes while others train."""
    driver.kill("w1")
    goes_on(driver)
    [name] = [name for name in driver.fleet.workers if not driver.fleet.is_member(name)]
    return name


@pytest.mark.parametrize("code", [None, 1, 3])
def test_a_newcomer_that_fails_does_not_end_a_run_that_trains_without_it(code: int | None) -> None:
    driver = running()
    name = late(driver)
    if code is None:
        driver.say(name, Failed(summary=MISSING, traceback="T"))
    else:
        driver.kill(name, code, MISSING)
        driver.wait(driver.fleet.config.exit_grace_s + 1)
    assert not driver.told(RunEnded)
    [said] = [event.text for event in driver.told(Notice) if event.warning]
    assert f"worker {name} " in said
    assert MISSING in said
    assert "The run trains without it" in said
    assert name not in driver.fleet.workers
    driver.wait(120)
    assert isinstance(driver.fleet.phase, Running)


def test_a_worker_that_fails_before_any_step_ends_the_run() -> None:
    driver = Gpus(FleetConfig(workers=4), plan=two_stages)
    driver.gather()
    driver.say("w1", Failed(summary=MISSING, traceback="T"))
    assert [each.exit_code for each in driver.told(RunEnded)] == [1]


def test_a_member_that_once_had_a_seat_ends_the_run() -> None:
    driver = running()
    driver.say("w1", Failed(summary=MISSING, traceback="T"))
    assert [each.exit_code for each in driver.told(RunEnded)] == [1]


# ---- errors that say nothing of a machine

WRONG = "ValueError: math domain error"


def raises(driver: Driver, worker: str, error: str = WRONG) -> None:
    driver.say(worker, Failed(summary=error, traceback="Traceback of it", exit_code=1))


def ends(driver: Driver) -> list[str]:
    return [each.text for each in driver.told(RunEnded)]


def on_vms(workers: int = 4, node_of: Callable[[str], str] = lambda worker: worker) -> Gpus:
    """Workers of agents."""
    config = FleetConfig(workers=workers, elastic=True, replace=False, wait_s=float("inf"))
    driver = Gpus(config, plan=two_stages)
    for name in (f"w{number}" for number in range(workers)):
        driver.feed(WorkerSpawned(name, node_of(name)))
    driver.begin(0, 1)
    return driver


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_an_error_costs_its_worker_once_where_others_have_machines_of_their_own(how: str) -> None:
    driver = on_vms()
    if how == "raises":
        raises(driver, "w1")
    else:
        driver.kill("w1", 3, WRONG)
        driver.wait(driver.fleet.config.exit_grace_s + 1)
    assert not ends(driver)
    [lost] = driver.told(WorkerLost)
    assert lost.cause.startswith("worker w1 (rank 1, generation 0) ")
    first, rests = (event.text for event in driver.told(Notice) if event.warning)
    assert "Its machine may be to blame, so the run goes on without this worker" in first
    assert WRONG in first
    assert rests == "machine w1 gets no worker for 1m 00s, since it failed"
    goes_on(driver)
    driver.voted(2, 3)
    assert driver.fleet.recorded.step == 3


@pytest.mark.parametrize("second", ["w2", "w3"])
def test_a_step_that_fails_again_on_another_machine_ends_the_run(second: str) -> None:
    driver = on_vms()
    raises(driver, "w1")
    goes_on(driver)
    raises(driver, second, "KeyError: 'x'")
    [text] = ends(driver)
    assert text.startswith(f"worker {second} (rank ")
    assert f"Step 2 had failed on machine w1 before: worker w1 (rank 1, generation 0) failed: {WRONG}" in text
    assert text.endswith("Traceback of it")


@pytest.mark.parametrize("how", ["raises", "exits", "loses its disk"])
def test_behind_its_loop_a_worker_may_fail_as_long_as_rank_0_runs_the_script_on_another_machine(how: str) -> None:
    driver = on_vms(2)
    driver.leave("w0", "w1")
    match how:
        case "raises":
            raises(driver, "w1")
        case "exits":
            driver.kill("w1", 3, WRONG)
            driver.wait(driver.fleet.config.exit_grace_s + 1)
        case _:
            machine_fails(driver, "w1")
    assert not ends(driver)
    assert any("Its machine may be to blame: rank 0" in event.text for event in driver.told(Notice) if event.warning)
    driver.kill("w0", 0)
    driver.wait(driver.fleet.config.exit_grace_s + 1)
    assert driver.end == Ended(0, "2 steps done")


def test_ranks_that_fail_together_end_the_run_at_once() -> None:
    driver = on_vms()
    raises(driver, "w1")
    raises(driver, "w0")
    assert len(ends(driver)) == 1


def test_a_later_step_that_fails_elsewhere_is_another_matter() -> None:
    driver = on_vms(6)
    raises(driver, "w1")
    goes_on(driver)
    driver.voted(2)
    raises(driver, "w2")
    goes_on(driver)
    assert not ends(driver)


def test_workers_of_one_machine_that_fail_together_say_no_more_than_one_and_once_more_in_its_next_generation() -> None:
    driver = on_vms(node_of=lambda worker: "a" if worker in ("w1", "w2") else "b")
    raises(driver, "w1")
    raises(driver, "w2")
    assert not ends(driver)
    driver.spawns = False
    goes_on(driver)
    raises(driver, "w0")
    assert len(ends(driver)) == 1


@pytest.mark.parametrize(("accused", "stays"), [("w0", True), ("w2", False)])
def test_two_machines_that_have_read_other_samples_than_a_third_cost_that_one_and_not_the_run(
    accused: str, stays: bool
) -> None:
    driver = on_vms(8)

    def disputes(worker: str, other: str) -> None:
        rank = driver.fleet.rank_of(other)
        driver.say(worker, Failed(summary="dataset[3] is not the same here", traceback="T", accused=rank))

    driver.say("w5", Failed(summary="what", traceback="T", accused=6))
    goes_on(driver)
    driver.voted(2)
    disputes("w1", "w0")
    goes_on(driver)
    disputes("w3", accused)
    assert bool(ends(driver)) != stays
    if stays:
        assert {lost.worker for lost in driver.told(WorkerLost)} == {"w0", "w1", "w3", "w5"}
        goes_on(driver)
        driver.voted(3)
        assert driver.fleet.recorded.step == 3


@pytest.mark.parametrize("spared", [True, False])
def test_a_machine_that_fails_again_in_a_long_step_ends_the_run_unless_a_generation_did_without_it(
    spared: bool,
) -> None:
    driver = on_vms(node_of=lambda worker: "a" if worker in ("w1", "w9") else worker)
    raises(driver, "w1")
    if spared:
        goes_on(driver)
    driver.feed(WorkerSpawned("w9", "a"))
    driver.hello("w9")
    driver.feed(MorphRequested("the machine is back"))
    goes_on(driver)
    assert "w9" in driver.fleet.members
    raises(driver, "w9")
    assert bool(ends(driver)) != spared


@pytest.mark.parametrize("driver", [on_machines(), on_vms(node_of=lambda worker: "a")])
def test_where_all_workers_are_on_one_machine_an_error_ends_the_run(driver: Gpus) -> None:
    raises(driver, "w1")
    [text] = ends(driver)
    assert text == f"worker w1 (rank 1, generation 0) failed: {WRONG}\nTraceback of it"


def test_a_worker_that_the_system_kills_for_want_of_memory_is_said_to_be() -> None:
    driver = running()
    driver.feed(WorkerExited("w1", -9, is_oom=True))
    [lost] = driver.told(WorkerLost)
    assert lost.cause.startswith("worker w1 killed by SIGKILL: its machine, or its container, ran out of host memory")
