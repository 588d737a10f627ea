"""Sparse experts, whose balance is a loss of a whole micro-batch, train in any plan as a plain loop does."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.unit.engine.ranks import Setup, Tokens, reference, single_threaded, worst

EXPERTS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **EXPERTS))


def qwen() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    own: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**own, **EXPERTS))


@pytest.mark.parametrize("build", [mixtral, qwen])
def test_experts_are_balanced_within_micro_batches_in_any_plan(build: Callable[[], nn.Module]) -> None:
    with single_threaded():
        setup = Setup(build=build, dataset=Tokens(size=24))
        assert worst(setup.losses(2, 2, 3), reference(setup, 3, whole_batch=False)) < 1e-5
