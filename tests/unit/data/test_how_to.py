"""The page on data runs as it is written, and its shards train the same when processes read them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import varuna
from tests.unit.data.test_loader import WAIT_S, Deliveries
from varuna.data.loader import Loader
from varuna.data.samples import SampleSource

PAGE = Path(__file__).parents[3] / "docs/data.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(code, names)
    return names


@pytest.fixture
def shards(page: dict[str, Any], tmp_path: Path) -> Any:
    draws = np.random.default_rng(0)
    for number, size in enumerate((5, 1, 10)):
        points = draws.normal(size=(size, 9)).astype(np.float32)
        points[:, 8] = points[:, 0] > 0
        np.save(tmp_path / f"shard-{number}.npy", points)
    return page["Shards"](tmp_path)


def test_each_process_opens_the_shards_that_it_reads(shards: Any) -> None:
    source, deliveries = SampleSource(shards, seed=0, processes=2), Deliveries()
    loader = Loader(source, deliver=deliveries.deliver)
    loader.request(0, [(j, range(4 * j, 4 * j + 4)) for j in range(4)])
    batches = []
    for _ in range(4):
        batches.append(deliveries.next()[2])
        loader.taken()
    loader.close(WAIT_S)
    source.close()
    assert not shards.opened, "this process read nothing"
    assert sorted(index for batch in batches for index in batch.indices) == list(range(16))
    for batch in batches:
        for index, row in zip(batch.indices, batch.tensors["x"], strict=True):
            assert np.array_equal(row.numpy(), shards[index]["x"])


@pytest.mark.nightly
def test_losses_do_not_depend_on_who_reads(page: dict[str, Any], shards: Any) -> None:
    def losses(processes: int) -> list[float]:
        trainer = varuna.Trainer(page["Classifier"], shards, page["optimizer"], 8, micro_batch=2, num_workers=processes)
        found = [step.loss for step in trainer.steps(5)]
        return [*found, trainer.evaluate(shards).loss]

    assert losses(2) == losses(0)
