"""Chart that a run goes on with: its name lies beside the checkpoints, so that a resumed run finds it."""

import json
import secrets

from varuna.core.errors import ObjectMissing, StoreError
from varuna.process.console import warn
from varuna.store.base import Store

FILE = "chart.json"
VARIABLE = "VARUNA_CHART"
"""Of workers: names the run that they belong to, in all lives of its manager."""


def chart_of(store: Store | None, run: str, *, is_first: bool) -> str:
    """The name of the chart; blocks for as long as the store takes.

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
