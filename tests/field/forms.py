"""Ways to make samples for a model, from what its forward takes and from what a trial of it shows."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.field.samples import Shapes, find
from tests.field.shrink import LENGTH
from tests.field.targets import sample

_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "tokens": (
        "",
        "decoder too",
        "bins last",
        "text only",
        "raw",
        "several",
        "codes",
        "codes too",
        "rows of codes",
        "text only, typed",
    ),
    "pretraining": ("", "tags", "decoder too", "bins last", "text only", "raw", "several"),
    "class": ("", "bins last", "text only", "raw", "decoder too"),
    "image": ("", "large"),
    "pixels": ("", "large"),
    "boxes": ("", "large"),
    "masks": ("", "large"),
    "dense": ("", "large"),
    "ctc": ("", "bins last", "bins last alone"),
    "frames": ("", "bins last"),
    "series": ("", "class", "alone"),
}
_PLACED = {"tokens", "pretraining", "tags", "class", "image"}
"""Kinds whose text may hold places for pictures or sound."""

Build = Callable[[], nn.Module]


def candidates(kind: type[nn.Module], build: Build, config: Any, learnt: str, *, even: bool) -> Iterator[Shapes]:
    """Ways to make samples of a kind of targets for a class of models, the likeliest first."""
    takes = frozenset(inspect.signature(kind.forward).parameters)
    plain = Shapes(config, takes, learnt, LENGTH, even)
    if learnt in _PLACED and "input_ids" in takes:
        yield from _with_places(build, plain)
    if learnt == "image" and "spatial_shapes" in takes:
        yield replace(plain, form="patches")
    for variant in _VARIANTS.get(learnt, ("",)):
        if not _may_be(variant, plain):
            continue
        shapes = replace(plain, variant=variant)
        if learnt == "dense":
            yield from (replace(shapes, answer=answer) for answer in _answers(build, shapes))
        elif learnt == "frames" or "mask_time_indices" in takes:
            yield replace(shapes, frames=_frames(build, shapes))
        else:
            yield shapes
    if learnt in ("tokens", "class") and (long := find(config, "max_position_embeddings", default=0)) > LENGTH:
        yield replace(plain, length=int(long))  # every position is taken


def _may_be(variant: str, plain: Shapes) -> bool:
    """Whether a model knows what this variant of its samples is about."""
    if variant in ("codes", "codes too"):
        return find(plain.config, "num_codebooks") is not None
    if variant == "text only, typed":
        return "mm_token_type_ids" in plain.takes
    if variant == "rows of codes":
        return find(plain.config, "num_codebooks") is not None
    return variant != "several" or bool({"image_attention_mask", "image_embeds_position_mask"} & plain.takes)


def _with_places(build: Build, plain: Shapes) -> Iterator[Shapes]:
    forms: list[Shapes] = []
    if "pixel_values" in plain.takes:
        image = find(plain.config, "image_token_id", "image_token_index")
        several = ("several", "", "sized", "several, sized", "patches")
        for form in ("grid",) if "image_grid_thw" in plain.takes else several:
            if isinstance(image, int) and ("sized" not in form or "image_sizes" in plain.takes):
                forms.append(replace(plain, form=form, token=image))
    if "input_features" in plain.takes:
        audio = find(plain.config, "audio_token_id", "audio_token_index")
        for variant in ("", "bins last"):
            if isinstance(audio, int):
                forms.append(replace(plain, form="sound", variant=variant, token=audio))
    if not forms:
        return
    module = build()
    for shapes in forms:
        with contextlib.suppress(Exception):  # in a form of its own
            if places := _places(module, shapes):
                yield replace(shapes, places=places)


def _places(module: Any, shapes: Shapes) -> int:
    """Count the places of a text that a picture or a sound takes: as many as the model makes vectors of it."""
    name = "get_audio_features" if shapes.form == "sound" else "get_image_features"
    features = next((found for part in module.modules() if (found := getattr(part, name, None))), None)
    if features is None:
        return 0
    drawn = shapes.heard(0) if shapes.form == "sound" else shapes.seen(0)
    drawn |= {name: value for name, value in shapes.text(0).items() if name.startswith("qformer_")}
    packed = shapes.form == "grid"
    takes = inspect.signature(features).parameters
    given = {
        name: value if packed and name == "pixel_values" else value[None]
        for name, value in drawn.items()
        if name in takes
    }
    with torch.no_grad():
        found = features(**given)
    return int(_rows(getattr(found, "pooler_output", found)))


def _rows(found: Any) -> int:
    if isinstance(found, list | tuple):
        return sum(_rows(each) for each in found)
    return int(found.flatten(0, -2).shape[0])


def _frames(build: Build, shapes: Shapes) -> int:
    """Of a sound, as the model counts them once it has made them fewer."""
    module: Any = build()
    name, drawn = next(iter(shapes.sources(0).items()))
    with contextlib.suppress(Exception):
        return int(module._get_feat_extract_output_lengths(len(drawn)))
    with contextlib.suppress(Exception), torch.no_grad():
        return int(_first(module.eval()(**{name: drawn[None]})).shape[1])
    return shapes.frames


def _answers(build: Build, shapes: Shapes) -> Iterator[tuple[int, ...]]:
    """Shapes that a target for each pixel may have: that of the output, without its only channel, of the picture."""
    drawn = {name: value[None] for name, value in shapes.sources(0).items()}
    try:
        with torch.no_grad():
            found = tuple(_first(build().eval()(**drawn)).shape[1:])
    except Exception:
        found = ()
    channels = tuple(size for size in found if size > 1)
    yield from dict.fromkeys((found, channels, (1, *shapes.side), shapes.side))


def _first(output: Any) -> Tensor:
    """The first tensor of numbers in an output."""
    values = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def drawn(shapes: Shapes) -> Callable[[int], dict[str, Tensor]]:
    """Samples by index."""
    return lambda index: sample(shapes, index)
