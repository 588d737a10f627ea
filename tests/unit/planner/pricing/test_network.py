import pytest

from tests.unit.planner.models import MB
from varuna.calibration.format import Link, NetworkCosts, Ring
from varuna.planner.pricing.network import crossings, ring_s, ring_share


def test_each_vm_holds_neighbouring_ranks() -> None:
    assert crossings(4, 2, 1) == (True, True, True)
    assert crossings(4, 2, 4) == (False, False, False)
    assert crossings(4, 2, 2) == (False, True, False)


def test_the_replica_that_crosses_most_stands_for_all() -> None:
    # replica 0 has its ranks 0-2 in one VM; replica 1 has rank 3 there, and 4 and 5 in the next
    assert crossings(3, 1, 4) == (False, False)
    assert crossings(3, 2, 4) == (True, False)


def test_a_ring_sends_nearly_twice_the_buffer_and_nothing_alone() -> None:
    rings = (Ring(latency_s=0.25, bytes_per_s=50 * MB),)
    assert ring_s(rings, 100 * MB, ranks=1, in_flight=1) == 0
    assert ring_s(rings, 100 * MB, ranks=4, in_flight=1) == 6 * 0.25 + 2 * 3 / 4 * 2


def test_rings_in_flight_share_what_was_measured_for_fewer() -> None:
    rings = (Ring(latency_s=0, bytes_per_s=50 * MB), Ring(in_flight=2, latency_s=0, bytes_per_s=40 * MB))
    one, two, four = (ring_s(rings, 100 * MB, ranks=2, in_flight=k) for k in (1, 2, 4))
    assert (one, two, four) == (2, 2.5, 5)


def test_rates_are_interpolated_between_the_ring_sizes_measured() -> None:
    rings = (Ring(ranks=2, latency_s=0, bytes_per_s=50 * MB), Ring(ranks=8, latency_s=0, bytes_per_s=20 * MB))
    times = [ring_s(rings, 100 * MB, ranks=ranks, in_flight=1) for ranks in (2, 5, 8, 16)]
    assert times == pytest.approx([2, 2 * 4 * 20 / 35, 2 * 7 * 12.5 / 20, 2 * 15 * 6.25 / 20])


def test_a_ring_takes_the_share_of_the_line_that_it_fills() -> None:
    link = Link(latency_s=0, bytes_per_s=40 * MB, line_bytes_per_s=80 * MB)
    one = NetworkCosts(link=link, rings=(Ring(latency_s=0, bytes_per_s=40 * MB),))
    assert [ring_share(one, ranks=ranks, in_flight=1) for ranks in (1, 2)] == [0, 0.5]
    full = NetworkCosts(link=link, rings=(Ring(latency_s=0, bytes_per_s=90 * MB),))
    assert [ring_share(full, ranks=2, in_flight=k) for k in (1, 2, 4)] == [1, 0.5, 0.25], "all of them fill it"
    unknown = one.model_copy(update={"link": link.model_copy(update={"line_bytes_per_s": None})})
    assert ring_share(unknown, ranks=2, in_flight=1) == 1
