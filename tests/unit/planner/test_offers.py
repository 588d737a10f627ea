"""Machines to rent: no fleet on the frontier is beaten, and nobody pays for GPUs that idle."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from tests.unit.planner.test_classes import asked, of_class
from varuna.planner.asking.request import PlanRequest
from varuna.planner.offers import Offer, Rented, frontier
from varuna.planner.sweep import rank_plans

CALIBRATIONS = of_class("A"), of_class("B", 4.0)
WANTED = asked({"A": 1, "B": 1}, *CALIBRATIONS)


def offer(name: str, device_class: str, most: int, price: float, **rest: object) -> Offer:
    given = {"name": name, "device_class": device_class, "most": most, "price_per_hour": price, **rest}
    return Offer.model_validate(given)


def found(*offers: Offer, request: PlanRequest = WANTED) -> tuple[Rented, ...]:
    return frontier(request, offers)


@pytest.mark.nightly
def test_no_fleet_is_both_slower_and_dearer_than_another() -> None:
    fleets = found(offer("a", "A", 4, 4.0), offer("b", "B", 8, 0.8))
    speeds = [fleet.examples_per_s for fleet in fleets]
    dollars = [fleet.dollars_per_million for fleet in fleets]
    assert speeds == sorted(speeds)
    assert dollars == sorted(dollars)
    assert len(fleets) > 2
    assert fleets[-1].gpus == (4, 8), "all that there is, is the fastest"
    assert fleets[0].gpus[0] == 0, "B is cheaper for what it does"


@pytest.mark.nightly
def test_a_fleet_does_what_a_run_on_it_would() -> None:
    for fleet in found(offer("a", "A", 4, 1.0), offer("b", "B", 4, 0.3)):
        sizes = {name: count for name, count in zip("AB", fleet.gpus, strict=True) if count}
        known = [each for each in CALIBRATIONS if each.names[0] in sizes]
        best = rank_plans(asked(sizes, *known)).plans[0]
        assert fleet.plan.step_s == pytest.approx(best.step_s, rel=0.03)
        assert fleet.plan.workers == sum(fleet.gpus)
        assert fleet.dollars_per_hour == pytest.approx(fleet.gpus[0] * 1.0 + fleet.gpus[1] * 0.3)


def test_dear_offers_of_a_class_come_after_the_cheap_ones() -> None:
    fleets = found(offer("spot", "A", 3, 1.0), offer("on demand", "A", 3, 5.0))
    assert {fleet.gpus for fleet in fleets if fleet.gpus[1]} <= {(3, 1), (3, 2), (3, 3)}


def test_losses_make_a_cheap_offer_slower() -> None:
    calm, wild = found(offer("a", "A", 4, 1.0))[-1], found(offer("a", "A", 4, 1.0, losses_per_hour=20.0))[-1]
    assert wild.losses_per_hour == 20.0 * wild.gpus[0]
    assert wild.examples_per_s < calm.examples_per_s
    assert wild.dollars(1e6) > calm.dollars(1e6)
    assert wild.hours(1e6) > calm.hours(1e6)


def test_machines_are_rented_whole() -> None:
    for fleet in found(offer("a", "A", 8, 1.0, gpus_per_vm=4), offer("b", "B", 3, 0.2)):
        assert fleet.gpus[0] % 4 == 0
    assert offer("a", "A", 10, 1.0, gpus_per_vm=4).counts == (0, 4, 8)
    assert offer("a", "A", 10, 1.0).counts == (0, 1, 2, 3, 4, 6, 9, 10)


def test_a_model_that_fits_nowhere_has_no_fleet() -> None:
    small = asked({"A": 1}, of_class("A", memory_bytes=1000))
    assert found(offer("a", "A", 4, 1.0), request=small) == ()


@pytest.mark.nightly
@settings(max_examples=by_depth(2, 4), deadline=None)
@given(prices=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), most=st.tuples(st.integers(1, 3), st.integers(1, 4)))
def test_the_frontier_leaves_out_nothing_that_would_beat_it(prices: tuple[float, float], most: tuple[int, int]) -> None:
    fleets = found(offer("a", "A", most[0], prices[0]), offer("b", "B", most[1], prices[1]))
    for gpus in product(range(most[0] + 1), range(most[1] + 1)):
        sizes = {name: count for name, count in zip("AB", gpus, strict=True) if count}
        if not sizes:
            continue
        known = [each for each in CALIBRATIONS if each.names[0] in sizes]
        plan = rank_plans(asked(sizes, *known)).plans[0]
        rate = plan.global_batch / plan.step_s
        dollars = sum(price * count for price, count in zip(prices, gpus, strict=True)) / rate / 3600 * 1e6
        # Another fleet is as fast and as cheap, as far as the search for plans goes.
        assert any(each.examples_per_s >= 0.9 * rate and each.dollars_per_million <= 1.1 * dollars for each in fleets)
