"""Adapters over a model, with and without them in one forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.models import tiny_llama
from varuna.core.errors import UsageError
from varuna.integrations.pretrained import adapted, beside_base
from varuna.partition.capture.capture import accepted_keys
from varuna.partition.capture.construction import construct

peft: Any = pytest.importorskip("peft", reason="make install brings it", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks transformers by its old name


def with_values(model: Any) -> Any:
    """Adapters begin as if they were not there: these do something."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def test_adapters_that_match_no_module_are_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"match no module of the model: .*query.* are called .*down_proj.*all-linear"):
        adapted(tiny_llama(), peft.LoraConfig(target_modules=["query", "value"]))


def test_such_adapters_are_refused_in_the_same_words_where_a_function_builds_the_model() -> None:
    with pytest.raises(UsageError, match=r"^the adapters match no module of the model"):
        construct(lambda: adapted(tiny_llama(), peft.LoraConfig(target_modules=["query"])), 0)


def test_what_else_peft_refuses_is_told_in_its_words() -> None:
    with pytest.raises(ValueError, match="r"):
        adapted(tiny_llama(), peft.LoraConfig(r=0, target_modules="all-linear"))


def test_one_forward_has_rows_with_adapters_and_rows_without() -> None:
    tokens = torch.randint(0, 60, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    torch.manual_seed(0)
    plain = with_values(adapted(tiny_llama(), config)).eval()
    torch.manual_seed(0)
    beside = beside_base(with_values(adapted(tiny_llama(), config)).eval(), rows=2)
    with torch.no_grad():
        found = beside(input_ids=tokens).logits.unflatten(0, (3, 2, 2))
        on = plain(input_ids=tokens.flatten(0, 1)).logits.unflatten(0, (3, 2))
        with plain.disable_adapter():
            off = plain(input_ids=tokens.flatten(0, 1)).logits.unflatten(0, (3, 2))
    assert not torch.allclose(on, off, atol=1e-3)
    torch.testing.assert_close(found[:, 0], on)
    torch.testing.assert_close(found[:, 1], off)


def test_a_model_with_adapters_takes_what_its_base_takes() -> None:
    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(given)
            return found

    assert accepted_keys(adapted(Base(), peft.LoraConfig(target_modules=["layer"]))) == frozenset({"given"})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: tiny_llama(), "found none"),
        (
            lambda: adapted(
                tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", use_dora=True)
            ),
            "found Linear",
        ),
        (lambda: adapted(tiny_llama(), peft.IA3Config(task_type="CAUSAL_LM")), "found Linear"),
    ],
)
def test_only_plain_lora_can_be_beside_its_base(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UsageError, match=f"only adapters of plain LoRA can be switched off in some rows; {words}"):
        beside_base(build(), rows=2)
