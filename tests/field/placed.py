"""Modules that users write around a denoiser that wants more than tensors with one entry for each example.

Patches and words lie alike in all examples: the module around the denoiser tells positions, shapes and grids.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.field.latents import EARLIER, LISTED, SIDE

_TOLD = {
    "img_ids",
    "txt_ids",
    "img_shapes",
    "num_frames",
    "height",
    "width",
    "audio_num_frames",
    "chunk_partition",
    "indices_latents",
    "visual_rope_pos",
    "text_rope_pos",
    "img_mask",
    "padding_mask",
    "shape_list",
}
"""Arguments that are the same for all examples."""


def is_placed(kind: type[nn.Module]) -> bool:
    """Whether a class of denoisers wants such arguments, or lists of tensors."""
    takes = set(inspect.signature(kind.forward).parameters)
    shared = _has_shared_positions(takes) or takes >= _TURNED
    return bool(takes & (_TOLD | set(LISTED)) or shared or "Motion" in kind.__name__)


_TURNED = {"image_rotary_emb", "encoder_mask"}
"""Of a denoiser that takes rotary embeddings ready made."""


def _has_shared_positions(takes: set[str]) -> bool:
    """A row of positions for words and patches together; where examples are packed in segments each has its own."""
    return "position_ids" in takes and "segment_ids" not in takes


class Placed(nn.Module):
    """A denoiser that is told how patches and words lie.

    Args:
        model: the denoiser.
        shape: of what it denoises, of one example.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        self.axes = len(getattr(config, "axes_dims_rope", (0, 0, 0)))
        self.is_motion = "Motion" in type(model).__name__
        self.shape = shape
        across = math.isqrt(shape[0]) if len(shape) == 2 else SIDE
        frames = 1 if len(shape) < 4 else 2
        told: dict[str, Any] = {
            "num_frames": frames,
            "height": across,
            "width": across,
            "audio_num_frames": max(shape),
            "chunk_partition": (1, 1),
            "img_shapes": [[(frames, across, across)]],
        }
        self.takes = set(inspect.signature(model.forward).parameters)
        self.told = {name: value for name, value in told.items() if name in self.takes}

    def forward(
        self,
        hidden_states: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        timestep: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        guidance: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        encoder_mask: Tensor | None = None,
        audio_hidden_states: Tensor | None = None,
        audio_encoder_hidden_states: Tensor | None = None,
        r_timestep: Tensor | None = None,
        image_embeds: Tensor | None = None,
        text_encoder_layers: Tensor | None = None,
        encoder_hidden_states_t5: Tensor | None = None,
        encoder_hidden_states_llama3: Tensor | None = None,
        pooled_embeds: Tensor | None = None,
        timesteps: Tensor | None = None,
        sample: Tensor | None = None,
        class_labels: Tensor | None = None,
        latents_clean: Tensor | None = None,
        latents_history_2x: Tensor | None = None,
        latents_history_4x: Tensor | None = None,
        x: Tensor | None = None,
        t: Tensor | None = None,
        cap_feats: Tensor | None = None,
    ) -> Any:
        named = {
            "hidden_states": hidden_states,
            "encoder_hidden_states": encoder_hidden_states,
            "timestep": timestep,
            "pooled_projections": pooled_projections,
            "guidance": guidance,
            "encoder_attention_mask": encoder_attention_mask,
            "encoder_hidden_states_mask": encoder_hidden_states_mask,
            "encoder_mask": encoder_mask,
            "audio_hidden_states": audio_hidden_states,
            "audio_encoder_hidden_states": audio_encoder_hidden_states,
            "r_timestep": r_timestep,
            "image_embeds": image_embeds,
            "text_encoder_layers": text_encoder_layers,
            "encoder_hidden_states_t5": encoder_hidden_states_t5,
            "encoder_hidden_states_llama3": encoder_hidden_states_llama3,
            "pooled_embeds": pooled_embeds,
            "timesteps": timesteps,
            "sample": sample,
            "class_labels": class_labels,
            "latents_clean": latents_clean,
            "latents_history_2x": latents_history_2x,
            "latents_history_4x": latents_history_4x,
            "x": x,
            "t": t,
            "cap_feats": cap_feats,
        }
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        for name, dimension in LISTED.items():
            if name in given:
                given[name] = list(given[name].unbind(dimension))
        words = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        if self.is_motion and encoder_hidden_states is not None:
            given["encoder_hidden_states"] = encoder_hidden_states.repeat_interleave(self.shape[1], dim=0)
        if "shape_list" in self.takes:
            given["shape_list"] = [[(2, 2, 2)]] * len(next(iter(given.values())))
        return self.model(**given, **self.told, **self._positions(words))

    def _positions(self, words: int) -> dict[str, Any]:
        """Return the places of words and patches, as far as the denoiser wants to know."""
        patches, takes = self.shape[0], self.takes
        lie = torch.arange(patches)[:, None].expand(-1, self.axes).float()
        none = torch.zeros(words, self.axes)
        found: dict[str, Any] = {}
        if {"img_ids", "txt_ids"} <= takes:
            found = {"img_ids": lie, "txt_ids": none}
        if _has_shared_positions(takes):
            found["position_ids"] = torch.cat([none, lie])
        if "indices_latents" in takes:
            found["indices_latents"] = torch.arange(2)
            found |= {f"indices_latents_{name}": torch.arange(frames) for name, frames in EARLIER.items()}
        if "text_rope_pos" in takes:
            half = torch.arange(SIDE // 2)
            found |= {"visual_rope_pos": [torch.arange(2), half, half], "text_rope_pos": torch.arange(words)}
        if "img_mask" in takes:
            found["img_mask"] = torch.arange(words + patches // 4)[None] >= words
        if "padding_mask" in takes:
            found["padding_mask"] = torch.zeros(1, 1, SIDE, SIDE)
        if takes >= _TURNED:
            found |= {"image_rotary_emb": self._turned(), "cross_attention_kwargs": {}}
        return found

    def _turned(self) -> Tensor:
        """Rotary embeddings of a grid, as the pipelines of such a denoiser make them."""
        from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

        config: Any = self.model.config
        made: Any = get_2d_rotary_pos_embed_lumina
        turned: Tensor = made(config.hidden_size // config.num_attention_heads, SIDE, SIDE)
        return turned
