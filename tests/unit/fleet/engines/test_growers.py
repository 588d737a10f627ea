"""Several sources of nodes: one that refuses for good does not end a run that others give nodes to."""

import itertools
import time

import pytest

from tests.depth import nightly_rows
from tests.unit.fleet.engines.test_growth import Cloud
from tests.waiting import wait_for
from varuna.core.errors import FleetError
from varuna.fleet.engines.growers import Growers, Source
from varuna.fleet.engines.growth import GrowthConfig
from varuna.fleet.engines.provider import CancelledThere

REFUSED, CANCELLED = FleetError("not authorized"), CancelledThere("job 7 was cancelled")


def growers(*clouds: Cloud) -> tuple[Growers, list[str], list[str]]:
    warnings, ends = list[str](), list[str]()
    names = (f"cloud-{number}" for number in itertools.count(1))
    several = Growers(
        [Source(name, cloud, GrowthConfig(most=3)) for name, cloud in zip(names, clouds, strict=False)],
        warn=warnings.append,
        end=lambda reason, code: ends.append(f"{code}: {reason}"),
        machines=lambda: sum(cloud.nodes for cloud in clouds),
        clock=lambda: 100 * time.monotonic(),
        pause_s=0.0,
    )
    return several, warnings, ends


def test_each_is_asked_for_its_most_and_gets_back_what_it_gave() -> None:
    one, two = Cloud(most=8), Cloud(most=2)
    several, warnings, ends = growers(one, two)
    several.start()
    wait_for(lambda: (one.nodes, two.nodes) == (3, 2), 10)
    wait_for(lambda: warnings == ["cloud-2: requested 3 nodes: no more g4dn here. Trying again."], 10)
    several.close()
    assert one.closed
    assert two.closed
    assert ends == []


@pytest.mark.parametrize(("error", "code"), [(CANCELLED, 0), *nightly_rows((REFUSED, 1))])
def test_a_run_ends_when_none_of_them_gives_nodes_any_more(error: FleetError, code: int) -> None:
    one, two = Cloud(most=8, error=error), Cloud(most=8)
    several, warnings, ends = growers(one, two)
    several.start()
    wait_for(lambda: two.nodes == 3 and one.asked == 1 and warnings, 10)
    assert ends == []
    assert all(text.startswith("cloud-1: ") for text in warnings)
    several.close()
    one, two = Cloud(most=8, error=error), Cloud(most=8, error=error)
    several, warnings, ends = growers(one, two)
    several.start()
    wait_for(lambda: ends, 10)
    assert ends[0].startswith(f"{code}: ")
    assert sum("goes on with nodes from elsewhere" in text for text in warnings) == 1
    several.close()


def test_one_that_cannot_be_closed_keeps_no_other_from_it() -> None:
    one, two = Cloud(most=8), Cloud(most=8)
    several, _, _ = growers(one, two)
    several.start()
    wait_for(lambda: (one.nodes, two.nodes) == (3, 3), 10)
    one.busy = 9
    with pytest.raises(FleetError, match=r"what this run requested of cloud-1 is not given back: Throttling\. Set"):
        several.close()
    assert two.closed
