"""Pictures of every state of a run's page, from real runs in headless Chromium: light and dark, on a desk and a phone.

From the repository, after ``make page-tools``:

    python -m benchmarks.page_pictures FOLDER                       all states, four pictures of each
    python -m benchmarks.page_pictures --only docs/dashboard.png    the picture in the documentation
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.scenarios.browser import DESK, PHONE, Window, link_of, window
from tests.scenarios.launch import environment, varuna_command
from tests.waiting import wait_for
from varuna.core.errors import FleetError
from varuna.fleet.run_folder.connection_file import read_access

BOUND_S = 120.0
SETTLED_S = 0.5
"""After a change of size or colours, until charts are drawn anew."""
DOCUMENTED = {"width": 1024, "height": 1128}
PRICES = ["--price", "0.6", "--on-demand-price", "2"]


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("page-pictures"))
    parser.add_argument("--only", type=Path, metavar="FILE", help="take the picture of the documentation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, window() as seen:
        if options.only is not None:
            _document(seen, Path(scratch) / "run", options.only)
            return
        options.folder.mkdir(parents=True, exist_ok=True)
        album = _Album(seen, options.folder)
        _watch(album, Path(scratch) / "watched")
        _lose_manager(album, Path(scratch) / "lost")
        _fail(album, Path(scratch) / "failed")


class _Album:
    """Takes four pictures of a state, and counts what sticks out or complains."""

    def __init__(self, seen: Window, folder: Path) -> None:
        self.seen, self._folder = seen, folder

    def take(self, name: str) -> None:
        """As FOLDER/NAME-desk-light.png and so on."""
        page = self.seen.page
        for where, size in (("desk", DESK), ("phone", PHONE)):
            for theme in ("light", "dark"):
                page.set_viewport_size(size)
                page.emulate_media(color_scheme=theme)
                if page.is_visible("#logs"):
                    page.locator("#logs").scroll_into_view_if_needed()  # they are read then
                page.wait_for_timeout(1000 * SETTLED_S)
                page.evaluate("scrollTo(0, 0)")
                page.screenshot(path=str(self._folder / f"{name}-{where}-{theme}.png"), full_page=True)
        for complaint in self.seen.unfit():
            print(f"{name}: {complaint}")
        print(name, flush=True)


@contextmanager
def _running(run: Path, *args: str, workers: int = 4) -> Iterator["subprocess.Popen[bytes]"]:
    flags = ["--stages", "2", "--run-dir", str(run), *PRICES]
    command = varuna_command(workers, flags, *args)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    try:
        wait_for(lambda: read_access(run) is not None, BOUND_S)
        wait_for(lambda: _answers(run), BOUND_S)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _answers(run: Path) -> bool:
    try:
        return bool(link_of(run))
    except FleetError:  # the server does not listen yet
        return False


def _watch(album: _Album, run: Path) -> None:
    """Signed out, loading, disconnected before anything was heard, starting, training, ended, and opened again."""
    seen, page = album.seen, album.seen.page
    saved = ("--checkpoint-dir", str(run.with_name("saved")), "--checkpoint-every", "100")
    with _running(run, "--steps", "100000", "--slow", "0.03", *saved) as process:
        link = link_of(run)
        page.goto(link)
        seen.seen("body[data-view=starting]")
        album.take("starting")
        page.goto(f"http://{urlsplit(link).netloc}/")
        page.evaluate("sessionStorage.clear()")
        page.reload()
        seen.seen("body[data-view=closed]")
        album.take("signed-out")
        page.route("**/events", lambda route: None)
        page.goto("about:blank")
        page.goto(link_of(run), wait_until="commit")
        seen.seen("body[data-view=loading]")
        album.take("loading")
        page.unroute_all(behavior="ignoreErrors")
        page.route("**/events", lambda route: route.abort())
        page.goto("about:blank")
        page.goto(link_of(run))
        seen.seen("body[data-view=lost]")
        album.take("disconnected-at-once")
        page.unroute_all(behavior="ignoreErrors")
        _disturb(seen, run)
        album.take("training")
        page.locator("#grid button").first.click()
        page.click("#timeline-form button")
        seen.seen("#timeline-image", 60)
        album.take("chosen")
        page.click("#act-stop")
        album.take("confirm")
        page.click("#confirm-no")
        process.send_signal(signal.SIGINT)
        seen.seen("body[data-view=ended], body[data-view=failed]", 60)
        album.take("ended")
    _open(album, run, "opened")


def _disturb(seen: Window, run: Path) -> None:
    """Train until a worker was lost and another one came, and a checkpoint is complete."""
    seen.page.goto("about:blank")
    seen.page.goto(link_of(run))
    seen.seen("#checkpoints-body li.good:has-text('complete since')", BOUND_S)
    members = seen.page.locator("#grid .cell-ok b").all_inner_texts()
    access = read_access(run)
    assert access is not None
    status = json.loads(access.remote().get("/status").body)
    os.kill(next(each["pid"] for each in status["workers"] if each["name"] == members[-1]), signal.SIGKILL)
    seen.seen("#story-list li.morph", BOUND_S)
    seen.seen("#story-list li.joined:has-text('w4')", BOUND_S)
    seen.seen("#split-bars [aria-label^=measured][aria-label*=idle]", BOUND_S)
    time.sleep(10)


def _lose_manager(album: _Album, run: Path) -> None:
    """Its manager is killed: disconnected with what was heard before; then the folder of a run that has not ended."""
    with _running(run, "--steps", "100000", "--slow", "0.03", workers=2) as process:
        album.seen.page.goto(link_of(run))
        album.seen.seen("#chart path.loss", BOUND_S)
        time.sleep(5)
        process.kill()
        album.seen.seen("body[data-view=lost]", BOUND_S)
        album.take("disconnected")
    _open(album, run, "without-a-manager")


def _fail(album: _Album, run: Path) -> None:
    """A bug in the script ends the run."""
    with _running(run, "--steps", "100000", "--slow", "0.03", "--raise-at", "30", workers=2):
        album.seen.page.goto(link_of(run))
        album.seen.seen("body[data-view=failed]", BOUND_S)
        album.take("failed")


def _open(album: _Album, run: Path, name: str) -> None:
    command = [sys.executable, "-m", "varuna.cli.main", "open", str(run), "--print"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        album.seen.page.goto(process.stdout.readline().strip())
        album.seen.seen("body[data-view=ended], body[data-view=failed], body[data-view=without]", BOUND_S)
        album.seen.seen("#chart path.loss")
        album.take(name)
        process.send_signal(signal.SIGINT)
        process.wait(20)


def _document(seen: Window, run: Path, file: Path) -> None:
    saved = ("--checkpoint-dir", str(run.with_name("saved")), "--checkpoint-every", "50")
    with _running(run, "--steps", "1200", "--compute", "0.02", *saved):  # so that replicas pay
        _disturb(seen, run)
        seen.page.set_viewport_size(DOCUMENTED)
        seen.page.wait_for_timeout(1000 * SETTLED_S)
        seen.page.screenshot(path=str(file))


if __name__ == "__main__":
    main()
