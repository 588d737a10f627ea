import io
from dataclasses import replace

from rich.console import Console

from tests.unit.fleet.support import Driver, two_stages
from tests.unit.observe.recorded_events import generation, morphed, recorded
from varuna.core.messages import Beat, WorkerPhase
from varuna.fleet.page.phases import phase_of
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import Notice
from varuna.observe.run_view import RunView
from varuna.observe.terminal import Progress


def test_beside_a_script_a_view_tells_plan_morphs_and_notices_only() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), live_line=False) as progress:
        view = RunView(progress)
        for event in (generation(0, (2, 2)), recorded(0), generation(1, (3, 1)), recorded(1)):
            view(event)
        view(morphed(1, (3, 1), recovery_seconds=0.5))
        view(Notice(text="no checkpoints", warning=True))
    plan_told, morph, warning, end = file.getvalue().split("\n")
    assert plan_told == "plan   2x2 (stages x replicas) on 4 workers   8 micro-batches of 2 (m=2)"
    assert morph.replace("→", "->") == "morph  lost   2x2 -> 3x1   next step after 500 ms   0 steps redone"
    assert warning == "warning  no checkpoints"
    assert end == ""


def test_a_view_shows_the_last_step_even_without_a_terminal() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), clock=lambda: 0.0) as progress:
        view = RunView(progress, total=3, tokens_per_example=128)
        view(generation(0, (2, 2)))
        for step in range(3):
            view(recorded(step))
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["plan", "step 1/3", "step 3/3"]


def test_a_log_has_every_phase_once_and_how_the_run_ended() -> None:
    file, driver = io.StringIO(), Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
    view = RunView(Progress(Console(file=file), clock=lambda: 0.0), clock=lambda: 0.0)
    for _ in range(2):
        view.show_now(driver.fleet)
    driver.gather()
    for phase in (WorkerPhase.CHECKS, WorkerPhase.STEPS):
        driver.say("w0", Beat(generation=0, step=0, activity="", phase=phase))
        view.show_now(driver.fleet)
    driver.voted(0)
    view.show_now(driver.fleet)
    for event in (generation(0, (2, 1)), recorded(0)):
        view(event)
    view.close(Ended(0, ""), None)
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()] == [
        "starting 4 workers, 0 ready: loading torch, capturing the model",
        "checking the model against plain PyTorch",
        "running the first step",
        "plan",
        "step 1",
        "done",
    ]


def test_what_is_left_follows_from_the_pace_of_the_newest_steps() -> None:
    file, now_s = io.StringIO(), [0.0]
    progress = Progress(Console(file=file), every_s=0.0, clock=lambda: now_s[0])
    view = RunView(progress, total=100, clock=lambda: now_s[0])
    view(generation(0, (2, 2)))
    for step in range(3):
        now_s[0] = 2.0 * step
        view(recorded(step))
    assert "  3m 14s left  " in file.getvalue().splitlines()[-1]  # 97 steps of 2 s


def test_a_fleet_that_trains_has_no_phase() -> None:
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
    driver.gather()
    assert phase_of(driver.fleet) == "connecting the workers"
    driver.voted(0)
    assert phase_of(driver.fleet) == ""
    driver.kill("w3")
    assert phase_of(driver.fleet) == "morphing"
    assert phase_of(replace(driver.fleet, phase=Ended(0, ""))) == ""
