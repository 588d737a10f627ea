"""The page of a run in a real browser: a living run, the same run from its folder, and a simulated week."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.browser import Window, link_of, window
from tests.scenarios.launch import environment, varuna_command
from tests.scenarios.warm import Process
from tests.simulated_week import HOSTILE, Week, served
from tests.waiting import wait_for
from varuna.fleet.run_folder.connection_file import read_access

pytestmark = pytest.mark.timeout(300)
LAG_S = 4.0
"""Two seconds are promised; a machine that is shared with other tests gets two more."""


def status_of(run: Path) -> dict[str, Any]:
    access = read_access(run)
    assert access is not None
    told: dict[str, Any] = json.loads(access.remote().get("/status").body)
    return told


MOST_ELEMENTS = 3000
"""Of a page of 300 workers, whatever has happened."""


def lag_s(seen: Window, selector: str) -> float:
    """Seconds from a moment in the story to now, when it has just been seen."""
    element = seen.seen(selector, 90)
    told = element.query_selector("time").get_attribute("datetime")
    now: float = seen.page.evaluate("Date.now()")
    return (now - float(seen.page.evaluate("(at) => Date.parse(at)", told))) / 1000


def act(seen: Window, name: str, token: str) -> None:
    seen.page.click(f"#act-{name}")
    seen.page.fill("#confirm-token", token)
    seen.page.click("#confirm-yes")


def test_a_run_is_watched_disturbed_and_stopped_from_its_page(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    job = ("--steps", "5000", "--slow", "0.15", "--checkpoint-dir", str(saved))
    money = ("--price", "0.6", "--on-demand-price", "2", "--max-cost", "1000")
    command = varuna_command(4, ["--stages", "2", "--run-dir", str(run), *money], *job)
    with (
        window() as seen,
        Process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()) as process,
    ):
        try:
            wait_for(lambda: (run / "access.json").is_file(), 30)
            wait_for(lambda: _answers(run), 30)
            seen.page.goto(link_of(run))
            assert "login" not in seen.page.url
            seen.seen("body[data-view=training]", 90)
            seen.seen("#chart path.loss")
            assert seen.page.locator("#grid .cell-ok").count() == 4
            cost = seen.seen("#cost").inner_text()
            assert "$2.40 per hour" in cost
            assert re.search(r"left of the budget\s+\$\d+\.\d\d\s+it ends in 17 d", cost), cost
            assert seen.unfit() == []
            _look_into_a_step(seen)
            _disturb(seen, run)
            _look_at_a_morph(seen)
            token = _change(seen, run)
            assert _complaints(seen) == []
            act(seen, "stop", token)
            seen.seen("body[data-view=ended]", 30)
            assert process.wait(60) == 0
            assert seen.unfit() == []
        finally:
            process.kill()
    # a log that is followed may be asked for as the manager ends
    assert [text for text in _complaints(seen) if "ERR_CONNECTION_REFUSED" not in text] == []
    assert seen.strangers == []
    _look_back(run)


def _complaints(seen: Window) -> list[str]:
    """Browsers log what was refused, too."""
    return [text for text in seen.complaints if "401" not in text and "422" not in text]


def _answers(run: Path) -> bool:
    try:
        return bool(status_of(run))
    except Exception:
        return False


def _look_into_a_step(seen: Window) -> None:
    """A step's picture comes on demand, and measured waits are told apart once a step was looked at."""
    seen.page.click("#timeline-form button")
    assert "step" in seen.seen("#timeline-image", 60).get_attribute("alt")
    assert seen.page.evaluate("document.querySelector('#timeline-image').naturalWidth") > 0
    measured = seen.seen("#split-bars [aria-label^=measured][aria-label*=idle]", 90).get_attribute("aria-label")
    assert "waiting" not in measured
    wait_for(lambda: _are_waits_told_apart(seen), 120)
    seen.page.fill("#timeline-step", "999999")
    seen.page.keyboard.press("Enter")
    seen.seen("#timeline-said:has-text('the run has steps 0 to 4999')")


def _are_waits_told_apart(seen: Window) -> bool:
    """Return whether the page tells waits apart; if not, open a step of the plan that was chosen after measuring."""
    if "told apart in" in seen.seen("#split-note").inner_text():
        return True
    seen.page.click("#timeline-form button")
    seen.page.wait_for_timeout(1000)
    return False


def _look_at_a_morph(seen: Window) -> None:
    """The sentence of a morph leads to the recorded step that is nearest to it."""
    seen.page.click("#story-list li.morph button")
    seen.seen("#timeline-said:has-text('This is step ')", 60)


