"""The page of a simulated week of 300 workers in headless Chromium: what it is sent, its size, when it is usable.

From the repository, after ``make page-tools``: ``python -m benchmarks.page_week``
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from tests.scenarios.browser import window
from tests.simulated_week import STEPS, WORKERS, Week
from tests.unit.fleet.page.test_week import kept_bytes
from varuna.core.units import format_bytes, format_duration
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.net.serving import Serving
from varuna.fleet.page.live_feed import LiveFeed
from varuna.fleet.page.logins import Logins
from varuna.fleet.run_folder.audit import Audit

ROUNDS = 5


def main() -> None:
    """Print the figures."""
    week, logins = Week(), Logins()
    feed = LiveFeed(week.chronicle, week.status)
    first = len(feed.stream("", lambda: True).news())
    print(f"{len(WORKERS)} workers, {STEPS} steps; load average {os.getloadavg()[0]:.1f}")
    kept = kept_bytes(week.chronicle, set())
    print(f"the manager keeps {format_bytes(kept)}; a page gets {format_bytes(first)} at first")
    with tempfile.TemporaryDirectory() as folder:
        api = OperatorApi(
            status=week.status,
            logs=Path(folder),
            ask=lambda event: False,
            audit=Audit(lambda event: None),
            feed=feed,
            logins=logins,
        )
        serving = Serving(port=0, max_frame_bytes=4096)
        serving.start(Starlette(routes=api.routes()))
        try:
            with window() as seen:
                _look(seen.page, serving.port, logins)
        finally:
            feed.close()
            serving.stop()


def _look(page: Any, port: int, logins: Logins) -> None:
    shown_s, chosen_s = [], []
    for _ in range(ROUNDS):
        page.goto("about:blank")
        began_s = time.monotonic()
        page.goto(f"http://127.0.0.1:{port}/#login={logins.invite()}", wait_until="commit")
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
