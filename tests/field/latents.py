"""What a denoiser of diffusers is given: latents, a moment, texts and what else goes with them."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.field.samples import generator_of
from tests.field.shrink import WIDTH

SIDE = 8
"""Of a picture of latents."""


def inputs(
    given: Iterable[str], fields: Mapping[str, Any], shape: tuple[int, ...], words: int, fraction: bool, index: int
) -> dict[str, Tensor]:
    """One sample, by the names of what the denoiser is given."""
    generator = generator_of(index)
    moment = torch.rand((), generator=generator) if fraction else torch.randint(0, 900, (), generator=generator)
    found = known(fields, shape, words, moment, generator)
    return {name: found[name]() for name in given}


def width_of(fields: Mapping[str, Any], *names: str, default: int = WIDTH) -> int:
    """The first of these arguments of the constructor that is there."""
    found = next((fields[name] for name in names if fields.get(name) is not None), default)
    return int(found[0] if isinstance(found, list | tuple) else found)


def known(
    fields: Mapping[str, Any], shape: tuple[int, ...], words: int, moment: Tensor, generator: torch.Generator
) -> dict[str, Callable[[], Tensor]]:
    """What we know how to draw, by its name."""

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    width = partial(width_of, fields)
    text = width(*_TEXT)
    patches = shape[0] if len(shape) == 2 else (SIDE // width("patch_size", default=2)) ** 2
    mask = torch.ones(words, dtype=torch.bool if "dit_dim" in fields else torch.float32)
    return {
        "sample": lambda: drawn(*shape),
        "hidden_states": lambda: drawn(*shape),
        "timestep": lambda: moment,
        "encoder_hidden_states": lambda: drawn(words, text),
        "encoder_hidden_states_2": lambda: drawn(words, width("text_embed_2_dim")),
        "encoder_hidden_states_t5": lambda: drawn(words, width("cross_attention_dim_t5")),
        "pooled_projections": lambda: drawn(width("pooled_projection_dim", "in_text_dim2")),
        "class_labels": lambda: torch.randint(0, 10, (), generator=generator),
        "guidance": lambda: torch.rand((), generator=generator),
        "encoder_attention_mask": lambda: mask,
        "proj_embedding": lambda: drawn(width("embedding_dim")),
        "added_time_ids": lambda: drawn(3),
        **dict.fromkeys(("r_timestep", "timestep_r", "timestep_ratio"), lambda: moment),
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), lambda: torch.full((2,), 64.0)),
        **dict.fromkeys(("image_latents", "context_latents", "audio_hidden_states"), lambda: drawn(*shape)),
        **dict.fromkeys(("text_bth", "cap_feats", "audio_encoder_hidden_states"), lambda: drawn(words, text)),
        **dict.fromkeys(("encoder_mask", "text_mask", "encoder_hidden_states_mask"), lambda: mask),
        **dict.fromkeys(("encoder_attention_mask_2", "text_embedding_mask", "text_embedding_mask_t5"), lambda: mask),
        "text_lens": lambda: torch.tensor(words),
        "fps": lambda: torch.tensor(8.0),
        "image_embeds": lambda: drawn(4, width("image_dim", "image_embed_dim", "image_proj_dim")),
        "image_embeddings": lambda: drawn(width("cross_attention_dim")),
        "global_hidden_states": lambda: drawn(1, width("global_states_input_dim", "global_dim", "global_cond_dim")),
        "clip_text_pooled": lambda: drawn(1, width("clip_text_pooled_in_channels")),
        "prior_token_id": lambda: torch.randint(0, 16, (patches,), generator=generator),
        "prior_token_drop": lambda: torch.zeros(patches, dtype=torch.bool),
        "indices_latents": lambda: torch.arange(2),
        "image_meta_size": lambda: torch.full((6,), 64.0),
        "style": lambda: torch.tensor(0),
    }


_TEXT = (
    "cross_attention_dim",
    "joint_attention_dim",
    "caption_channels",
    "text_embed_dim",
    "text_dim",
    "cap_feat_dim",
    "context_in_dim",
    "caption_dim",
    "text_dim_in",
    "in_context_dim",
    "dit_text_dim",
    "text_in_dim",
    "in_text_dim",
    "condition_dim",
    "encoder_hidden_size",
    "embedding_dim",
)
"""Arguments that say how wide the vectors of a text are, the likeliest first."""
USUAL = {
    "sample",
    "hidden_states",
    "timestep",
    "encoder_hidden_states",
    "pooled_projections",
    "proj_embedding",
    "added_time_ids",
    "encoder_attention_mask",
}
"""What most denoisers want, even where it has a default."""
