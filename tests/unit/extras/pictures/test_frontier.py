"""The picture of fleets that can be rented."""

import re
from xml.etree import ElementTree

import pytest

from varuna.extras.pictures.frontier import DrawnFleet, DrawnJob, draw

SLOW = DrawnFleet("2 slow", "2x1", 10.0, 1.0)
FAST = DrawnFleet("8 fast & new", "4x2", 40.0, 4.0, answers="the fastest for the budget")


def circles(svg: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    return [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in found]


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_faster_fleets_are_to_the_right_and_dearer_ones_above() -> None:
    (slow_x, slow_y), (fast_x, fast_y) = circles(draw("fleets", [SLOW, FAST]))
    assert slow_x < fast_x
    assert slow_y > fast_y


def test_every_fleet_is_named_with_its_figures() -> None:
    shown = texts(draw("fleets", [SLOW, FAST]))
    assert "2 slow" in shown
    assert "8 fast & new" in shown
    assert "4x2: 40 examples/s, $ 4 a million; the fastest for the budget" in shown
    assert not any(text.endswith(" h") for text in shown)


def test_a_job_has_hours_dollars_and_limits() -> None:
    svg = draw("fleets", [SLOW, FAST], DrawnJob(3.6e6, deadline_hours=50.0, budget_dollars=9.0))
    shown = texts(svg)
    assert "100 h" in shown  # at 10 examples/s
    assert "$ 3.6" in shown  # at $ 1 a million
    assert "50 h" in shown
    assert "$ 9" in shown
    assert svg.count('stroke-dasharray="5 4"') == 2


def test_limits_that_no_fleet_is_near_are_not_drawn() -> None:
    svg = draw("fleets", [SLOW, FAST], DrawnJob(3.6e6, deadline_hours=1.0, budget_dollars=9000.0))
    assert 'stroke-dasharray="5 4"' not in svg


@pytest.mark.parametrize(
    "fleets", [[SLOW], [DrawnFleet("free", "1x1", 3.0, 0.0)], [SLOW, SLOW._replace(examples_per_s=10.01)]]
)
def test_one_fleet_and_fleets_that_are_nearly_alike_have_axes(fleets: list[DrawnFleet]) -> None:
    svg = draw("fleets", fleets, DrawnJob(1e9, 0.0, 0.0))
    assert "nan" not in svg
    for x, y in circles(svg):
        assert 80 <= x <= 560
        assert 56 <= y <= 440
    assert len({text for text in texts(svg) if re.fullmatch(r"[\d.]+", text)}) >= 4


@pytest.mark.parametrize("word", ["12 of a kind + ", "kind"])
def test_a_long_name_ends_in_dots(word: str) -> None:
    [name] = [text for text in texts(draw("fleets", [DrawnFleet(word * 30, "1x1", 1.0, 1.0)])) if "kind" in text]
    assert name.endswith("...")
    assert len(name) < 70
