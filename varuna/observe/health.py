"""Whether a run is well, in one line and an exit code, for cron and probes. Pure."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from varuna.core.units import format_duration


class Health(IntEnum):
    """The state of a run, as the exit code of ``varuna status --check``."""

    TRAINS = 0
    STANDS_STILL = 1
    UNSAVED = 2
    MANAGER_AWAY = 3


class Checked(NamedTuple):
    """The result of a look at a run."""

    exit_code: Health
    text: str


def health(status: Mapping[str, Any], now_s: float, *, for_s: float, checkpoint_age_s: float | None) -> Checked:
    """Judge the answer of ``/status``.

    Args:
        status: what the manager says.
        now_s: seconds since 1970.
        for_s: how long a run may stand still.
        checkpoint_age_s: how old the newest checkpoint may be, or the run if there is none; None: any age.
    """
    still_s = status.get("still_s")
    if still_s is not None and still_s > for_s:
        return Checked(Health.STANDS_STILL, doing(status))
    if checkpoint_age_s is not None:
        checkpoint = status.get("checkpoint") or {}
        since_s = checkpoint.get("time_s") or status.get("began_s")
        if since_s is None or now_s - since_s > checkpoint_age_s:
            age = "" if since_s is None else f" for {format_duration(now_s - since_s)}"
            return Checked(Health.UNSAVED, f"no new checkpoint{age}: {_newest(checkpoint)}")
    step = None if status.get("waits_for") else status.get("step")
    return Checked(Health.TRAINS, doing(status) + ("" if step is None else f", step {step + 1} of {status['steps']}"))


def doing(status: Mapping[str, Any]) -> str:
    """Activity of a run, in the words that all commands use: where there is no step, since when and why."""
    if status.get("waits_for"):
        return f"no step for {format_duration(status['still_s'])}: {status['waits_for']}"
    return str(status.get("doing") or status["state"])


def _newest(checkpoint: Mapping[str, Any]) -> str:
    return f"the newest is of step {checkpoint['step']}" if checkpoint else "there is none yet"
