"""Samples for a model of transformers, derived from its forward's parameters and its configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.field.shrink import IMAGE, LENGTH, VOCABULARY

CLASSES = 5
IGNORED = -100
Sample = Callable[[int], dict[str, Tensor]]
_FIRST = 16
"""Tokens below may be special ones."""
_ROUNDS = 3200
"""Values of a second of sound, as far as feature extractors of stride 320 care: ten frames."""


@dataclass(frozen=True)
class Drawn:
    """A dataset of ``draw(index)``, without a length: it is read in order."""

    draw: Sample

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.draw(index)


def generator_of(index: int) -> torch.Generator:
    """Of one sample."""
    return torch.Generator().manual_seed(1000 + index)


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields, in the configuration or in one of its parts."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "model_type"))]
    for name in names:
        for part in parts:
            value = getattr(part, name, None)
            if value is not None and not callable(value):
                return value
    return default


@dataclass(frozen=True)
class Shapes:
    """The form of a job's samples.

    Attributes:
        takes: what ``forward`` does.
        length: tokens.
        even: all samples count the same: nothing is padded or ignored.
        variant: of those of its kind.
        form: of pictures or sound.
        places: of the text, that stand for the picture or the sound.
        token: which one stands there.
        frames: of sound, as the model counts them.
        answer: shape of what is to be learnt, where the model's output tells it.
    """

    config: Any
    takes: frozenset[str]
    kind: str
    length: int
    even: bool
    variant: str = ""
    form: str = ""
    places: int = 0
    token: int = 0
    frames: int = 9
    answer: tuple[int, ...] = ()

    # -- text -----------------------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> int:
        return int(find(self.config, "vocab_size", "n_vocab", default=VOCABULARY))

    def tokens(self, index: int, length: int) -> Tensor:
        low = _FIRST if self.vocabulary > 2 * _FIRST else min(3, self.vocabulary - 1)
        ids = torch.randint(low, self.vocabulary, (length,), generator=generator_of(index))
        end = find(self.config, "eos_token_id")
        last = self.padded_from(index) - 1
        if isinstance(end, int) and 0 <= end < self.vocabulary and last < length:
            ids[last] = end
        return ids

    def padded_from(self, index: int) -> int:
        return self.length if self.even else self.length - index * 3 % 7

    def text(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens(index, self.length)
        mask = torch.ones(self.length, dtype=torch.long)
        mask[self.padded_from(index) :] = 0
        pad = find(self.config, "pad_token_id")
        ids[mask == 0] = pad if isinstance(pad, int) and 0 <= pad < self.vocabulary else 0
        if self.places:
            ids = torch.cat([torch.full((self.places,), self.token), ids])
            mask = torch.cat([torch.ones(self.places, dtype=torch.long), mask])
        found = {"input_ids": ids}
        if self.places and self.form != "sound" and "mm_token_type_ids" in self.takes:
            found["mm_token_type_ids"] = (ids == self.token).long()
        if self.variant == "text only, typed":
            found["mm_token_type_ids"] = torch.zeros_like(ids)
        if self.places and "token_type_ids" in self.takes:
            found["token_type_ids"] = (ids == self.token).long()
        if "attention_mask" in self.takes and not self.even:
            found["attention_mask"] = mask
        if "bbox" in self.takes:
            corners = torch.randint(0, 24, (len(ids), 4), generator=generator_of(index)).sort(dim=1).values
            found["bbox"] = corners
        if "qformer_input_ids" in self.takes:
            found["qformer_input_ids"] = self.tokens(index + 900, self.length)
        if isinstance(question := find(self.config, "question_token_id"), int) and self.kind == "pretraining":
            found["input_ids"][1] = question
        if self.variant in ("codes", "codes too"):
            several = int(find(self.config, "num_codebooks", default=1)) + (self.variant == "codes too")
            size = (len(ids), several)
            found["input_ids"] = torch.randint(_FIRST, self.codes, size, generator=generator_of(index + 300))
        if "image_embeds_position_mask" in self.takes and self.variant == "several":
            pictures = int(find(self.config, "latent_query_num", default=4))
            found["input_ids"] = torch.cat([torch.full((pictures,), _FIRST), found["input_ids"]])
            found["attention_mask"] = torch.cat([torch.ones(pictures, dtype=torch.long), mask])
            found["image_embeds_position_mask"] = torch.arange(pictures + len(mask)) < pictures
        return {**found, **self.features(index)}

    @property
    def codes(self) -> int:
        """Number of codes of sound."""
        return int(find(self.config, "codebook_vocab_size", "codebook_size", "audio_vocab_size", default=VOCABULARY))

    def features(self, index: int) -> dict[str, Tensor]:
        """Return what detectors have found in a picture, for models that read it beside the text."""
        generator, found = generator_of(index + 700), {}
        if {"visual_feats", "visual_pos"} <= self.takes:
            found["visual_feats"] = torch.randn(4, int(find(self.config, "visual_feat_dim")), generator=generator)
            found["visual_pos"] = torch.rand(4, int(find(self.config, "visual_pos_dim")), generator=generator)
        if {"visual_embeds", "visual_attention_mask"} <= self.takes:
            width = int(find(self.config, "visual_embedding_dim"))
            found["visual_embeds"] = torch.randn(4, width, generator=generator)
            found["visual_attention_mask"] = torch.ones(4, dtype=torch.long)
            found["visual_token_type_ids"] = torch.ones(4, dtype=torch.long)
        return found

    def labels_of(self, text: Mapping[str, Tensor]) -> Tensor:
        labels = text["input_ids"].clone()
        if labels.dim() > 1:  # several codes of sound at each place: the first
            labels = labels[:, 0]
        labels[: self.places] = IGNORED
        if "attention_mask" in text:
            labels[text["attention_mask"] == 0] = IGNORED
        return labels

    # -- pictures and sound ---------------------------------------------------------------------------------

    @property
    def side(self) -> tuple[int, int]:
        size = find(self.config, "image_size", "img_size", default=2 * IMAGE)
        if self.variant == "large":
            return 4 * IMAGE, 4 * IMAGE
        if isinstance(size, Mapping):
            return int(size["height"]), int(size["width"])
        return (int(size), int(size)) if isinstance(size, int) else (int(size[-2]), int(size[-1]))

    def picture(self, index: int) -> Tensor:
        channels = find(self.config, "num_channels", "in_channels", "in_chans", default=3)
        shape: tuple[int, ...] = (channels if isinstance(channels, int) else 3, *self.side)
        if self.kind == "video" or self.variant == "video" or find(self.config, "tubelet_size") is not None:
            shape = (int(find(self.config, "num_frames", "frames_per_clip", default=4)), *shape)
        if self.form in ("several", "several, sized"):
            shape = (1, *shape)
        return torch.randn(shape, generator=generator_of(index))

    def sound(self, index: int, name: str) -> Tensor:
        bins = find(self.config, "num_mel_bins", "input_feat_per_channel", "n_mels", "num_mels", "feature_size", *_BINS)
        if name == "input_values" and (bins is None or self.variant == "raw"):
            return torch.randn(_ROUNDS, generator=generator_of(index))
        bins = int(bins or 16)
        if self.variant == "bins last":
            long = int(find(self.config, "max_length", default=4 * LENGTH)) if name == "input_values" else 4 * LENGTH
            return torch.randn(long, bins, generator=generator_of(index))
        long = 2 * int(find(self.config, "max_source_positions", default=2 * LENGTH))
        return torch.randn(bins, long, generator=generator_of(index))

    def hidden_patches(self, index: int) -> Tensor:
        """A mask over the patches of a picture or of a video's tubes: half of them, of whatever sample."""
        patches = (self.side[0] // int(find(self.config, "patch_size"))) ** 2
        if (tube := find(self.config, "tubelet_size")) is not None:
            patches *= int(find(self.config, "num_frames", default=4)) // int(tube)
        masked = torch.zeros(patches, dtype=torch.bool)
        masked[torch.randperm(patches, generator=generator_of(index))[: patches // 2]] = True
        return masked

    def seen(self, index: int) -> dict[str, Tensor]:
        """A picture in the form that stands for it, with what goes with it."""
        if self.form in ("grid", "patches"):
            return self.patches(index)
        picture = self.picture(index)
        found = {"pixel_values": picture}
        if self.form == "several" and "pixel_attention_mask" in self.takes:
            found["pixel_attention_mask"] = torch.ones(1, *self.side, dtype=torch.long)
        if "sized" in self.form:
            found["image_sizes"] = torch.tensor(self.side)
        return found

    def patches(self, index: int) -> dict[str, Tensor]:
        """Patches in a row, and how they lie: as many each way as may be merged twice."""
        across = 2 * int(find(self.config, "spatial_merge_size", "merge_size", "downsample_factor", default=2))
        patch = find(self.config, "spatial_patch_size", "patch_size", default=8)
        side = int(patch if isinstance(patch, int) else patch[-1])
        deep = int(find(self.config, "temporal_patch_size", default=1)) if self.form == "grid" else 1
        channels = find(self.config, "in_channels", "num_channels", "in_chans", default=3)
        values = torch.randn(across**2, int(channels) * deep * side**2, generator=generator_of(index))
        if self.form == "grid":
            return {"pixel_values": values, "image_grid_thw": torch.tensor([1, across, across])}
        lie = {name: torch.tensor([across, across]) for name in ("spatial_shapes", "target_sizes")}
        lie["pixel_attention_mask"] = torch.ones(across**2, dtype=torch.long)
        return {"pixel_values": values, **{name: value for name, value in lie.items() if name in self.takes}}

    def heard(self, index: int) -> dict[str, Tensor]:
        """Sound beside a text."""
        found = self.sound(index, "input_features")
        frames = found.shape[0] if self.variant == "bins last" else found.shape[-1]
        masks = ("input_features_mask", "feature_attention_mask")
        return {
            "input_features": found,
            **{name: torch.ones(frames, dtype=torch.long) for name in masks if name in self.takes},
        }

    # -- all together ---------------------------------------------------------------------------------------

    def sources(self, index: int) -> dict[str, Tensor]:
        """Return the part of a sample that a model learns from."""
        takes = self.takes
        if self.places:
            return {**self.text(index), **(self.heard(index) if self.form == "sound" else self.seen(index))}
        found: dict[str, Tensor] = {}
        for name in ("input_values", "input_features"):
            if name in takes and "text only" not in self.variant:
                found[name] = self.sound(index, name)
        if found:
            if self.variant == "bins last" and "attention_mask" in takes:
                found["attention_mask"] = torch.ones(len(next(iter(found.values()))), dtype=torch.long)
            return found
        if "input_ids" in takes and not (self.kind in _SEEN and "pixel_values" in takes):
            found.update(self.text(index))
        for name in ("pixel_values", "pixel_values_videos"):
            if name in takes and "text only" not in self.variant:
                found.update(self.seen(index) if name == "pixel_values" else {name: self.picture(index)})
        if "flattened_patches" in takes:
            across, values = 4, int(find(self.config, "patch_embed_hidden_size", default=768))
            lie = torch.stack(torch.meshgrid(*[torch.arange(1, across + 1)] * 2, indexing="ij"), dim=-1).flatten(0, 1)
            drawn = torch.randn(across**2, values, generator=generator_of(index))
            found["flattened_patches"] = torch.cat([lie.float(), drawn], dim=1)
        if self.variant == "several" and "image_attention_mask" in takes and "pixel_values" in found:
            found["pixel_values"] = found["pixel_values"][None]
            found["image_attention_mask"] = torch.ones(self.length, 1, dtype=torch.long)
        if "inputs" in takes and not found:
            found["inputs"] = self.tokens(index, self.length)
        return found


_BINS = ("feature_projection_input_dim", "input_dim", "input_size")
_SEEN = {"image", "video", "pixels", "masked image", "boxes", "masks", "dense"}
