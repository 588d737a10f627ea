"""Places of machines: pipelines stay in a region, beside workers of their zone; copies and state do not travel."""

import random
from itertools import pairwise

import pytest

from tests.unit.fleet.machine.test_preemption import flags, regroup
from tests.unit.fleet.support import Driver, by_class, candidates, make_job, make_plan, two_stages
from varuna.core.devices import WorkerGroup, WorkerGroups, class_in, class_names, equal_workers, region_of
from varuna.core.model import JobFacts
from varuna.core.node_notices import ZoneNotice
from varuna.core.plan import Copies, Plan
from varuna.fleet.machine.copy_holders import copy_holders
from varuna.fleet.machine.placement import seat, transfers
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import MorphRequested, NoticeReceived, WorkerSpawned

JOB = make_job(sections=4)
EVEN = (1, 1, 1, 1)


def crossings(plan: Plan, members: tuple[str, ...], zones: dict[str, str]) -> int:
    """Links within pipelines that go from zone to zone."""
    found = 0
    for replica in range(plan.replicas):
        seats = [zones[members[rank]] for rank in plan.ranks_of(replica)]
        found += sum(a != b for a, b in pairwise(seats))
    return found


def test_pipelines_are_filled_zone_by_zone() -> None:
    plan = make_plan(JOB, 8, None, stages=4)
    zones = {f"w{number}": "ab"[number % 2] for number in range(8)}
    members = seat(plan, candidates(zones, zones=zones), EVEN)
    assert crossings(plan, members, zones) == 0
    assert crossings(plan, seat(plan, candidates(zones), EVEN), zones) > 0


def test_as_few_links_as_possible_leave_a_zone() -> None:
    choices = random.Random(1)
    for _ in range(100):
        plan = make_plan(JOB, 12, None, stages=choices.choice([2, 3, 4]))
        zones = {f"w{number}": choices.choice("abc") for number in range(12)}
        members = seat(plan, candidates(zones, zones=zones), EVEN)
        sizes = [list(zones.values()).count(zone) for zone in sorted(set(zones.values()))]
        assert sorted(members) == sorted(zones)
        assert crossings(plan, members, zones) <= sum(size % plan.stages for size in sizes)


def test_who_holds_state_goes_beside_its_zone_where_replicas_are_alike() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    front, back = frozenset({0, 1}), frozenset({2, 3})
    holdings = {"w0": front, "w1": front, "w2": back, "w3": back}
    zones = {"w0": "a", "w1": "b", "w2": "b", "w3": "a"}
    members = seat(plan, candidates(zones, holdings, zones=zones), EVEN)
    assert crossings(plan, members, zones) == 0
    assert transfers(plan, members, holdings, EVEN) == ()


def test_copies_stay_in_a_region_that_has_several_machines() -> None:
    plan = make_plan(JOB, 6, None, stages=2).model_copy(update={"copies": Copies.SUMS})
    assert copy_holders(plan, list("abcdef"), list("xxxxyy")) == (2, 3, 0, 1, 5, 4)
    assert copy_holders(plan, list("abcdef"), list("xxxxxx")) == (2, 3, 4, 5, 0, 1)
    assert copy_holders(plan, list("abcdee"), list("xxxxyy")) == (2, 3, 4, 5, 0, 1), "alone in its region"


def test_state_comes_from_the_own_region_if_it_is_there() -> None:
    plan = make_plan(JOB, 4, None, stages=1)
    holdings = {"w0": frozenset(range(4)), "w2": frozenset(range(4))}
    moves = transfers(plan, ("w0", "w1", "w2", "w3"), holdings, EVEN, regions=list("xxyy"))
    assert {(move.source_rank, move.target_rank) for move in moves} == {(0, 1), (2, 3)}


def planned(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    return (
        by_class(job, workers, micro_batch) if len(class_names(workers)) > 1 else two_stages(job, workers, micro_batch)
    )


def in_zones(zones: str) -> Driver:
    """A worker on a machine of its own in each zone: ``"aab"`` is two in a and one in b; "-" is not known."""
    driver = Driver(FleetConfig(workers=len(zones), replace=False), plan=planned, spawns=False)
    for number, zone in enumerate(zones):
        driver.feed(WorkerSpawned(f"w{number}", f"n{number}"))
        if zone != "-":
            driver.feed(NoticeReceived(f"n{number}", ZoneNotice(zone=f"{zone}/{zone}1")))
        driver.names += 1
    driver.begin(0, 1)
    return driver


@pytest.mark.parametrize("zones", ["aaaa", "----", "aa--"])
def test_in_one_region_all_workers_are_of_one_class(zones: str) -> None:
    fleet = in_zones(zones).fleet
    assert fleet.groups_of(fleet.joined) == equal_workers(4)
    assert fleet.record.plan.shape == "2x2"


def test_in_two_regions_equal_devices_are_of_two_classes() -> None:
    fleet = in_zones("abab").fleet
    east, west = class_in("", "a"), class_in("", "b")
    assert fleet.groups_of(fleet.joined) == (WorkerGroup(count=2, region="a"), WorkerGroup(count=2, region="b"))
    assert fleet.record.plan.classes == {east: 2, west: 2}
    plan = fleet.record.plan
    for rank, name in enumerate(fleet.record.grid):
        assert region_of(plan.class_of(rank)) == fleet.machines.zones[fleet.workers[name].node][0]


def test_where_a_newcomers_machine_is_leaves_plans_that_are_made_alone() -> None:
    """Many come at once, each with its zone: planning must end all the same."""
    driver = in_zones("aabb")
    driver.answers = lambda: False
    driver.feed(MorphRequested())
    asked = driver.fleet.questions.open
    assert asked
    driver.feed(WorkerSpawned("w4", "n4"))
    driver.feed(NoticeReceived("n4", ZoneNotice(zone="c/c1")))
    assert driver.fleet.questions.open == asked
    driver.feed(NoticeReceived("n0", ZoneNotice(zone="c/c1")))
    assert driver.fleet.questions.open != asked


def test_a_region_that_is_known_late_counts_from_the_next_plan_on() -> None:
    driver = in_zones("aa--")
    for node in ("n2", "n3"):
        driver.feed(NoticeReceived(node, ZoneNotice(zone="b/b1")))
    driver.feed(MorphRequested())
    assert flags(driver) == ["regroup"]
    regroup(driver, 3)
    plan = driver.fleet.record.plan
    assert {region_of(name) for name in plan.classes} == {"a", "b"}
