"""A browser that looks at the page of a run, and notes whatever a stranger should not see."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from varuna.fleet.run_folder.connection_file import read_access

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(__file__).parents[2] / ".page-tools" / "node_modules" / "axe-core" / "axe.min.js"
_QUIET = ("quic", "background-networking", "component-update", "sync")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", *(f"--disable-{what}" for what in _QUIET)]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


class Window:
    """A page, its complaints, and the requests that left for another server than its own."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._look(request.url))

    def _look(self, url: str) -> None:
        if urlsplit(url).hostname not in ("127.0.0.1", None):
            self.strangers.append(url)

    def seen(self, selector: str, bound_s: float = 30.0) -> Any:
        """The element, once it is there to see."""
        return self.page.wait_for_selector(selector, timeout=1000 * bound_s)

    def unfit(self) -> list[str]:
        """List axe's findings, light on a desk and dark on a phone; also what sticks out to the right."""
        found = []
        for size, theme in ((DESK, "light"), (PHONE, "dark")):
            self.page.set_viewport_size(size)
            self.page.emulate_media(color_scheme=theme)
            self.page.evaluate(AXE.read_text())
            for each in self.page.evaluate("axe.run()")["violations"]:
                parts = [node["html"][:200] for node in each["nodes"]]
                found.append(f"{theme}: {each['id']} {json.dumps(parts)}")
            if (wide := self.page.evaluate("document.documentElement.scrollWidth")) > size["width"]:
                found.append(f"{wide} pixels on a screen of {size['width']}")
        self.page.set_viewport_size(DESK)
        return found


@contextmanager
def window() -> Iterator[Window]:
    """A browser's window; the test is skipped where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: install it with the system's package manager")
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `make page-tools` does that, and needs npm")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield Window(browser.new_page(viewport=DESK))
        finally:
            browser.close()


def link_of(run_dir: Path) -> str:
    """A new link to the page of a run."""
    access = read_access(run_dir)
    assert access is not None
    code = json.loads(access.remote().post("/links", {}).body)["code"]
    return f"http://{access.host}:{access.port}/#login={code}"
