"""The walks of docs/: what a picture shows is what its page explains, and exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/walk-*.md"))
STOP = re.compile(r"^\| (\d+) \| `([\w.]+)` \|", re.M)
BOX = re.compile(r'class="number">(\d+)</tspan> <tspan class="module"[^>]*>([\w.]+)<')


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_walk_and_its_picture_pass_the_same_modules_in_the_same_order(page: Path) -> None:
    stops = STOP.findall(page.read_text())
    assert [number for number, _ in stops] == [str(n + 1) for n in range(len(stops))]
    assert BOX.findall(page.with_suffix(".svg").read_text()) == stops
    modules = {module for _, module in stops}
    assert [each for each in modules if not (ROOT / "varuna" / (each.replace(".", "/") + ".py")).is_file()] == []


def test_there_are_three_walks() -> None:
    assert [page.stem for page in PAGES] == ["walk-micro-batch", "walk-recovery", "walk-state"]
