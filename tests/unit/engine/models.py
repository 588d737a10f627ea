"""Models, samples and the optimizer of most tests."""

from typing import Any

import torch
from torch import Tensor, nn


def tiny_gpt2(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """GPT-2 with tied embeddings, about 30,000 parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=32,
            n_head=2,
            vocab_size=64,
            n_positions=16,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def dropping() -> nn.Module:
    """GPT-2 with dropout, as it comes."""
    return tiny_gpt2(dropout=0.1)


def tiny_llama(layers: int = 2) -> nn.Module:
    """Llama with rotary embeddings and an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class SmallLanguage(nn.Module):
    """A plain model with tied embeddings that is captured in a fraction of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Dropping(SmallLanguage):
    """The same, which draws in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4))


class Tokens:
    """Random tokens of length 16; ``padded`` ignores a number of targets that varies with the index."""

    def __init__(self, *, padded: bool = False, size: int = 50) -> None:
        self.padded = padded
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        if self.padded:
            labels[: index % 13] = -100
        return {"input_ids": tokens, "labels": labels}


def adamw(named: Any) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)
