import sys
from argparse import ArgumentParser

import pytest
import torch

from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import equal_workers
from varuna.extras.demo.run import GLOBAL_BATCH, LENGTH, MEMORY_BYTES, MODEL_FLAGS, dataset_size, example_folder
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan


@pytest.mark.nightly
def test_the_memory_limit_makes_every_loss_of_a_worker_a_change_of_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(example_folder("gpt2_text")), *sys.path])
    from model import add_arguments, build_model

    parser = ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([*MODEL_FLAGS])
    tokens = torch.zeros(3, LENGTH, dtype=torch.long)
    facts = partition(
        Recipe(build=lambda: build_model(args)),
        {"input_ids": tokens, "labels": tokens},
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named]),
    ).facts
    shapes = [
        best_plan(
            PlanRequest(
                calibrations=Calibrations.of_one(nominal_calibration(facts)),
                workers=equal_workers(workers),
                global_batch=GLOBAL_BATCH,
                memory_bytes=MEMORY_BYTES,
            )
        ).shape
        for workers in (4, 3, 2)
    ]
    assert shapes == ["2x2", "3x1", "2x1"]


@pytest.mark.nightly
def test_the_standard_library_is_large_enough() -> None:
    assert dataset_size(example_folder("gpt2_text"), LENGTH) > 10_000
