"""Captured attention asks for no mask where it needs none, and computes the same bits on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.testing import assert_close
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from tests.depth import nightly
from varuna.partition.capture.capture import Capture, Recipe, capture
from varuna.partition.graph.plain_masks import without_plain_masks
from varuna.partition.model import partition

LENGTH, WIDTH = 12, 16
Mask = Callable[[Tensor, "Attending"], Tensor | None]


class Attending(nn.Module):
    """One layer of attention, with a mask that a function makes of the tokens and the module."""

    def __init__(self, mask: Mask, **told: Any) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.mask, self.told = mask, told
        self.register_buffer("triangle", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """The loss of predicting the next token."""
        x = self.embedding(tokens).unflatten(-1, (2, -1)).transpose(1, 2)
        y = scaled_dot_product_attention(x, x, x, self.mask(tokens, self), **self.told)
        logits = self.out(y.transpose(1, 2).flatten(-2))
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}


def _places(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1])


def _triangle(tokens: Tensor) -> Tensor:
    return _places(tokens)[:, None] >= _places(tokens)


def _of_zeros(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))


MASKS: dict[str, tuple[Mask, str]] = {
    "triangle": (lambda tokens, _: _triangle(tokens), "causal"),
    "triangle for each sample": (
        lambda tokens, _: _triangle(tokens).expand(tokens.shape[0], 1, LENGTH, LENGTH),
        "causal",
    ),
    "triangle of infinities": (lambda tokens, _: _of_zeros(_triangle(tokens)), "causal"),
    "all": (
        lambda tokens, _: torch.ones(tokens.shape[0], 1, 1, LENGTH, dtype=torch.bool).expand(-1, 1, LENGTH, -1),
        "none",
    ),
    "nothing to add": (lambda tokens, _: torch.zeros(LENGTH, LENGTH), "none"),
    "none": (lambda tokens, _: None, "none"),
    "window": (lambda tokens, _: _triangle(tokens) & (_places(tokens)[:, None] - _places(tokens) < 4), "mask"),
    "other way round": (lambda tokens, _: _triangle(tokens).T, "mask"),
    "prefix": (lambda tokens, _: _triangle(tokens) | (_places(tokens) < 3), "mask"),
    "distance": (lambda tokens, _: _of_zeros(_triangle(tokens)) - 0.1 * _places(tokens), "mask"),
    "padding": (lambda tokens, _: _triangle(tokens) & (tokens != 0)[:, None, None, :], "mask"),
    "buffer": (lambda tokens, module: module.get_buffer("triangle"), "mask"),
    "parameter": (lambda tokens, module: _of_zeros(_triangle(tokens)) * module.slope.exp(), "mask"),
    "drawn": (lambda tokens, _: _triangle(tokens) | (torch.rand(LENGTH, LENGTH) > 2), "mask"),
    "more for more samples": (
        lambda tokens, _: _triangle(tokens) | (torch.arange(LENGTH) < tokens.shape[0] - 2)[:, None],
        "mask",
    ),
}


def _captured(build: Callable[[], nn.Module], key: str = "tokens", **more: Tensor) -> Capture:
    batch = {key: torch.randint(0, 20, (4, LENGTH), generator=torch.Generator().manual_seed(0)), **more}
    return capture(Recipe(build), batch)


def _told(found: Capture) -> set[str]:
    """List what calls of attention in a graph are given."""
    kinds = set()
    for node in found.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        is_causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
        kinds.add("mask" if mask is not None else "causal" if is_causal else "none")
    return kinds


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_the_number_of_samples_gives_is_told_without_one(name: str) -> None:
    mask, expected = MASKS[name]
    found = _captured(lambda: Attending(mask))
    without_plain_masks(found)
    assert _told(found) == {expected}


@pytest.mark.parametrize("told", [{"scale": 0.1}, {"dropout_p": 0.2}, {"dropout_p": 0.0, "scale": 0.3}], ids=str)
def test_what_else_attention_is_told_stays(told: dict[str, float]) -> None:
    found = _captured(lambda: Attending(MASKS["triangle"][0], **told))
    assert without_plain_masks(found) == 1
    (node,) = found.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    assert told.items() <= {"dropout_p": 0.0, **bound, **node.kwargs}.items()


@pytest.mark.parametrize("name", ["triangle for each sample", "triangle of infinities", "all", "nothing to add"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bits_are_the_same_on_the_cpu(name: str, dropout: float) -> None:
    mask, expected = MASKS[name]
    seen = mask(torch.ones(4, LENGTH, dtype=torch.long), Attending(mask))
    found = []
    ways: tuple[dict[str, Any], ...] = ({"attn_mask": seen}, {"is_causal": expected == "causal"})
    for told in ways:
        torch.manual_seed(0)
        given = [torch.randn(4, 2, LENGTH, 8, requires_grad=True) for _ in range(3)]
        query, key, value = given
        made = scaled_dot_product_attention(query, key, value, dropout_p=dropout, **told)
        made.backward(torch.randn_like(made))  # type: ignore[no-untyped-call]
        found.append([made.detach(), *(each.grad for each in given)])
    assert_close(found[0], found[1], rtol=0, atol=0)


def _gpt2() -> nn.Module:
    config = GPT2Config(vocab_size=20, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def _mistral(window: int | None) -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return MistralForCausalLM(MistralConfig(vocab_size=20, num_key_value_heads=1, sliding_window=window, **sizes))


def _bert() -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return BertForMaskedLM(BertConfig(vocab_size=20, max_position_embeddings=LENGTH, **sizes))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (_gpt2, "causal"),
    "mistral": (lambda: _mistral(None), "causal"),
    "mistral with a window": (lambda: _mistral(4), "mask"),
    "bert": (_bert, "none"),
}


@pytest.mark.parametrize("name", ["bert", *nightly("gpt2", "mistral", "mistral with a window")])
def test_models_of_transformers(name: str) -> None:
    build, expected = FAMILIES[name]
    tokens = torch.randint(0, 20, (4, LENGTH))
    found = capture(Recipe(build), {"input_ids": tokens, "labels": tokens})
    without_plain_masks(found)
    assert _told(found) == {expected}


def test_samples_that_say_what_is_padding_keep_their_mask() -> None:
    tokens = torch.randint(0, 20, (4, LENGTH))
    found = capture(Recipe(_gpt2), {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)})
    without_plain_masks(found)
    assert _told(found) == {"mask"}


def test_sections_make_no_mask_and_their_footprints_have_none() -> None:
    tokens = torch.randint(0, 20, (4, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    sections = partition(Recipe(_gpt2), batch).sections
    made = {str(node.target) for section in sections for node in section.module.graph.nodes}
    assert any("scaled_dot_product" in name for name in made)
    assert not any("ones" in name or "full" in name or "expand" in name for name in made), made
