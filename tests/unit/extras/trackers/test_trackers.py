"""Charts have each step once, whoever wrote them and whatever was redone; no service stops or slows a run."""

import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import varuna
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from varuna.core.errors import UsageError
from varuna.extras.trackers.of_job import FILE, VARIABLE, chart_of
from varuna.extras.trackers.services import FOLDER_VARIABLE
from varuna.extras.trackers.tracker import REDONE
from varuna.extras.trackers.trackers import Trackers
from varuna.store.opening import open_store
from varuna.testing import FailingStore, fail_at, run

STEPS = 5


class Notebook:
    """A user's own tracker."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append((step, dict(values)))


def trackers(*loggers: Any, chart: str = "abc", **more: Any) -> Trackers:
    return Trackers(loggers, config={"seed": 0}, chart=lambda is_first: chart, **more)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values that TensorBoard itself would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(each.step, each.value) for each in events.Scalars(name)]


def logged(content: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, as wandb writes it: blocks of 32 KiB, each piece with a checksum, its
    length and which part of a record it is.
    """
    at, record = 7, b""  # after wandb's own header
    while at < len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, part = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_falls_back_has_each_step_once_in_tensorboard(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is the main worker, and another continues its chart; rank 1 is not, and the main one goes back itself."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(VARIABLE, "run1")  # as workers of one manager have it
    store, notebook = FailingStore(), Notebook()

    def script() -> None:
        trainer = varuna.Trainer(
            SmallLanguage,
            Tokens(),
            adamw,
            8,
            micro_batch=2,
            checkpoints=varuna.Checkpoints(store.url, every=2),
            loggers=["tensorboard", notebook],
        )
        for step in trainer.steps(STEPS):
            if step.index == STEPS - 1:
                trainer.log({"validation/loss": 1.5})

    outcome = run(script, workers=3, stages=2, faults=[fail_at(rank=rank, step=3, phase="B")])
    [folder] = tmp_path.iterdir()
    assert f'"{folder.name}"' in store.get(FILE).decode()
    shown = scalars(folder, "loss")
    assert [step for step, _ in shown] == list(range(STEPS))
    assert [loss for _, loss in shown] == pytest.approx(outcome.losses[-STEPS:], rel=1e-6)
    assert scalars(folder, "validation/loss") == [(STEPS - 1, 1.5)]
    assert scalars(folder, "run/stages")[0] == (0, 2.0)
    assert {step for step, _ in notebook.lines} == set(range(STEPS))


def test_a_chart_goes_on_with_the_checkpoints_and_a_new_training_gets_another() -> None:
    store = open_store("memory://charts")
    first = chart_of(store, "run1", is_first=True)
    assert first == "run1"
    assert chart_of(store, "run1", is_first=True) == first, "fell back to step 0"
    assert chart_of(store, "run2", is_first=False) == first, "resumed by another command"
    assert chart_of(store, "run3", is_first=True) == "run3", "began anew in the same place"
    assert chart_of(None, "", is_first=True) != chart_of(None, "", is_first=True)
    store.put(FILE, b'{"chart": "../../etc"}')
    assert chart_of(store, "run4", is_first=False) == "run4"


def test_a_store_that_fails_costs_the_charts_name_only(capsys: pytest.CaptureFixture[str]) -> None:
    store = FailingStore()
    store.fail("put", reason="403 forbidden")
    assert chart_of(store, "run1", is_first=True) == "run1"
    assert "this run's chart, run1, cannot be kept" in capsys.readouterr().err


def test_a_users_own_tracker_hears_a_redone_step_once_and_where_it_happened() -> None:
    notebook = Notebook()
    charts = trackers(notebook)
    for step in (0, 1, 2, 1, 2, 3):
        charts.add_step(step, {"loss": float(step)}, is_main=True)
        charts.more({"again": 1.0})
    charts.add_step(4, {"loss": 4.0}, is_main=False)
    charts.more({"not": 1.0})
    charts.close()
    assert notebook.lines == [
        *((step, values) for step in (0, 1, 2) for values in ({"loss": float(step)}, {"again": 1.0})),
        (3, {"loss": 3.0, REDONE: 2.0}),
        (3, {"again": 1.0}),
    ]


@pytest.mark.nightly
def test_weights_and_biases_gets_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    record_of: Any = wandb_internal_pb2
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    charts = trackers("wandb")
    for step in (0, 1, 0, 1, 2):
        charts.add_step(step, {"loss": float(step)}, is_main=True)
    charts.close()
    [file] = tmp_path.glob("wandb/offline-run-*/run-abc.wandb")

    def history() -> list[tuple[int, str, str | None]]:
        steps = []
        for data in logged(file.read_bytes()):
            record = record_of.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                steps.append((record.history.step.num, values["loss"], values.get(REDONE)))
        return steps

    deadline_s = time.monotonic() + 30
    while len(history()) < 3 and time.monotonic() < deadline_s:  # a process of wandb's own writes, and may still do so
        time.sleep(0.05)
    assert history() == [(0, "0", None), (1, "1", None), (2, "2", "2")]


def test_mlflow_goes_on_with_a_run_that_another_process_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for steps in ((0, 1, 2), (1, 2, 3)):  # of two main workers, the first of which was lost
        charts = trackers("mlflow")
        for step in steps:
            charts.add_step(step, {"loss": float(step)}, is_main=True)
        charts.close()
    client = MlflowClient()
    experiment = client.get_experiment_by_name("Default")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert found.data.params == {"seed": "0"}
    assert [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "loss")] == [
        (step, float(step)) for step in range(4)
    ]


def test_a_service_that_fails_is_left_out_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise ConnectionError("no route to host")

    notebook = Notebook()
    charts = trackers(Broken(), notebook)
    for step in range(2):
        charts.add_step(step, {"loss": 0.0}, is_main=True)
    charts.close()
    assert len(notebook.lines) == 2
    said = capsys.readouterr().err
    assert said.count("no more steps go to Broken, and training goes on: ConnectionError: no route to host") == 1


def test_a_service_that_hangs_holds_nobody_up(capsys: pytest.CaptureFixture[str]) -> None:
    end = threading.Event()

    class Hung:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            end.wait(60)

    charts = trackers(Hung(), close_s=0.01)
    for step in range(12_000):
        charts.add_step(step, {"loss": 0.0}, is_main=True)
    charts.close()
    end.set()
    said = capsys.readouterr().err
    assert said.count("Hung: too slow for the run, so steps are left out of the charts") == 1
    assert "not all steps have reached Hung: there was no answer for 0.01 s" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("wandb", "must be a list, such as"),
        (["comet"], "knows 'tensorboard', 'wandb', 'mlflow' and objects"),
        ([3], "3 is neither"),
        ([Notebook], "is neither"),
    ],
    ids=["text", "unknown", "number", "class"],
)
def test_what_is_no_tracker_is_refused_at_once(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        varuna.Trainer(SmallLanguage, Tokens(), adamw, 8, loggers=given)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.extras.trackers.services.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"loggers='wandb' needs a library .* pip install wandb"):
        trackers("wandb")


def test_values_for_no_chart_are_an_error() -> None:
    trainer = varuna.Trainer(SmallLanguage, Tokens(), adamw, 8)
    with pytest.raises(UsageError, match=r"trainer.log\(values\) needs a place"):
        trainer.log({"loss": 1.0})
