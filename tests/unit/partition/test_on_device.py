"""Sections that run elsewhere than they were captured: the meta device stands in for a GPU, and mixes with no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import nightly
from tests.unit.engine.models import tiny_gpt2, tiny_llama
from tests.unit.engine.ranks import Setup
from varuna.partition.model import PartitionedModel
from varuna.partition.on_device import on_device

META = torch.device("meta")


def windowed() -> nn.Module:
    """Attention to the last four tokens, by a mask that each section makes."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return MistralForCausalLM(MistralConfig(vocab_size=64, num_key_value_heads=1, sliding_window=4, **sizes))


def run(model: PartitionedModel, setup: Setup) -> dict[str, Tensor]:
    """All sections in turn on meta tensors."""
    batch = {key: value.to(META) for key, value in setup.source.micro_batch(range(2)).tensors.items()}
    initial = setup.beginning.whole_model()
    values: dict[str, Tensor] = {}
    for section in model.sections:
        arguments = [values[name] for name in section.takes] + [batch[key] for key in section.inputs]
        arguments += [2] if section.needs_batch_size else []  # type: ignore[list-item]
        arguments += [initial.parameters[name].to(META) for name in section.parameters]
        arguments += [initial.buffers[name].to(META) for name in section.buffers]
        arguments += [model.constants[name].to(META) for name in section.constants]
        values.update(zip(section.makes, section.module(*arguments), strict=False))
    return values


@pytest.mark.parametrize("build", [windowed, *nightly(tiny_llama)])
def test_every_tensor_is_made_on_the_device(build: Callable[[], nn.Module]) -> None:
    setup = Setup(build=build)
    made = run(on_device(setup.model, META), setup)
    assert {value.device.type for value in made.values()} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):  # as captured: tables and masks would be on the CPU
        run(setup.model, setup)


def test_facts_stay_and_the_cpu_changes_nothing() -> None:
    model = Setup(build=tiny_gpt2).model  # makes positions
    assert on_device(model, torch.device("cpu")) is model
    moved = on_device(model, META)
    assert moved.facts is model.facts
    assert [section.module.code for section in on_device(model, torch.device("cuda")).sections] != [
        section.module.code for section in model.sections
    ]
    assert moved.sections[0].parameters == model.sections[0].parameters
