"""Asking for nodes: bounds, backoff."""

from itertools import pairwise

import pytest

from tests.waiting import wait_for
from varuna.core.errors import FleetError, UsageError
from varuna.fleet.engines.grower import Grower
from varuna.fleet.engines.growth import Growth, GrowthConfig
from varuna.fleet.engines.provider import CancelledThere, CapacityError


def test_wishes_stay_within_the_users_bounds() -> None:
    growth = Growth(config=GrowthConfig(least=2, most=8))
    assert [growth.request_nodes(nodes, 0).wanted for nodes in (0, 5, 100)] == [2, 5, 8]


def test_bounds_that_cannot_be_are_refused() -> None:
    for least, most in ((3, 2), (-1, 4), (0, 0)):
        with pytest.raises(UsageError, match="bounds of"):
            GrowthConfig(least=least, most=most)


def test_a_refusal_is_followed_by_longer_and_longer_patience() -> None:
    growth = Growth(config=GrowthConfig(most=8)).request_nodes(4, 0.0)
    asked_s: list[float] = []
    now_s = 0.0
    while len(asked_s) < 7:
        if growth.due(now_s):
            asked_s.append(now_s)
            growth = growth.refused(now_s)
        now_s += 1.0
    gaps = [b - a for a, b in pairwise(asked_s)]
    assert gaps == [15, 30, 60, 120, 240, 300]
    assert growth.granted(4, now_s).refusals == 0


def test_a_group_that_stays_too_small_is_asked_again() -> None:
    growth = Growth(config=GrowthConfig(most=8)).request_nodes(4, 0.0)
    assert growth.granted(2, 0.0).next_s == 15
    assert growth.granted(2, 0.0).granted(2, 15.0).next_s == 45
    assert growth.granted(4, 0.0).next_s == 30


def test_a_new_wish_is_asked_for_at_once_but_a_cloud_that_refused_is_not_pressed() -> None:
    growth = Growth(config=GrowthConfig(most=8)).request_nodes(4, 0.0)
    assert growth.granted(4, 0.0).request_nodes(5, 1.0).due(1.0)
    assert not growth.refused(0.0).request_nodes(5, 1.0).due(1.0)


class Cloud:
    """A provider with so many machines, or an error."""

    def __init__(self, most: int, error: Exception | None = None) -> None:
        self.most, self.error = most, error
        self.nodes, self.asked, self.busy, self.closed = 0, 0, 0, False

    def resize(self, nodes: int) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.nodes = min(nodes, self.most)
        if nodes > self.most:
            raise CapacityError("no more g4dn here")

    def size(self) -> int:
        return self.nodes

    def close(self) -> None:
        if self.busy:
            self.busy -= 1
            raise CapacityError("Throttling")
        self.closed = True


def grower(cloud: Cloud) -> tuple[Grower, list[str], list[float]]:
    warnings: list[str] = []
    clock = [0.0]
    asking = Grower(
        cloud,
        GrowthConfig(most=8),
        warn=warnings.append,
        end=lambda reason, code: warnings.append(f"{code}: {reason}"),
        machines=lambda: cloud.nodes,
        clock=lambda: clock[0],
        pause_s=0.0,
    )
    return asking, warnings, clock


def test_a_cloud_without_capacity_is_asked_again_and_people_are_told_once() -> None:
    cloud = Cloud(most=2)
    asking, warnings, clock = grower(cloud)
    asking.ask_if_due()
    assert cloud.asked == 0  # nobody wants any
    asking.request_nodes(4)
    for _ in range(100):
        clock[0] += 1.0
        asking.ask_if_due()
    assert cloud.nodes == 2
    assert cloud.asked == 3  # at 1, 16 and 46 s
    assert warnings == ["requested 4 nodes: no more g4dn here. Trying again."]
    cloud.most = 8
    clock[0] += 300
    asking.ask_if_due()
    assert asking.growth.refusals == 0
    assert cloud.nodes == 4
    asking.close()
    assert cloud.closed


def test_what_was_requested_is_given_back_by_a_cloud_that_is_busy_for_a_moment() -> None:
    cloud = Cloud(most=2)
    asking, _, _ = grower(cloud)
    cloud.busy = 3
    asking.close()
    assert cloud.closed
    cloud.busy = 4
    with pytest.raises(CapacityError, match="Throttling"):
        asking.close()


def test_an_error_that_nobody_foresaw_is_told_and_tried_again() -> None:
    cloud = Cloud(most=2, error=KeyError("Instances"))
    asking, warnings, clock = grower(cloud)
    asking.request_nodes(2)
    asking.ask_if_due()
    assert warnings == ["requested 2 nodes: internal error: KeyError('Instances') (please report it). Trying again."]
    cloud.error = None
    clock[0] += 16.0
    asking.ask_if_due()
    assert cloud.nodes == 2
    asking.close()


def test_what_never_works_is_not_tried_again_and_a_run_that_has_nobody_ends() -> None:
    cloud = Cloud(most=2, error=FleetError("AWS refused: not authorized"))
    asking, warnings, clock = grower(cloud)
    asking.request_nodes(3)
    cloud.nodes = 1
    for _ in range(200):
        clock[0] += 1.0
        asking.ask_if_due()
    assert cloud.asked == 1
    assert warnings == ["no longer requesting nodes: AWS refused: not authorized"]
    cloud.nodes = 0
    for _ in range(61):
        clock[0] += 1.0
        asking.ask_if_due()
    assert warnings[1:] == [
        "1: no machine is left, and no more can be requested: AWS refused: not authorized",
    ]


def test_a_run_that_a_person_cancelled_elsewhere_ends_in_order() -> None:
    cloud = Cloud(most=2, error=CancelledThere("job 7 was cancelled"))
    asking, ends, _ = grower(cloud)
    asking.start()
    asking.request_nodes(3)
    wait_for(lambda: ends, 10)
    asking.close()
    assert cloud.asked == 1
    assert ends == ["0: job 7 was cancelled"]


def test_a_cancelled_run_whose_agents_were_killed_does_not_wait_for_them() -> None:
    cloud = Cloud(most=2, error=CancelledThere("job 7 was cancelled"))
    asking, ends, clock = grower(cloud)
    asking.request_nodes(3)
    cloud.nodes = 1
    for _ in range(200):  # its last step may take long, while an agent is there
        clock[0] += 1.0
        asking.ask_if_due()
    assert ends == ["0: job 7 was cancelled"]
    cloud.nodes = 0
    for _ in range(31):
        clock[0] += 1.0
        asking.ask_if_due()
    assert ends[1:] == ["1: no machine is left, and no more can be requested: job 7 was cancelled"]
    assert cloud.asked == 1
