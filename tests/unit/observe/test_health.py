"""A run in one line and an exit code."""

from typing import Any

import pytest

from varuna.observe.health import Health, health

WELL: dict[str, Any] = {
    "state": "training",
    "doing": "",
    "step": 41,
    "steps": 100,
    "still_s": None,
    "waits_for": None,
    "checkpoint": {"step": 40, "time_s": 1000.0},
    "began_s": 100.0,
}
STILL = {"still_s": 840.0, "waits_for": "P=4 was requested, but there is 1 worker"}


@pytest.mark.parametrize(
    ("changes", "age_s", "code", "text"),
    [
        ({}, None, Health.TRAINS, "training, step 42 of 100"),
        ({}, 600.0, Health.TRAINS, "training, step 42 of 100"),
        ({"step": None, "doing": "connecting the workers"}, None, Health.TRAINS, "connecting the workers"),
        ({**STILL, "still_s": 9.0}, None, Health.TRAINS, f"no step for 9.0 s: {STILL['waits_for']}"),
        (STILL, None, Health.STANDS_STILL, "no step for 14m 00s: P=4 was requested, but there is 1 worker"),
        (STILL, 1.0, Health.STANDS_STILL, "no step for 14m 00s: P=4 was requested, but there is 1 worker"),
        ({}, 400.0, Health.UNSAVED, "no new checkpoint for 8m 20s: the newest is of step 40"),
        ({"checkpoint": None}, 600.0, Health.UNSAVED, "no new checkpoint for 23m 20s: there is none yet"),
        ({"checkpoint": None, "began_s": 1400.0}, 600.0, Health.TRAINS, "training, step 42 of 100"),
    ],
)
def test_a_run_is_judged(changes: dict[str, Any], age_s: float | None, code: Health, text: str) -> None:
    found = health({**WELL, **changes}, 1500.0, for_s=300.0, checkpoint_age_s=age_s)
    assert (found.exit_code, found.text) == (code, text)
