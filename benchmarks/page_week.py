"""The page of a simulated week of 300 workers in headless Chromium: what it is sent, its size, when it is usable.

From the repository, after ``make page-tools``: ``python -m benchmarks.page_week``
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.scenarios.browser import window
from tests.simulated_week import STEPS, WORKERS, Served, Week, served
from tests.unit.fleet.page.test_week import kept_bytes
from varuna.core.units import format_bytes, format_duration

ROUNDS = 5


def main() -> None:
    """Print the figures."""
    week = Week()
    print(f"{len(WORKERS)} workers, {STEPS} steps; load average {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, served(week, Path(folder)) as page:
        first = len(page.feed.stream("", lambda: True).news())
        kept = kept_bytes(week.chronicle, set())
        print(f"the manager keeps {format_bytes(kept)}; a page gets {format_bytes(first)} at first")
        with window() as seen:
            _look(seen.page, page)


def _look(page: Any, week: Served) -> None:
    shown_s, chosen_s = [], []
    for _ in range(ROUNDS):
        page.goto("about:blank")
        began_s = time.monotonic()
        page.goto(week.link, wait_until="commit")
        page.wait_for_selector("#chart path.loss")
        page.wait_for_selector("#grid button >> nth=100")
        shown_s.append(time.monotonic() - began_s)
        began_s = time.monotonic()
        page.locator("#grid button").nth(7).click()
        page.wait_for_selector("#worker:not([hidden])")
        chosen_s.append(time.monotonic() - began_s)
    for what, found in (("curve and grid are there", shown_s), ("a worker that is chosen is shown", chosen_s)):
        print(f"{what} after {format_duration(statistics.median(found))} (at most {format_duration(max(found))})")
    elements = page.evaluate("document.querySelectorAll('*').length")
    heap = page.evaluate("performance.memory.usedJSHeapSize")
    print(f"{elements} elements; {format_bytes(heap)} of JavaScript's heap")


if __name__ == "__main__":
    main()
