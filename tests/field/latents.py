"""Inputs of a denoiser of diffusers: latents, a moment, texts and what else goes with them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.field.samples import generator_of
from tests.field.shrink import WIDTH

SIDE = 8
"""Of a picture of latents."""


@dataclass(frozen=True)
class Manner:
    """In what form a denoiser takes what it is given.

    Attributes:
        shape: of the latents of one example.
        words: of a text.
        fraction: the moment is a share of 1 and not a number of steps.
        frames: each so many frames have a moment of their own; 0: one for all.
        mask: what masks consist of.
    """

    shape: tuple[int, ...]
    words: int
    fraction: bool = False
    frames: int = 0
    mask: torch.dtype = torch.float32


def inputs(given: Iterable[str], fields: Mapping[str, Any], manner: Manner, index: int) -> dict[str, Tensor]:
    """One sample, by the names of what the denoiser is given."""
    found = known(fields, manner, generator_of(index))
    return {name: found[name]() for name in given}


def width_of(fields: Mapping[str, Any], *names: str, default: int = WIDTH) -> int:
    """The first of these arguments of the constructor that is there."""
    found = next((fields[name] for name in names if fields.get(name) is not None), default)
    return int(found[0] if isinstance(found, list | tuple) else found)


def known(fields: Mapping[str, Any], manner: Manner, generator: torch.Generator) -> dict[str, Callable[[], Tensor]]:
    """Return the inputs that we know how to draw, by name."""
    shape, words, several = manner.shape, manner.words, (manner.frames,) if manner.frames else ()
    moment = (
        torch.rand(several, generator=generator)
        if manner.fraction
        else torch.randint(0, 900, several, generator=generator)
    )

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    width = partial(width_of, fields)
    text = width(*_TEXT)
    patches = shape[0] if len(shape) == 2 else (SIDE // width("patch_size", default=2)) ** 2
    mask = torch.ones(words, dtype=torch.bool if "dit_dim" in fields else manner.mask)
    layers = int(fields.get("num_layers") or 1) + int(fields.get("num_single_layers") or 0)
    texts: tuple[int, ...] = (words, text)
    if "num_text_layers" in fields:
        texts = (words, int(fields["num_text_layers"]), text)
    elif "injection_layer_ids" in fields:
        texts = (1 + len(fields["injection_layer_ids"]), words, text)
    beside = int(fields.get("in_channels") or 0) - int(fields.get("audio_acoustic_hidden_dim") or 0)
    return {
        "sample": lambda: drawn(*shape),
        "hidden_states": lambda: drawn(*shape),
        "timestep": lambda: moment,
        "encoder_hidden_states": lambda: drawn(*texts),
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
        **dict.fromkeys(("image_latents", "audio_hidden_states"), lambda: drawn(*shape)),
        **dict.fromkeys(("text_bth", "cap_feats", "audio_encoder_hidden_states"), lambda: drawn(words, text)),
        **dict.fromkeys(("encoder_mask", "text_mask", "encoder_hidden_states_mask"), lambda: mask),
        **dict.fromkeys(("encoder_attention_mask_2", "text_embedding_mask", "text_embedding_mask_t5"), lambda: mask),
        "context_latents": lambda: drawn(shape[0], beside) if "audio_acoustic_hidden_dim" in fields else drawn(*shape),
        "pose_hidden_states": lambda: drawn(width("latent_channels"), shape[1] - 1, *shape[2:]),
        "face_pixel_values": lambda: drawn(3, 4 * (shape[1] - 1), *(2 * (width("motion_encoder_size"),))),
        "control_hidden_states": lambda: drawn(width("vace_in_channels"), *shape[1:]),
        **{f"latents_{name}": partial(drawn, shape[0], frames, *shape[2:]) for name, frames in EARLIER.items()},
        "text_encoder_layers": lambda: drawn(layers, words, width("text_encoder_dim")),
        "encoder_hidden_states_llama3": lambda: drawn(layers, words, width("caption_channels")),
        "pooled_embeds": lambda: drawn(width("text_emb_dim")),
        "timesteps": lambda: moment,
        "t": lambda: moment,
        "x": lambda: drawn(shape[0], 1, *shape[1:]),
        "input_ids": lambda: torch.randint(0, 16, shape[1:], generator=generator),
        "pooled_text_emb": lambda: drawn(width("cond_embed_dim")),
        "micro_conds": lambda: torch.full((5,), 64.0),
        "segment_ids": lambda: torch.zeros(words, dtype=torch.long),
        "indicator": lambda: 3 - (torch.arange(words) >= _FEW).long(),
        "position_ids": lambda: torch.arange(words)[:, None].repeat(1, 3),
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
        "encoder_hidden_states_image": lambda: drawn(4, width("image_dim")),
    }


_FEW = 6
"""Words before the patches, where both are in one row."""
EARLIER = {"clean": 1, "history_2x": 2, "history_4x": 4}
"""Frames before those that are denoised, as finely as they are kept, and how many."""
LISTED = {"text_encoder_layers": 1, "encoder_hidden_states_llama3": 1, "x": 0, "cap_feats": 0}
"""Inputs that are lists of tensors, and along which dimension of a batch."""
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
    "cond_token_dim",
    "llm_features_dim",
    "text_hidden_dim",
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
"""Inputs that most denoisers want, even where they have a default."""
