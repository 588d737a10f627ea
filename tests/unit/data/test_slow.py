"""If training waits for samples, a line says what to set; what is read does not change."""

import time
from typing import Any

import pytest
import torch

import varuna.data.slow
from tests.unit.data.test_loader import WAIT_S, Deliveries
from varuna.data.loader import Loader
from varuna.data.samples import SampleSource
from varuna.data.slow import MOST, Pace


def pace(**changed: float) -> Pace:
    usual = {"period_s": 0.08, "waited_s": 0.06, "read_s": 0.08, "read_cpu_s": 0.001, "free_processors": 0.0}
    return Pace(**(usual | changed))


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        pytest.param(pace(), 8, id="reads that wait: as many as hide them"),
        pytest.param(pace(waited_s=0.0799), MOST, id="a model that takes no time"),
        pytest.param(pace(waited_s=0.009), 0, id="little to gain"),
        pytest.param(pace(read_cpu_s=0.08), 0, id="reads that compute, no processor free"),
        pytest.param(pace(read_cpu_s=0.08, free_processors=1.0), 4, id="reads that compute, one processor free"),
    ],
)
def test_as_many_processes_as_are_worth_having_are_advised(seen: Pace, wanted: int) -> None:
    assert seen.wanted == wanted
    assert (f"num_workers={wanted} would make" in seen.advice) == (wanted > 0)
    assert ("no processor is free" in seen.advice) == (wanted == 0)


class Slow:
    """Waits before each sample, as a disk does."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.004)
        return {"x": torch.tensor([float(index)])}


@pytest.mark.parametrize(
    ("processes", "training_waits", "is_told"), [(None, True, True), (None, False, False), (0, True, False)]
)
def test_a_line_says_so_once_unless_the_user_has_decided(
    processes: int | None,
    training_waits: bool,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"WHILE_S": 0.0, "SEVERAL": 3, "FEW": 3}.items():
        monkeypatch.setattr(varuna.data.slow, name, value)
    deliveries, source = Deliveries(), SampleSource(Slow(), seed=3, processes=processes)
    for step in range(2):  # a loader for each generation
        loader = Loader(source, deliver=deliveries.deliver, lookahead=1)
        loader.request(step, [(j, [j]) for j in range(9)])
        for _ in range(9):
            deliveries.next()
            if training_waits:
                loader.waited(0.004)
            loader.taken()
        loader.close(WAIT_S)
    assert capfd.readouterr().err.count("training waits for samples") == is_told
