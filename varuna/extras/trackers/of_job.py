"""A job's charts: what ``loggers=`` asks for, with the job's settings and its place for checkpoints."""

import os

from varuna.core.version import __version__
from varuna.extras.trackers.chart import VARIABLE, chart_of
from varuna.extras.trackers.trackers import Trackers
from varuna.job.spec import JobSpec
from varuna.store.opening import open_store

_SHOWN = ("global_batch", "micro_batch", "seed", "num_workers", "precision", "clip_grad_norm", "ema", "init")
"""Settings of a job that are numbers or words."""


def trackers_of(spec: JobSpec) -> Trackers:
    """The charts of a job, on this worker."""

    def chart(is_first: bool) -> str:
        store = None if spec.checkpoints is None else open_store(spec.checkpoints.place)
        return chart_of(store, os.environ.get(VARIABLE, ""), is_first=is_first)

    settings = {name: value for name in _SHOWN if (value := getattr(spec, name)) is not None}
    return Trackers(spec.loggers, config={**settings, "varuna": __version__}, chart=chart)
