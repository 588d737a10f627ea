"""Fail-stutter: who is slow for certain is left out; noise never is."""

import random
from functools import partial

import pytest

from tests.depth import by_depth
from tests.unit.fleet.support import (
    Driver,
    by_class,
    make_job,
    make_plan,
    sends,
    two_stages,
    unlike_pipelines,
)
from varuna.core import devices
from varuna.core.devices import WorkerGroups
from varuna.core.messages import Beat, Leaving, RaiseFlag
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import Recalibrated
from varuna.fleet.state.phases import Running
from varuna.fleet.state.run_events import Notice
from varuna.fleet.state.stutter import SLOW_RATIO, StutterEvidence, slower_than_peers, slower_than_predicted

PLAN = make_plan(make_job(), 8, None, stages=2)
LONG = make_job().model_copy(update={"global_batch": 128})


def beats_until_evicted(slow: dict[int, float], *, replicas: int, beats: int, seed: int) -> dict[int, int]:
    """By rank: after how many beats it was found slow. All times have 10 % of noise (one standard deviation)."""
    plan = make_plan(make_job(), replicas * 2, None, stages=2)
    choose = random.Random(seed)
    evidence = {rank: StutterEvidence() for rank in range(plan.workers)}
    compute_s = dict.fromkeys(range(plan.workers), 1.0)
    found: dict[int, int] = {}
    for beat in range(1, beats + 1):
        for rank in range(plan.workers):
            compute_s[rank] = max(0.3, choose.gauss(1.0, 0.1)) * slow.get(rank, 1.0)
            peers = (other for other in compute_s if other != rank and (other - rank) % plan.stages == 0)
            ratio = slower_than_peers(compute_s[rank], sorted(compute_s[other] for other in peers))
            assert ratio is not None
            evidence[rank] = evidence[rank].updated(ratio, SLOW_RATIO)
            if evidence[rank].is_conclusive:
                found.setdefault(rank, beat)
    return found


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_noise_of_ten_percent_evicts_nobody_in_thousands_of_beats(replicas: int) -> None:
    assert beats_until_evicted({}, replicas=replicas, beats=by_depth(2_000, 10_000) // replicas, seed=replicas) == {}


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_thirty_percent_is_found_within_twenty_beats(replicas: int) -> None:
    late = 0
    for seed in range(by_depth(20, 200)):
        found = beats_until_evicted({3: 1.3}, replicas=replicas, beats=30, seed=seed)
        assert list(found) == [3]
        late += found[3] > 20
    assert late <= (by_depth(1, 4) if replicas < 8 else 0)  # few peers are as noisy as oneself


def test_a_whole_run_that_is_slow_has_no_stragglers() -> None:
    assert beats_until_evicted(dict.fromkeys(range(8), 2.0), replicas=4, beats=200, seed=1) == {}


def test_a_short_hiccup_is_forgiven() -> None:
    evidence = StutterEvidence()
    for ratio in (1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0):
        evidence = evidence.updated(ratio, SLOW_RATIO)
        assert not evidence.is_conclusive


def test_with_one_replica_the_calibration_is_the_measure() -> None:
    expected_s = (1.0, 2.0, 2.0, 4.0)
    assert slower_than_predicted(3, {0: 0.5, 1: 1.0, 2: 1.0, 3: 2.0}, expected_s) == pytest.approx(1.0)
    assert slower_than_predicted(3, {0: 0.5, 1: 1.0, 2: 1.0, 3: 3.0}, expected_s) == pytest.approx(1.5)
    assert slower_than_predicted(3, {0: 0.5, 1: 1.0, 2: 1.0, 3: 3.0}, None) is None
    assert slower_than_predicted(0, {0: 1.0}, (1.0,)) is None


def test_without_a_peers_times_there_is_no_verdict() -> None:
    assert slower_than_peers(1.0, []) is None


def beat_all(driver: Driver, beats: int, **slow: float) -> None:
    for _ in range(beats):
        driver.now_s += 0.2
        for name in driver.fleet.joined:
            seconds = slow.get(name, 1.0)
            driver.say(
                name,
                Beat(
                    generation=driver.fleet.generation,
                    step=0,
                    activity="",
                    forward_s=seconds / 3,
                    backward_s=seconds * 2 / 3,
                ),
            )
        driver.feed_tick()


def slow_run(**options: object) -> Driver:
    driver = Driver(FleetConfig(workers=9, slow_ratio=SLOW_RATIO, **options), plan=two_stages)  # type: ignore[arg-type]
    driver.begin(0, 1)
    return driver


def test_the_beat_of_a_worker_that_has_said_that_it_leaves_is_not_judged() -> None:
    driver = slow_run()
    beat_all(driver, 1)
    driver.say("w3", Leaving(step=2))
    beat = Beat(generation=driver.fleet.generation, step=2, activity="", forward_s=1.0, backward_s=2.0)
    driver.say("w3", beat)
    assert not driver.fleet.speeds.slow
    driver.say("w2", beat)  # and what it said before counts for nobody
    driver.say("w1", Leaving(step=2))
    driver.say("w1", beat)


def test_a_slow_worker_is_reported_left_out_and_its_seat_taken_by_the_spare() -> None:
    driver = slow_run()
    beat_all(driver, 20, w5=1.3)
    [notice] = [notice for notice in driver.told(Notice) if notice.warning]
    assert "worker w5 on node local is slow: 1.30 times" in notice.text
    assert [message.flag for _, message in sends(driver.done, RaiseFlag)] == ["regroup"]
    driver.voted(2)
    driver.all_held(3)
    assert "worker w5 is slow" in driver.fleet.record.cause
    assert "w5" not in driver.fleet.record.grid
    assert driver.fleet.record.grid[5] == "w8"
    assert driver.fleet.record.steps_redone == 0


def test_a_slow_worker_is_taken_in_again_on_probation_and_longer_left_out_the_next_time() -> None:
    driver = slow_run(probation_s=30.0)
    beat_all(driver, 20, w5=2.0)
    driver.voted(2)
    driver.all_held(3)
    driver.voted(3)
    driver.wait(35)
    assert not driver.fleet.speeds.slow
    assert "another chance" in driver.told(Notice)[-1].text
    driver.kill("w8")  # now its old seat is free again
    driver.all_held(4)
    driver.voted(4)
    assert "w5" in driver.fleet.record.grid
    beat_all(driver, 20, w5=2.0)
    assert driver.fleet.speeds.slow["w5"].until_s > driver.now_s + 50


def test_a_straggler_has_a_smaller_share_where_the_run_would_be_slower_without_it() -> None:
    driver = Driver(FleetConfig(workers=4, slow_ratio=SLOW_RATIO), plan=two_stages)
    driver.begin(0, 1)
    beat_all(driver, 20, w1=1.5)
    assert [message.flag for _, message in sends(driver.done, RaiseFlag)] == ["regroup"]
    driver.voted(2)
    driver.all_held(3)
    plan = driver.fleet.record.plan
    assert plan.speeds == pytest.approx((1.0, 1 / 1.5), rel=0.04)
    assert plan.shares == (5, 3)
    assert driver.fleet.record.grid == ("w0", "w3", "w2", "w1")  # stages change pipelines, and no state moves
    assert driver.fleet.record.moved_sections == 0
    driver.voted(3)
    beat_all(driver, 40, w1=1.5)  # that is what is known of it
    driver.wait(by_depth(320, 1000))
    assert not [event for event in driver.told(Notice) if "another chance" in event.text]
    assert isinstance(driver.fleet.phase, Running)
    assert driver.fleet.phase.regroup is None


@pytest.mark.parametrize("slow", [("w1", "w2", "w3"), ("w2", "w3"), ("w3",)])
def test_whoever_is_in_the_majority_speeds_are_those_of_the_workers(slow: tuple[str, ...]) -> None:
    driver = Driver(FleetConfig(workers=4, slow_ratio=SLOW_RATIO), plan=partial(make_plan, stages=1), job=LONG)
    driver.begin(0, 1)
    beat_all(driver, 20, **dict.fromkeys(slow, 2.0))
    driver.voted(2)
    driver.all_held(3)
    speeds = driver.fleet.record.plan.speeds
    assert speeds == pytest.approx((1.0,) * (4 - len(slow)) + (0.5,) * len(slow), rel=0.04)
    assert set(driver.fleet.record.grid[4 - len(slow) :]) == set(slow)
    driver.voted(3)
    driver.kill("w0")  # one of full speed
    driver.all_held(4)
    assert driver.fleet.record.plan.speeds == (pytest.approx(speeds[1:]) if set(speeds[1:]) != {1.0} else ())
    assert driver.fleet.speeds.slow.keys() == set(slow)


def test_a_slow_worker_that_recovers_gets_its_whole_share_again() -> None:
    driver = Driver(FleetConfig(workers=3, slow_ratio=SLOW_RATIO), plan=partial(make_plan, stages=1), job=LONG)
    driver.begin(0, 1)
    beat_all(driver, 20, w2=2.0)
    driver.voted(2)
    driver.all_held(3)
    assert driver.fleet.record.plan.speeds[:2] == (1.0, 1.0)
    driver.voted(3)
    beat_all(driver, 20)
    assert "worker w2 on node local is as fast as its peers again" in [event.text for event in driver.told(Notice)]
    assert not driver.fleet.speeds.slow
    assert driver.fleet.speed_of("w2") == 1.0
    driver.voted(4)
    driver.all_held(5)
    assert driver.fleet.record.plan.speeds == ()
    assert "worker w2 is faster than it was" in driver.fleet.record.cause


@pytest.mark.parametrize("seed", range(by_depth(3, 30)))
def test_noise_moves_nobody_whose_speed_is_known(seed: int) -> None:
    choose = random.Random(seed)
    driver = Driver(FleetConfig(workers=8, slow_ratio=SLOW_RATIO), plan=partial(make_plan, stages=1), job=LONG)
    driver.begin(0, 1)
    slow = {"w5", "w6", "w7"}

    def beat(count: int) -> None:
        for _ in range(count):
            noise = {f"w{number}": max(0.3, choose.gauss(1.0, 0.1)) for number in range(8)}
            beat_all(driver, 1, **{name: value * (2 if name in slow else 1) for name, value in noise.items()})

    beat(30)
    assert driver.fleet.speeds.slow.keys() == slow
    driver.voted(2)
    driver.all_held(3)
    driver.voted(3)
    beat(150)
    assert driver.fleet.speeds.slow.keys() == slow
    assert driver.fleet.record.plan.speeds[:5] == (1.0,) * 5
    assert driver.fleet.generation == 1
    assert isinstance(driver.fleet.phase, Running)
    assert driver.fleet.phase.regroup is None


def test_a_planner_that_knows_no_speeds_keeps_a_straggler_which_is_found_again_after_its_time() -> None:
    def even(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return two_stages(job, devices.size_of(workers), micro_batch)

    driver = Driver(FleetConfig(workers=4, slow_ratio=SLOW_RATIO, probation_s=10.0), plan=even)
    driver.begin(0, 1)
    beat_all(driver, 30, w1=1.4)  # half of the workers for 40 % would not be worth it
    assert driver.fleet.speeds.slow.keys() == {"w1"}
    driver.wait(15, still=False)
    assert not driver.fleet.speeds.slow
    beat_all(driver, 30, w1=1.4)
    assert driver.fleet.speeds.slow.keys() == {"w1"}
    assert driver.fleet.speeds.strikes == {"w1": 2}


@pytest.mark.parametrize("ratio", [1.3, 1.5, 3.0])
def test_a_single_peer_tells_who_of_two_is_slow(ratio: float) -> None:
    driver = Driver(FleetConfig(workers=2, slow_ratio=SLOW_RATIO), plan=partial(make_plan, stages=1), job=LONG)
    driver.begin(0, 1)
    beat_all(driver, 30, w1=ratio)
    assert driver.fleet.speeds.slow.keys() == {"w1"}
    assert driver.fleet.speed_of("w1") == pytest.approx(1 / ratio, rel=0.04)


def test_without_a_threshold_nobody_is_judged() -> None:
    driver = Driver(FleetConfig(workers=4), plan=two_stages)
    driver.begin(0, 1)
    beat_all(driver, 50, w3=9.0)
    assert not driver.told(Notice)


@pytest.mark.parametrize("slow", ["w1", "w4"])
def test_stages_of_unlike_pipelines_are_compared_by_what_they_were_predicted_to_take(slow: str) -> None:
    """Three stages of 1, 1 and 2 sections, and two of 2: each takes as long as it has sections."""
    driver = Driver(FleetConfig(workers=5, slow_ratio=SLOW_RATIO), plan=unlike_pipelines, job=LONG)
    driver.begin(0, 1)
    plan, usual = driver.fleet.record.plan, {}
    for rank, name in enumerate(driver.fleet.record.grid):
        usual[name] = float(len(plan.sections_at(rank)))
    beat_all(driver, 20, **usual | {slow: 1.5 * usual[slow]})
    assert not driver.fleet.speeds.slow  # the times of stages are not predicted yet
    expected_s = tuple(0.1 * len(slot.sections) for slot in plan.slots)
    driver.feed(Recalibrated(driver.fleet.generation, expected_s, None))
    beat_all(driver, 20, **usual)
    assert not driver.fleet.speeds.slow
    beat_all(driver, 20, **usual | {slow: 1.5 * usual[slow]})
    assert driver.fleet.speeds.slow.keys() == {slow}
    assert driver.fleet.speed_of(slow) == pytest.approx(1 / 1.5, rel=0.05)
    driver.voted(2)
    driver.all_held(3)
    assert slow in driver.fleet.record.cause


def all_of_each_class(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """As many pipelines of each class, of two stages, as it has workers for."""
    plan, count = (
        by_class(job, workers, micro_batch),
        {each: devices.size_of(groups) // 2 for each, groups in devices.by_class(workers).items()},
    )
    pipelines = (
        each.model_copy(update={"replicas": count[each.device_class], "speeds": ()}) for each in plan.pipelines
    )
    wider = Plan.model_validate({**dict(plan), "pipelines": tuple(pipelines)})
    found = wider.at_speeds(workers)
    return found.model_copy(update={"step_s": 1.0 / (sum(found.speeds) or found.replicas)})


OF_B = {f"w{number}": 3.0 for number in range(4, 8)}


def of_two_classes() -> Driver:
    """Workers w0 to w3 are of one, the others of one that is three times as slow, which nobody knows."""
    config = FleetConfig(workers=8, slow_ratio=SLOW_RATIO, replace=False)
    driver = Driver(config, plan=all_of_each_class, job=LONG, class_of=lambda name: "a" if name < "w4" else "b")
    driver.begin(0, 1)
    assert driver.fleet.record.plan.classes == {"a": 4, "b": 4}
    driver.feed(Recalibrated(driver.fleet.generation, (1.0, 1.0, 1.0, 1.0)))
    beat_all(driver, 30, **OF_B)
    return driver


def test_like_is_compared_with_like_and_a_slow_class_is_no_straggler() -> None:
    driver = of_two_classes()
    assert not driver.fleet.speeds.slow
    beat_all(driver, 30, **{**OF_B, "w6": 6.0})
    assert list(driver.fleet.speeds.slow) == ["w6"]


def test_a_straggler_of_a_class_has_a_smaller_share_in_its_class() -> None:
    driver = of_two_classes()
    beat_all(driver, 30, **{**OF_B, "w5": 6.0})
    driver.voted(2)
    driver.all_held(3)
    plan, grid = driver.fleet.record.plan, driver.fleet.record.grid
    assert plan.speeds == pytest.approx((1.0, 1.0, 1.0, 0.5), rel=0.04)
    assert "w5" in grid[6:]
    assert plan.shares[3] < plan.shares[2] < plan.shares[0]
    assert driver.fleet.record.moved_sections == 0, "stages change pipelines"
    driver.voted(3)
    driver.feed(Recalibrated(driver.fleet.generation, (1.0, 1.0, 1.0, 1.0)))
    beat_all(driver, 40, **{**OF_B, "w5": 6.0})  # that is what is known of it
    assert isinstance(driver.fleet.phase, Running)
    assert driver.fleet.phase.regroup is None
    beat_all(driver, 40, **OF_B)
    driver.voted(4)
    driver.all_held(5)
    assert driver.fleet.record.plan.speeds == ()
    assert "worker w5 is faster than it was" in driver.fleet.record.cause


def test_in_pipelines_on_several_classes_nobody_is_a_straggler() -> None:
    """All count as the slowest there, and the fast ones are no measure for the others."""
    config = FleetConfig(workers=4, slow_ratio=SLOW_RATIO, replace=False)
    driver = Driver(config, plan=two_stages, job=LONG, class_of=lambda name: "a" if name < "w2" else "b")
    driver.begin(0, 1)
    assert driver.fleet.record.plan.classes == {"": 4}
    beat_all(driver, 40, w2=3.0, w3=3.0)
    assert not driver.fleet.speeds.slow
