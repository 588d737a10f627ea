"""Parameters of other dtypes than a run keeps are refused by name, with a way out."""

import pytest
import torch
from torch import Tensor, nn

from varuna.core.errors import ModelError
from varuna.partition.capture.capture import Recipe, capture
from varuna.partition.capture.dtypes import check_dtypes


class Scored(nn.Module):
    """A layer and a loss."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made.square().mean()


@pytest.mark.parametrize(
    ("found", "precision", "words"),
    [
        (
            torch.float16,
            torch.bfloat16,
            'layer.weight of the model is float16 (2 of .* bfloat16. Pass precision="fp16"',
        ),
        (torch.float64, torch.float32, r"is float64 .* without .double\(\) .* values in float32"),
        (torch.complex64, torch.bfloat16, "layer.weight of the model is complex, and bfloat16 has no complex"),
        (torch.complex128, torch.float32, "layer.weight of the model is complex128; .* dtype=torch.complex64"),
    ],
)
def test_a_dtype_that_no_run_keeps_is_refused_by_name(found: torch.dtype, precision: torch.dtype, words: str) -> None:
    with pytest.raises(ModelError, match=words.replace("(2 ", r"\(2 ")):
        check_dtypes(Scored(found), precision)


@pytest.mark.parametrize(
    ("found", "precision"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.complex64, torch.float32),
    ],
)
def test_what_a_run_keeps_is_taken(found: torch.dtype, precision: torch.dtype) -> None:
    check_dtypes(Scored(found), precision)


def test_capture_refuses_a_model_in_double_before_its_inputs_can_be_of_the_wrong_dtype() -> None:
    with pytest.raises(ModelError, match=r"layer.weight of the model is float64"):
        capture(Recipe(lambda: Scored().double()), {"x": torch.zeros(2, 4, dtype=torch.float64)})
