"""A job's charts: what ``loggers=`` asks for, with the job's settings and its place for checkpoints."""

import json
import os
import secrets

from varuna.core.errors import ObjectMissing, StoreError
from varuna.core.version import __version__
from varuna.extras.trackers.trackers import Trackers
from varuna.job.spec import JobSpec
from varuna.process.console import warn
from varuna.store.base import Store
from varuna.store.opening import open_store

FILE = "chart.json"
VARIABLE = "VARUNA_CHART"
"""Of workers: names the run that they belong to, in all lives of its manager."""


def chart_of(store: Store | None, run: str, *, is_first: bool) -> str:
    """Return the name of the chart; blocks for as long as the store takes.

    Args:
        store: of the checkpoints, if there are any.
        run: of this worker; empty: it belongs to no manager's run.
        is_first: this is step 0 of the training, so the chart is a new one unless this run itself has begun it.

    Returns:
        A name of letters and digits.
    """
    if store is None:
        return run or secrets.token_hex(8)
    try:
        kept = _read(store)
        if kept is not None and (not is_first or (run and kept == run)):
            return kept
        chart = run or secrets.token_hex(8)
        store.put(FILE, json.dumps({"chart": chart}).encode())
    except StoreError as error:
        chart = run or secrets.token_hex(8)
        warn(f"the name of this run's chart, {chart}, cannot be kept with the checkpoints: {error}")
    return chart


def _read(store: Store) -> str | None:
    try:
        chart = json.loads(store.get(FILE))["chart"]
    except (ObjectMissing, ValueError, KeyError, TypeError, RecursionError):
        return None
    return chart if isinstance(chart, str) and chart.isalnum() else None


_SHOWN = ("global_batch", "micro_batch", "seed", "num_workers", "precision", "clip_grad_norm", "ema", "init")
"""Settings of a job that are numbers or words."""


def trackers_of(spec: JobSpec) -> Trackers:
    """Make the charts of a job, on this worker."""

    def chart(is_first: bool) -> str:
        store = None if spec.checkpoints is None else open_store(spec.checkpoints.place)
        return chart_of(store, os.environ.get(VARIABLE, ""), is_first=is_first)

    settings = {name: value for name in _SHOWN if (value := getattr(spec, name)) is not None}
    return Trackers(spec.loggers, config={**settings, "varuna": __version__}, chart=chart)
