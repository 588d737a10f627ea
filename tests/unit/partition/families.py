"""Tiny models of many families, as users build them: default flags, training mode, labels -> loss."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.capture.capture import LossFunction

VOCABULARY = 64
LENGTH = 16
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
HIDDEN = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {**HIDDEN, "intermediate_size": 48}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
QUIET_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**WIDE, "num_key_value_heads": 1, "max_position_embeddings": 32, "attention_dropout": 0.0}
IMAGES = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 5}


def generator_of(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def tokens(index: int) -> dict[str, Tensor]:
    """A sentence and its labels."""
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator_of(index))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_tokens(index: int) -> dict[str, Tensor]:
    """A padded sentence with its mask."""
    mask = torch.ones(LENGTH, dtype=torch.long)
    mask[LENGTH - index % 5 :] = 0
    return {**tokens(index), "attention_mask": mask}


def image(index: int, size: int = 16, labels: int = 5) -> dict[str, Tensor]:
    """An image and its class."""
    generator = generator_of(index)
    pixels = torch.randn(3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, labels, (), generator=generator)}


def large_image(index: int) -> dict[str, Tensor]:
    """An image that survives a total stride of 32."""
    return image(index, 64)


def speech(index: int) -> dict[str, Tensor]:
    """Log-mel frames and a sentence."""
    generator = generator_of(index)
    return {
        "input_features": torch.randn(8, 2 * LENGTH, generator=generator),
        "labels": tokens(index)["labels"],
    }


def vectors(index: int) -> dict[str, Tensor]:
    """A point and its class."""
    generator = generator_of(index)
    return {"input": torch.randn(8, generator=generator), "target": torch.randint(0, 4, (), generator=generator)}


@dataclass(frozen=True)
class Family:
    """A model, its samples, and what is known about it.

    Attributes:
        build: builds the model.
        sample: one sample of its dataset.
        tied: first name of each tied parameter that sections share, found by Varuna.
        loss: where the model returns none.
        buffers: forward() writes buffers, so the batch matters.
        sections: at least so many sections.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int], dict[str, Tensor]] = tokens
    tied: tuple[str, ...] = ()
    loss: LossFunction | None = None
    buffers: bool = False
    sections: int = 2


class Samples:
    """A dataset of ``sample(index)``."""

    def __init__(self, sample: Callable[[int], dict[str, Tensor]]) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._sample(index)


def hugging_face(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builder of a ``transformers`` model by the names of its classes."""

    def build() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return built

    return build


def causal(prefix: str, **sizes: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{prefix}ForCausalLM", f"{prefix}Config", **{**SPECIAL, **sizes})


def masked(prefix: str, **sizes: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{prefix}ForMaskedLM", f"{prefix}Config", **{**SPECIAL, **sizes})


def images(prefix: str, **sizes: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{prefix}ForImageClassification", f"{prefix}Config", **sizes)


class Block(nn.Module):
    """A block of nanoGPT: a causal mask in a buffer, one projection for q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.project(self.norms[0](x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in split)
        weights = (q @ k.transpose(-2, -1)) * (k.shape[-1] ** -0.5)
        mask = self.mask
        assert isinstance(mask, Tensor)
        weights = weights.masked_fill(mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).contiguous().view(batch, length, width))
        grown: Tensor = self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return x + grown


class NanoGPT(nn.Module):
    """The hand-written GPT of many tutorials: returns (logits, loss), weight tied by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
        self.blocks = nn.ModuleList(Block(32, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return logits, loss


class UNet(nn.Module):
    """Long skips from every level down to the same level up."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        widths = (3, 8, 16, 32)

        def level(before: int, after: int) -> nn.Module:
            norm = nn.BatchNorm2d(after) if batch_norm else nn.GroupNorm(4, after)
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), norm, nn.ReLU(inplace=True))

        self.down = nn.ModuleList(level(a, b) for a, b in pairwise(widths))
        self.middle = level(32, 32)
        self.up = nn.ModuleList(level(2 * b, max(a, 8)) for a, b in zip(widths[2::-1], widths[:0:-1], strict=True))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x, skips = pixel_values, []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            skip = skips.pop()
            x = level(torch.cat([nn.functional.interpolate(x, size=skip.shape[-2:]), skip], 1))
        return {"logits": self.head(x)}