def _disturb(seen: Window, run: Path) -> None:
    """Kill a worker: the page shows that, the morph, and its replacement's arrival."""
    status = status_of(run)  # measured times may have favoured a plan with spares meanwhile
    last = sum(status["plan"]["depths"]) - 1
    victim = next(worker for worker in status["workers"] if worker["rank"] == last)
    seen.page.locator("#grid button").first.focus()
    os.kill(victim["pid"], signal.SIGKILL)
    assert lag_s(seen, "#story-list li.lost") < LAG_S
    assert lag_s(seen, "#story-list li.morph:has-text('SIGKILL')") < LAG_S
    assert seen.page.evaluate("document.activeElement.matches('#grid button')"), "the morph took the keyboard's focus"
    assert victim["name"] in seen.seen("#failures .first h3").inner_text()
    assert lag_s(seen, "#story-list li.joined:has-text('w4')") < LAG_S


def _change(seen: Window, run: Path) -> str:
    """Nothing happens without the token, which is returned; with it, a checkpoint and a drain."""
    refused = "async (path) => (await fetch(path, {method: 'POST', body: '{}'})).status"
    for path in ("stop", "morph", "drain", "checkpoint"):
        assert seen.page.evaluate(refused, path) == 401
    access = read_access(run)
    assert access is not None
    act(seen, "checkpoint", "a guess")
    seen.seen("#confirm-error:has-text('does not accept this token')")
    seen.page.click("#confirm-no")
    act(seen, "checkpoint", access.token)
    seen.seen("#story-list li.checkpoint", 60)
    seen.seen("#checkpoints-body li.good:has-text('complete since')", 60)
    seen.page.locator("#grid button").first.focus()
    seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("Enter")
    seen.seen("#worker:not([hidden])")
    seen.page.keyboard.press("Enter")
    return access.token


def _look_back(run: Path) -> None:
    """The same run from its folder, until Ctrl-C."""
    command = [sys.executable, "-m", "varuna.cli.main", "open", str(run), "--print"]
    with window() as seen, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            seen.page.goto(process.stdout.readline().strip())
            seen.seen("body[data-view=ended]")
            seen.seen("#chart path.loss")
            assert seen.page.is_hidden("#actions")
            assert "per hour" not in seen.seen("#cost").inner_text()
            assert seen.page.locator("#story-list li.lost").count() == 1
            seen.seen("#timeline-recorded button >> nth=0").click()
            seen.seen("#timeline-said:has-text('This is step ')")
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert seen.complaints == []


# -- a simulated week ------------------------------------------------------------------------------------------------


def _see_the_whole_week(seen: Window) -> None:
    """Of 1,500 morphs and lost workers, most of them older than the newest sentences, each is counted in the chart."""
    titles = "(which) => [...document.querySelectorAll(`#chart ${which} title`)].map((title) => title.textContent)"
    for which, word in (("rect.morphs", "morph"), (".glyph-lost", "lost worker")):
        told = seen.page.evaluate(titles, which)
        counts = [re.search(rf"([\d,]+) {word}s?\b", text) for text in told]
        assert sum(int(each[1].replace(",", "")) for each in counts if each) == 1500
        assert 100 < len(told) < 200
    assert seen.page.locator("#chart line.morph").count() == 0
    seen.page.click("#story-more")
    assert "Before these: " in seen.seen("#story-list li.older").inner_text()
    seen.page.click("#story-more")


@pytest.mark.nightly
def test_a_week_of_300_workers_is_usable_at_once_and_no_text_of_theirs_is_markup(tmp_path: Path) -> None:
    (tmp_path / "n0.0.log").write_text(HOSTILE)
    with served(Week(), tmp_path) as page, window() as seen:
        seen.page.goto(page.link, wait_until="commit")
        begun_s = time.monotonic()
        seen.seen("#chart path.loss")
        seen.seen("#grid button >> nth=100")
        assert time.monotonic() - begun_s < 10  # 0.5 s on an idle machine
        _see_the_whole_week(seen)
        seen.page.locator("#grid button").nth(7).click()
        assert HOSTILE in seen.seen("#worker").inner_text()
        assert HOSTILE in seen.seen("#failures pre").inner_text()
        assert seen.page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
        assert seen.page.locator("main img:not(#timeline-image), main script").count() == 0
        assert "owned" not in seen.page.title()
        assert seen.unfit() == []
        assert seen.complaints == []
        page.serving.stop()
        seen.seen("body[data-view=lost]")
        assert seen.unfit() == []
