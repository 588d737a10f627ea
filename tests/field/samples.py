"""Samples for a model of transformers, derived from its forward's parameters and its configuration."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

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


def _find(config: Any, *names: str, default: Any = None) -> Any:
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
    """What samples of a job look like.

    Attributes:
        length: tokens.
        even: all samples count the same: nothing is padded or ignored.
    """

    config: Any
    takes: frozenset[str]
    kind: str
    length: int
    even: bool
    variant: str
    image_tokens: int = 0

    # -- text -----------------------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> int:
        return int(_find(self.config, "vocab_size", "n_vocab", default=VOCABULARY))

    def tokens(self, index: int, length: int) -> Tensor:
        low = _FIRST if self.vocabulary > 2 * _FIRST else min(3, self.vocabulary - 1)
        ids = torch.randint(low, self.vocabulary, (length,), generator=generator_of(index))
        end = _find(self.config, "eos_token_id")
        if isinstance(end, int) and 0 <= end < self.vocabulary:
            ids[self.padded_from(index) - 1] = end
        return ids

    def padded_from(self, index: int) -> int:
        return self.length if self.even else self.length - index * 3 % 7

    def text(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens(index, self.length)
        mask = torch.ones(self.length, dtype=torch.long)
        mask[self.padded_from(index) :] = 0
        pad = _find(self.config, "pad_token_id")
        ids[mask == 0] = pad if isinstance(pad, int) and 0 <= pad < self.vocabulary else 0
        if self.image_tokens:
            token = _find(self.config, "image_token_id", "image_token_index")
            ids = torch.cat([torch.full((self.image_tokens,), token), ids])
            mask = torch.cat([torch.ones(self.image_tokens, dtype=torch.long), mask])
        found = {"input_ids": ids}
        if "attention_mask" in self.takes and not self.even:
            found["attention_mask"] = mask
        if "bbox" in self.takes:
            corners = torch.randint(0, 24, (len(ids), 4), generator=generator_of(index)).sort(dim=1).values
            found["bbox"] = corners
        return found

    def labels_of(self, text: Mapping[str, Tensor]) -> Tensor:
        labels = text["input_ids"].clone()
        labels[: self.image_tokens] = IGNORED
        if "attention_mask" in text:
            labels[text["attention_mask"] == 0] = IGNORED
        return labels

    # -- pictures and sound ---------------------------------------------------------------------------------

    @property
    def side(self) -> tuple[int, int]:
        size = _find(self.config, "image_size", "img_size", default=2 * IMAGE)
        if self.variant == "large":
            return 4 * IMAGE, 4 * IMAGE
        if isinstance(size, Mapping):
            return int(size["height"]), int(size["width"])
        return (int(size), int(size)) if isinstance(size, int) else (int(size[-2]), int(size[-1]))

    def picture(self, index: int) -> Tensor:
        channels = _find(self.config, "num_channels", "in_channels", "in_chans", default=3)
        shape: tuple[int, ...] = (channels if isinstance(channels, int) else 3, *self.side)
        if self.kind == "video" or self.variant == "video" or _find(self.config, "tubelet_size") is not None:
            shape = (int(_find(self.config, "num_frames", "frames_per_clip", default=4)), *shape)
        if self.variant == "several pictures":
            shape = (1, *shape)
        return torch.randn(shape, generator=generator_of(index))

    def sound(self, index: int, name: str) -> Tensor:
        bins = _find(self.config, "num_mel_bins", "input_feat_per_channel", "n_mels", "num_mels", "feature_size")
        if name == "input_values" and (bins is None or self.variant == "raw"):
            return torch.randn(_ROUNDS, generator=generator_of(index))
        bins = int(bins or 16)
        if self.variant == "bins last":
            long = int(_find(self.config, "max_length", default=4 * LENGTH)) if name == "input_values" else 4 * LENGTH
            return torch.randn(long, bins, generator=generator_of(index))
        long = 2 * int(_find(self.config, "max_source_positions", default=2 * LENGTH))
        return torch.randn(bins, long, generator=generator_of(index))

    def hidden_patches(self, index: int) -> Tensor:
        """A mask over the patches of a picture or of a video's tubes: half of them, of whatever sample."""
        patches = (self.side[0] // int(_find(self.config, "patch_size"))) ** 2
        if (tube := _find(self.config, "tubelet_size")) is not None:
            patches *= int(_find(self.config, "num_frames", default=4)) // int(tube)
        masked = torch.zeros(patches, dtype=torch.bool)
        masked[torch.randperm(patches, generator=generator_of(index))[: patches // 2]] = True
        return masked

    # -- all together ---------------------------------------------------------------------------------------

    def sources(self, index: int) -> dict[str, Tensor]:
        takes = self.takes
        found: dict[str, Tensor] = {}
        for name in ("input_values", "input_features"):
            if name in takes and self.variant != "text only":
                found[name] = self.sound(index, name)
        if found:
            if self.variant == "bins last" and "attention_mask" in takes:
                found["attention_mask"] = torch.ones(len(next(iter(found.values()))), dtype=torch.long)
            return found
        if "input_ids" in takes and not (self.kind in _SEEN and "pixel_values" in takes):
            found.update(self.text(index))
        for name in ("pixel_values", "pixel_values_videos"):
            if name in takes and self.variant != "text only":
                found[name] = self.picture(index)
        if "inputs" in takes and not found:
            found["inputs"] = self.tokens(index, self.length)
        return found

    def sample(self, index: int) -> dict[str, Tensor]:
        """One sample of the dataset."""
        return _TARGETS[self.kind](self, index)


_SEEN = {"image", "video", "pixels", "masked image"}


def _tokens(shapes: Shapes, index: int) -> dict[str, Tensor]:
    found = shapes.sources(index)
    if "input_ids" in found and "input_values" not in found and "input_features" not in found:
        labels = shapes.labels_of(found)
    else:
        labels = shapes.tokens(index + 500, shapes.length)
    if "decoder_input_ids" in shapes.takes and shapes.variant == "decoder too":
        found["decoder_input_ids"] = labels.clamp(min=0)
    return {**found, "labels": labels}


def _class(shapes: Shapes, index: int) -> dict[str, Tensor]:
    labels = torch.randint(0, CLASSES, (), generator=generator_of(index))
    name = "labels" if "labels" in shapes.takes or "target_values" not in shapes.takes else "target_values"
    return {**shapes.sources(index), name: labels}


def _next(shapes: Shapes, index: int) -> dict[str, Tensor]:
    name = "labels" if "labels" in shapes.takes else "next_sentence_label"
    return {**shapes.sources(index), name: torch.tensor(index % 2)}


def _pretraining(shapes: Shapes, index: int) -> dict[str, Tensor]:
    if "pixel_values" in shapes.takes and "input_ids" not in shapes.takes:
        hidden = {"bool_masked_pos": shapes.hidden_patches(index)} if "bool_masked_pos" in shapes.takes else {}
        return {**shapes.sources(index), **hidden}
    found = _tokens(shapes, index)
    if "next_sentence_label" in shapes.takes:
        found["next_sentence_label"] = torch.tensor(index % 2)
    if "sentence_order_label" in shapes.takes:
        found["sentence_order_label"] = torch.tensor(index % 2)
    if shapes.variant == "tags":
        found["labels"] = torch.randint(0, 2, found["input_ids"].shape, generator=generator_of(index))
    if "labels" not in shapes.takes:
        del found["labels"]
    return found


def _tags(shapes: Shapes, index: int) -> dict[str, Tensor]:
    found = shapes.sources(index)
    labels = torch.randint(0, CLASSES, found["input_ids"].shape, generator=generator_of(index))
    labels[shapes.labels_of(found) == IGNORED] = IGNORED
    return {**found, "labels": labels}


def _span(shapes: Shapes, index: int) -> dict[str, Tensor]:
    first, last = torch.randint(0, shapes.length // 2, (2,), generator=generator_of(index)).sort().values
    return {**shapes.sources(index), "start_positions": first, "end_positions": last + 1}


def _choice(shapes: Shapes, index: int) -> dict[str, Tensor]:
    each = [shapes.sources(4 * index + choice) for choice in range(3)]
    found = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    return {**found, "labels": torch.tensor(index % 3)}


def _pixels(shapes: Shapes, index: int) -> dict[str, Tensor]:
    labels = torch.randint(0, CLASSES, shapes.side, generator=generator_of(index))
    return {**shapes.sources(index), "labels": labels}


def _masked_image(shapes: Shapes, index: int) -> dict[str, Tensor]:
    return {**shapes.sources(index), "bool_masked_pos": shapes.hidden_patches(index)}


def _ctc(shapes: Shapes, index: int) -> dict[str, Tensor]:
    return {**shapes.sources(index), "labels": shapes.tokens(index, 3)}


def _frames(shapes: Shapes, index: int) -> dict[str, Tensor]:
    frames = int(shapes.variant) if shapes.variant.isdigit() else 9
    labels = nn.functional.one_hot(torch.randint(0, CLASSES, (frames,), generator=generator_of(index)), CLASSES)
    return {**shapes.sources(index), "labels": labels}


def _series(shapes: Shapes, index: int) -> dict[str, Tensor]:
    config, generator = shapes.config, generator_of(index)
    takes = shapes.takes
    lags = _find(config, "lags_sequence", default=[0])
    long = int(_find(config, "context_length", default=LENGTH))
    ahead = int(_find(config, "prediction_length", default=8) or 8)
    channels = int(_find(config, "num_input_channels", "input_size", default=1))
    found: dict[str, Tensor] = {}
    if "past_time_features" in takes:
        past = long + max(lags)
        features = int(_find(config, "num_time_features", default=0))
        shape = () if channels == 1 else (channels,)
        found["past_values"] = torch.randn(past, *shape, generator=generator)
        found["past_time_features"] = torch.randn(past, features, generator=generator)
        found["past_observed_mask"] = torch.ones(past, *shape)
        found["future_values"] = torch.randn(ahead, *shape, generator=generator)
        found["future_time_features"] = torch.randn(ahead, features, generator=generator)
        return found
    found["past_values"] = torch.randn(long, channels, generator=generator)
    if "future_values" in takes:
        found["future_values"] = torch.randn(ahead, channels, generator=generator)
    if "target_values" in takes:
        targets = int(_find(config, "num_targets", default=CLASSES))
        is_class = shapes.variant == "class"
        found["target_values"] = (
            torch.tensor(index % targets) if is_class else torch.randn(targets, generator=generator)
        )
    return found


def _pair(shapes: Shapes, index: int) -> dict[str, Tensor]:
    return {**shapes.text(index), "pixel_values": shapes.picture(index)}


_TARGETS: Mapping[str, Callable[[Shapes, int], dict[str, Tensor]]] = {
    "tokens": _tokens,
    "pretraining": _pretraining,
    "class": _class,
    "image": _class,
    "video": _class,
    "next": _next,
    "tags": _tags,
    "span": _span,
    "choice": _choice,
    "pixels": _pixels,
    "masked image": _masked_image,
    "ctc": _ctc,
    "frames": _frames,
    "series": _series,
    "pair": _pair,
}

_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("", "decoder too", "bins last", "text only", "raw"),
    "pretraining": ("", "tags", "decoder too", "bins last", "text only", "raw"),
    "class": ("", "bins last", "text only", "raw", "decoder too"),
    "image": ("", "large"),
    "pixels": ("", "large"),
    "masked image": ("",),
    "ctc": ("", "bins last"),
    "frames": ("9", "4", "10", "64"),
    "series": ("", "class"),
    "video": ("",),
}


def candidates(module: nn.Module, config: Any, kind: str, *, even: bool) -> Iterator[Shapes]:
    """Ways to make samples for a model, the likeliest first."""
    takes = frozenset(inspect.signature(module.forward).parameters)
    if kind in ("tokens", "pretraining"):
        for variant in ("", "several pictures"):
            with contextlib.suppress(Exception):  # pictures in a form of its own
                shapes = Shapes(config, takes, kind, LENGTH, even, variant)
                if tokens := _image_tokens(module, shapes):
                    yield replace(shapes, image_tokens=tokens)
    for variant in _VARIANTS.get(kind, ("",)):
        yield Shapes(config, takes, kind, LENGTH, even, variant)


def _image_tokens(module: nn.Module, shapes: Shapes) -> int:
    """How many places of a text an image takes, where image and text meet by a token that stands for the image."""
    token = _find(shapes.config, "image_token_id", "image_token_index")
    if token is None or not {"input_ids", "pixel_values"} <= shapes.takes:
        return 0
    holder: Any = module
    features = getattr(holder, "get_image_features", None) or getattr(holder.model, "get_image_features", None)
    if features is None:
        return 0
    with torch.no_grad():
        found = features(pixel_values=shapes.picture(0)[None])
    found = getattr(found, "pooler_output", found)
    found = torch.cat([each.flatten(0, -2) for each in found]) if isinstance(found, list | tuple) else found
    return int(found.flatten(0, -2).shape[0])
