"""TensorBoard, Weights & Biases and MLflow, each in its own way of continuing a chart.

Where a service is, and as whom, is said in its own environment variables; nothing of it is configured here.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from varuna.core.errors import UsageError
from varuna.extras.trackers.tracker import Once, Own, Service
from varuna.job.charts import Tracker

_TAG = "varuna_chart"
FOLDER_VARIABLE = "TENSORBOARD_LOGGING_DIR"


class TensorBoard:
    """Event files in ``runs/CHART``, or in the folder that ``TENSORBOARD_LOGGING_DIR`` names.

    A chart that goes back gets a mark for TensorBoard, which then shows the redone steps in place of the old ones.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, chart: str, step: int, config: Mapping[str, object]) -> None:
        """Begin a file of events."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(Path(os.environ.get(FOLDER_VARIABLE, "runs")) / chart), purge_step=step)
        if step == 0:
            table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in config.items())])
            self._writer.add_text("config", table, 0)

    def log(self, step: int, values: Mapping[str, float], *, more: bool = False) -> None:
        """Write one scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A run of Weights & Biases whose id is the chart's, so that it is resumed.

    The service takes no step that lies before its newest one; such steps are left out. Without a network
    (``WANDB_MODE=offline``) each process begins a folder of its own, which ``wandb sync`` joins by the id.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._once = Once()

    def begin(self, chart: str, step: int, config: Mapping[str, object]) -> None:
        """Start or resume the run."""
        if self._run is None:
            import wandb

            self._run = wandb.init(id=chart, resume="allow", config=dict(config), reinit="create_new")
            self._once = Once(max(self._once.reached, self._run.step - 1))
        self._once.begin(step)

    def log(self, step: int, values: Mapping[str, float], *, more: bool = False) -> None:
        """Send what is new."""
        if found := self._once.new(step, values, more=more):
            self._run.log(found, step=step)

    def close(self) -> None:
        """Send what is left; the library bounds how long that takes."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow:
    """A run of MLflow that carries the chart's id as its tag ``varuna_chart``.

    MLflow keeps every value of a step that it gets; steps that it has are left out.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._once = Once()

    def begin(self, chart: str, step: int, config: Mapping[str, object]) -> None:
        """Find the run with the chart's tag, or make one."""
        if self._client is None:
            from mlflow.entities import Param
            from mlflow.tracking import MlflowClient

            self._client = client = MlflowClient()
            experiment = _experiment(client)
            found = client.search_runs([experiment], f"tags.`{_TAG}` = '{chart}'", max_results=1)
            if found:
                self._run = found[0].info.run_id
                newest = max((metric.step for metric in client.get_metric_history(self._run, "loss")), default=-1)
                self._once = Once(max(self._once.reached, newest))
                client.update_run(self._run, status="RUNNING")
            else:
                name = os.environ.get("MLFLOW_RUN_NAME") or f"varuna-{chart}"
                self._run = client.create_run(experiment, tags={_TAG: chart}, run_name=name).info.run_id
                client.log_batch(self._run, params=[Param(name, str(value)) for name, value in config.items()])
        self._once.begin(step)

    def log(self, step: int, values: Mapping[str, float], *, more: bool = False) -> None:
        """Send what is new, in one request."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        if found := self._once.new(step, values, more=more):
            metrics = [Metric(name, value, now_ms, step) for name, value in found.items()]
            self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished, until it is continued."""
        if self._client is not None:
            self._client.set_terminated(self._run)
            self._client = None


def _experiment(client: Any) -> str:
    """Return the identifier of the experiment that the environment names, as ``mlflow.start_run`` finds it."""
    if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return number
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
    experiment = client.get_experiment_by_name(name)
    number = client.create_experiment(name) if experiment is None else experiment.experiment_id
    return str(number)


_KNOWN: dict[str, tuple[Callable[[], Service], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}
"""By name: what makes it, and the module that must be installed, which is also what ``pip`` calls it."""


def service_of(given: str | Tracker) -> Service:
    """Return the service that one element of ``loggers=`` means.

    Raises:
        UsageError: it is not known, not installed, or has no ``log(step, values)``.
    """
    if isinstance(given, str):
        if given not in _KNOWN:
            known = ", ".join(repr(name) for name in _KNOWN)
            raise UsageError(f"loggers= knows {known} and objects with log(step, values), but not {given!r}")
        make, module = _KNOWN[given]
        if find_spec(module) is None:
            raise UsageError(f"loggers={given!r} needs a library that is not installed: pip install {module}")
        return make()
    if isinstance(given, type) or not isinstance(given, Tracker):
        raise UsageError(f"loggers= takes names and objects with log(step, values); {given!r} is neither")
    return Own(given)


def services_of(given: Sequence[str | Tracker]) -> dict[str, Service]:
    """Return the services that ``loggers=`` means, by the name that messages give each.

    Raises:
        UsageError: it is no list, or an element of it is not known, not installed, or no tracker.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(f'loggers={given!r} must be a list, such as loggers=["tensorboard"]')
    found: dict[str, Service] = {}
    for each in given:
        service = service_of(each)
        name = each if isinstance(each, str) else type(each).__name__
        while name in found:
            name += "'"
        found[name] = service
    return found