def unet_loss(output: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output["logits"].mean((2, 3)), batch["labels"])


def _sequential() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(inplace=True)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def _classes(output: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch["target"])


T5 = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 1,
    **SPECIAL,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
QUIET_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
BERT = {**WIDE, **QUIET_BERT, "max_position_embeddings": 32}

NAMED = {
    "gpt2": Family(
        hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2, **QUIET_GPT2, **SPECIAL),
        tied=("transformer.wte.weight",),
    ),
    "gpt_neox": Family(causal("GPTNeoX", **WIDE, **QUIET, max_position_embeddings=32)),
    "opt": Family(
        causal("OPT", **HIDDEN, ffn_dim=48, dropout=0.0, word_embed_proj_dim=32, max_position_embeddings=32),
        tied=("model.decoder.embed_tokens.weight",),
    ),
    "bloom": Family(
        causal("Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2, **QUIET),
        tied=("transformer.word_embeddings.weight",),
    ),
    "falcon": Family(causal("Falcon", **HIDDEN, **QUIET), tied=("transformer.word_embeddings.weight",)),
    "phi": Family(causal("Phi", **GROUPED, resid_pdrop=0.0)),
    "llama": Family(causal("Llama", **GROUPED), masked_tokens),
    "mistral": Family(causal("Mistral", **GROUPED)),
    "qwen2": Family(causal("Qwen2", **GROUPED)),
    "qwen3": Family(causal("Qwen3", **GROUPED, head_dim=16)),
    "gemma": Family(causal("Gemma", **GROUPED, head_dim=16), tied=("model.embed_tokens.weight",)),
    "gemma2": Family(causal("Gemma2", **GROUPED, head_dim=16), tied=("model.embed_tokens.weight",)),
    "mixtral": Family(causal("Mixtral", **GROUPED, **MOE)),
    "qwen2_moe": Family(
        causal(
            "Qwen2Moe",
            **GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
    "bert": Family(masked("Bert", **BERT), masked_tokens, tied=("bert.embeddings.word_embeddings.weight",)),
    "roberta": Family(masked("Roberta", **BERT), tied=("roberta.embeddings.word_embeddings.weight",)),
    "deberta_v2": Family(
        masked("DebertaV2", **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"], pooler_dropout=0.0),
        masked_tokens,
    ),
    "electra": Family(
        masked("Electra", **BERT, embedding_size=16), tied=("electra.embeddings.word_embeddings.weight",)
    ),
    "albert": Family(masked("Albert", **BERT, embedding_size=16), tied=("albert.embeddings.word_embeddings.weight",)),
    "t5": Family(
        hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            pad_token_id=2,
            **T5,
        ),
        tied=("shared.weight",),
    ),
    "bart": Family(hugging_face("BartForConditionalGeneration", "BartConfig", **BART), tied=("model.shared.weight",)),
    "whisper": Family(
        hugging_face(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **BART,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
        ),
        speech,
        tied=("model.decoder.embed_tokens.weight",),
    ),
    "mamba": Family(
        causal("Mamba", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4),
        tied=("backbone.embeddings.weight",),
    ),
    "vit": Family(images("ViT", **WIDE, **QUIET_BERT, **IMAGES), image),
    "convnext": Family(
        images("ConvNext", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1], num_labels=5), large_image
    ),
    "resnet": Family(
        images(
            "ResNet",
            embedding_size=8,
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            num_labels=5,
        ),
        large_image,
        buffers=True,
    ),
    "gptj": Family(causal("GPTJ", **GPT2, **QUIET_GPT2, rotary_dim=8)),
    "nanogpt": Family(NanoGPT, loss=lambda output, batch: output[1], tied=("wte.weight",)),
    "sequential": Family(_sequential, vectors, loss=_classes),
    "unet": Family(UNet, image, loss=unet_loss),
}
