"""The answer to ``GET /metrics``: the run's status in the text format of Prometheus. Pure.

Scrapers get a token of their own, which reads these figures and nothing else.
"""

import hashlib
import hmac
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("starting", "forming", "training", "morphing", "finishing", "ended")
_Samples = Iterable[tuple[str, float | None]]


def scraper_token(operator_token: str) -> str:
    """The token of scrapers, from the operator's, which cannot be found from it; empty if that is."""
    if not operator_token:
        return ""
    return hmac.new(operator_token.encode(), b"varuna metrics", hashlib.sha256).hexdigest()


def exposition(status: Mapping[str, Any]) -> str:
    """Metrics of a run.

    Args:
        status: what ``GET /status`` says.

    Returns:
        Lines of the text format. What is not known yet is left out.
    """
    plan, generations = status.get("plan") or {}, status.get("generations", [])
    workers = Counter(worker["state"] for worker in status.get("workers", []))
    phase = str(status.get("state", "")).split(":")[0].split(" ")[0]
    newest_s = next((s for each in reversed(generations[1:]) if (s := each["recovery_s"]) is not None), None)
    checkpoint = status.get("checkpoint") or {}
    silent_s = [each["silent_s"] for each in status.get("workers", []) if each["silent_s"] is not None]
    parts = [
        _gauge("state", "1 for what the run does now.", _labelled("state", {s: float(s == phase) for s in STATES})),
        _gauge(
            "stands_still_seconds",
            "For how long there has been no step, where that is unusual; else 0.",
            _one(status.get("still_s") or 0.0),
        ),
        _gauge("step", "Newest committed step, from 0.", _one(status.get("step"))),
        _gauge("steps", "Steps of the whole run.", _one(status.get("steps") or None)),
        _gauge("loss", "Loss of the newest step.", _one(status.get("loss"))),
        _gauge("examples_per_second", "Examples per second of the newest step.", _one(status.get("examples_per_s"))),
        _gauge("stages", "Pipeline stages of the plan, P.", _one(plan.get("stages"))),
        _gauge("replicas", "Replicas of the plan, D.", _one(plan.get("replicas"))),
        _gauge("nodes", "Machines with an agent; without agents, workers.", _one(len(status.get("nodes", [])))),
        _gauge("workers_wanted", "Workers that the run was started for.", _one(status.get("wanted"))),
        _gauge("workers", "Workers by what the manager makes of them.", _labelled("standing", dict(workers))),
        _gauge(
            "silent_seconds", "Silence of the worker that was heard last of all.", _one(max(silent_s, default=None))
        ),
        _counter("generations_total", "Plans that were put to work.", _one(len(generations))),
        _counter("redone_steps_total", "Steps that were computed again.", _one(_redone(generations))),
        _gauge("recovery_seconds", "The newest change of plan, from its cause to the next step.", _one(newest_s)),
        _counter("lost_workers_total", "Workers that were lost.", _one(status.get("lost_workers"))),
        _gauge("checkpoint_step", "Steps in the newest complete checkpoint.", _one(checkpoint.get("step"))),
        _gauge(
            "checkpoint_timestamp_seconds",
            "When the newest checkpoint was complete, or the run began, in seconds since 1970.",
            _one(checkpoint.get("time_s") or status.get("began_s")),
        ),
        _gauge("disk_free_bytes", "Free in the file system of the run's folder.", _one(status.get("disk_free_bytes"))),
    ]
    return "".join(parts)


def _redone(generations: Iterable[Mapping[str, Any]]) -> int:
    return sum(each["steps_redone"] or 0 for each in generations)


def _one(value: Any) -> _Samples:
    yield "", None if value is None else float(value)


def _labelled(label: str, values: Mapping[str, float]) -> _Samples:
    for value, number in sorted(values.items()):
        yield f'{{{label}="{value}"}}', float(number)


def _gauge(name: str, text: str, samples: _Samples) -> str:
    return _metric(name, text, "gauge", samples)


def _counter(name: str, text: str, samples: _Samples) -> str:
    return _metric(name, text, "counter", samples)


def _metric(name: str, text: str, kind: str, samples: _Samples) -> str:
    lines = [f"varuna_{name}{labels} {_number(value)}\n" for labels, value in samples if value is not None]
    return "".join([f"# HELP varuna_{name} {text}\n# TYPE varuna_{name} {kind}\n", *lines]) if lines else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
