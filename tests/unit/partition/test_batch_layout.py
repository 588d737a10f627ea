"""A batch that is not shaped like the captured one is refused before any op sees it."""

import re

import pytest
import torch
from torch import Tensor

from tests.unit.engine.models import Tokens, tiny_gpt2
from tests.unit.engine.ranks import Setup
from varuna.checks.experiment import Experiment
from varuna.checks.loss_weight import check_weighing
from varuna.core.errors import DataError
from varuna.data.samples import SampleSource
from varuna.partition.batch_layout import InputLayout, check_inputs
from varuna.partition.initial.constructor import materialise

LAYOUTS = {"ids": InputLayout(torch.int64, (16,))}


def test_any_number_of_samples_and_any_key_that_is_not_read_is_fine() -> None:
    for size in (1, 2, 7):
        check_inputs(LAYOUTS, {"ids": torch.zeros(size, 16, dtype=torch.int64), "name": torch.zeros(size)}, range(size))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(2, 24, dtype=torch.int64),
            "'ids' is int64[batch, 24] in the batch of dataset indices [5, 9], but the model was captured with "
            "int64[batch, 16]. Only the number of samples may vary",
        ),
        (torch.zeros(2, 16, 1, dtype=torch.int64), "int64[batch, 16, 1] in the batch"),
        (torch.zeros(2, 16, dtype=torch.int32), "Convert it in the dataset or in collate=, with .to(torch.int64)."),
    ],
)
def test_the_message_names_tensor_found_expected_and_remedy(value: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        check_inputs(LAYOUTS, {"ids": value}, [5, 9])


@pytest.mark.parametrize("odd", [torch.ones(3, 2), torch.tensor(1.0), torch.ones(1)], ids=["more", "none", "unlike"])
def test_rows_may_be_fewer_than_samples_but_of_all_tensors_alike(odd: Tensor) -> None:
    check_inputs(LAYOUTS, {"ids": torch.zeros(1, 16, dtype=torch.int64), "x": torch.ones(1)}, [5, 9])
    with pytest.raises(DataError, match=r"given 2 samples .*\[5, 9\].*leave samples out, but of all tensors alike"):
        check_inputs(LAYOUTS, {"ids": torch.zeros(2, 16, dtype=torch.int64), "x": odd}, [5, 9])


class Growing(Tokens):
    """Sentences get longer, or change their type, from some index on."""

    def __init__(self, *, longer_from: int = 1000, narrow_from: int = 1000) -> None:
        super().__init__()
        self.longer_from, self.narrow_from = longer_from, narrow_from

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if index >= self.longer_from:
            sample = {key: torch.cat([value, value[:8]]) for key, value in sample.items()}
        return {key: value.int() for key, value in sample.items()} if index >= self.narrow_from else sample


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("dataset", [Growing(longer_from=40), Growing(narrow_from=40)])
def test_every_stage_that_reads_samples_refuses(stages: int, dataset: Growing) -> None:
    setup = Setup(dataset=Tokens(), micro_batch=1)
    setup.dataset = dataset
    with pytest.raises(DataError, match="but the model was captured with int64"):
        setup.run(stages, 1, steps=6)


def test_the_check_of_weights_refuses_as_well() -> None:
    setup = Setup(build=tiny_gpt2)
    model, recipe = setup.model, setup.recipe
    assert model.inputs == {
        "input_ids": InputLayout(torch.int64, (16,)),
        "labels": InputLayout(torch.int64, (16,)),
    }
    with pytest.raises(DataError, match=r"but the model was captured with.*lengths=\[64, 128\].*pad_to"):
        check_weighing(Experiment(model, recipe, materialise(recipe, 0), SampleSource(Growing(longer_from=0), seed=0)))
