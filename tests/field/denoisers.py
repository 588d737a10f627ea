"""Jobs of diffusers: every denoiser, in a configuration that the signature of its constructor gives."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.field import latents, libraries
from tests.field.exceptions import DENOISERS
from tests.field.jobs import MOST_PARAMETERS, Attempt, Job, Prepared, quiet
from tests.field.latents import SIDE, USUAL, Manner, inputs, width_of
from tests.field.placed import Placed, is_placed
from tests.field.samples import Drawn, generator_of
from tests.field.shrink import HEADS, LENGTH, WIDTH, shrunk

_NAMES = re.compile(r"^(?!.*(ControlNet|Decoder|Autoencoder|Vae))\w*(UNet|Transformer|DiT|UVit)\w*$")


@cache
def jobs() -> tuple[Job, ...]:
    """One for each class; none where the library is not installed."""
    if not libraries.has_all():
        return ()
    import diffusers

    return tuple(
        Job("diffusers", name, name, "noise")
        for name in sorted(diffusers._import_structure["models"])
        if _NAMES.match(name) and hasattr(diffusers, name)
    )


def _fields(kind: type[nn.Module]) -> Iterator[dict[str, Any]]:
    """Arguments of the constructor in tiny forms, the smallest first.

    Where those of the first contradict each other, the width of a head, and what must fit it, is left as it is, and so
    are the channels that come and go; then what has no default is given one; then all widths are of one size; then
    what has no default is given one in the smallest form.
    """
    parameters = inspect.signature(kind.__init__).parameters
    yield _shrunk_by(parameters, {**_FIXED, **_axes(parameters)}, lambda name: True)
    heads = {name: value for name, value in _FIXED.items() if not name.endswith(("_dim", "channels"))}
    for given in (heads, {**heads, **_MISSING}):
        yield _shrunk_by(parameters, given, lambda name: bool(_FREE.search(name)))
    yield _shrunk_by(parameters, {**_FIXED, **_even(parameters)}, lambda name: True)
    yield _shrunk_by(parameters, {**_FIXED, **_MISSING, **_axes(parameters)}, lambda name: True)


def _axes(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Shares of a head that rotary embeddings have, for time, height and width, or for the last two."""
    shares: dict[int, tuple[int, ...]] = {2: (8, 8), 3: (4, 6, 6)}
    found: dict[str, Any] = {"mrope_section": (4, 2, 2)} if "mrope_section" in parameters else {}
    for name, parameter in parameters.items():
        default = parameter.default
        if name == "axes_dim" and default is None:
            found[name] = list(shares[2])
        elif _AXES.search(name) and isinstance(default, list | tuple) and len(default) in shares:
            found[name] = type(default)(shares[len(default)])
    return found


_AXES = re.compile(r"ax[ei]s_dims?|^rope_dim_list$")


def _even(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Widths of which each is divisible by as many groups as a normalisation may have, one for each block."""
    blocks = getattr(parameters.get("block_out_channels"), "default", None)
    several = len(blocks) if isinstance(blocks, list | tuple) else 2
    widths = (WIDTH, *[2 * WIDTH] * (several - 1))
    found: dict[str, Any] = {"block_out_channels": widths, "norm_num_groups": 8, "attention_head_dim": 8}
    if getattr(parameters.get("addition_time_embed_dim"), "default", None) is not None:
        found["projection_class_embeddings_input_dim"] = 3 * WIDTH  # of three numbers each
    return found


_FREE = re.compile(r"layers|depth|heads$|blocks|^(text|caption|joint|pooled|context|cap_feat|cross)_.*dim|refiner")
"""Names of arguments that may be made smaller without regard to rotary embeddings."""


def _shrunk_by(
    parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], may: Callable[[str], bool]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        value = parameter.default
        if name in given and (name not in _MISSING or value in (None, inspect.Parameter.empty)):
            found[name] = given[name]
        elif value is inspect.Parameter.empty or value is None or isinstance(value, bool | str):
            continue
        else:
            found[name] = shrunk(name, value) if may(name) else value
    return found


_FIXED = {
    "attention_head_dim": WIDTH // HEADS,
    "norm_num_groups": 4,
    "groups": 4,
    "layers_per_block": 1,
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": SIDE,
    "sample_width": SIDE,
    "sample_height": SIDE,
    "sample_frames": 5,
    "max_text_seq_length": 6,
    "text_len": 6,
    "text_len_t5": 6,
    "video_length": 2,
}
_MISSING = {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "num_kv_heads": HEADS,
    "num_key_value_heads": HEADS,
    "cross_attention_dim": WIDTH,
    "caption_channels": WIDTH,
    "ffn_dim_multiplier": 1.0,
    "pooled_projection_dim": WIDTH,
}
"""Of arguments that stand for nothing by default."""


def ways(attempt: Attempt) -> Iterator[Prepared]:
    """Latents as images, as videos, as a sequence, as sound."""
    import diffusers

    kind = getattr(diffusers, attempt.job.model)
    reasons: list[str] = []
    for smaller in _fields(kind):
        fields = {**smaller, **DENOISERS.get(attempt.job.model, {})}
        try:
            _check_size(kind, fields)
            yield from _ways_of(kind, fields, reasons)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    if reasons:
        raise ValueError(" / ".join(dict.fromkeys(reasons)))


def _check_size(kind: type[nn.Module], fields: Mapping[str, Any]) -> None:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in kind(**fields).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters: too large for a sweep")


def _ways_of(kind: type[nn.Module], fields: Mapping[str, Any], reasons: list[str]) -> Iterator[Prepared]:
    module = quiet(kind(**fields))
    takes = dict(inspect.signature(kind.forward).parameters)
    if is_placed(kind):
        takes = {name: takes[name] for name in takes if name in inspect.signature(Placed.forward).parameters}
    for given, manner in _forms(takes, fields):
        draw = partial(inputs, given, fields, manner)
        model = Placed(module, manner.shape) if is_placed(kind) else module
        try:
            with torch.no_grad():
                batch = {name: value[None].repeat(2, *[1] * value.dim()) for name, value in draw(0).items()}
                output = _first(model(**batch))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        build = partial(_built, kind, fields, manner.shape)
        yield Prepared(build, Drawn(partial(_with_target, draw, output.shape[1:])), _loss_of)


def _forms(takes: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Manner]]:
    """Names of what it is given, and in which forms, the likeliest first."""
    plain, masked, framed = [], [], []
    for shape in _shapes(fields):
        lengths = (int(fields.get("num_embeddings") or _WORDS), _WORDS, *(shape if len(shape) == 2 else ()))
        for words, fraction in itertools.product(dict.fromkeys(lengths), (False, True)):
            manner = Manner(shape, words, fraction)
            plain.append(manner)
            masked += [replace(manner, mask=kind) for kind in (torch.bool, torch.long)]
            framed.append(replace(manner, frames=shape[0 if len(shape) == 4 else -1]))
    usual, more = _given(takes, fields)
    yield from itertools.product(usual, plain)
    if any("mask" in name for name in takes):
        yield from itertools.product(usual, masked)
    yield from itertools.product(usual[:1], framed)
    yield from itertools.product(more, plain)


def _shapes(fields: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Of latents: images, videos in three orders, sequences, sound, a vector."""
    names = ("audio_acoustic_hidden_dim", "io_channels", "in_channels", "latent_dim", "in_visual_dim", "in_dim")
    channels = width_of(fields, *names, default=4)
    square = (SIDE, SIDE)
    shapes = [
        (channels, *square),
        (channels, 2, *square),
        (2, channels, *square),
        (LENGTH, channels),
        (channels, 4 * LENGTH),
        (2, *square, channels),
        (2, *square, 2 * channels + 1),
        (2 * channels + 1, 2, *square),
        (8, channels, 1, 2, 2),
    ]
    if "embedding_dim" in fields:
        shapes.append((width_of(fields, "embedding_dim"),))
    return shapes


_WORDS = 6
"""Of a text beside the latents."""


def _given(
    takes: Mapping[str, inspect.Parameter], fields: Mapping[str, Any]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Names of what a denoiser is given: as usual, all that we know of, the least; then one more or less."""
    drawn = latents.known(fields, Manner((1,) * 4, 1), torch.Generator())
    known = [name for name in takes if name in drawn]
    least = {name for name in known if takes[name].default is inspect.Parameter.empty}
    usual = least | {
        name
        for name in known
        if name in USUAL or (name == "class_labels" and fields.get("num_embeds_ada_norm") is not None)
    }
    likely = [usual, set(known), least]
    near = [usual | {name} for name in known] + [{*known} - {name} for name in known if name not in least]
    near += [usual - {name} for name in known if name not in least]

    def ordered(several: list[set[str]]) -> list[tuple[str, ...]]:
        return [
            tuple(name for name in known if name in names)
            for names in dict.fromkeys(frozenset(each) for each in several)
        ]

    first = ordered(likely)
    return first, [names for names in ordered(near) if names not in first]


def _built(kind: type[nn.Module], fields: Mapping[str, Any], shape: tuple[int, ...]) -> nn.Module:
    module = kind(**fields)
    return quiet(Placed(module, shape) if is_placed(kind) else module)


def _first(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else None
    if found is None:
        found = getattr(output, "sample", None)
    if found is None and hasattr(output, "to_tuple"):
        found = output.to_tuple()[0]
    if isinstance(found, list):  # one for each example
        found = torch.stack(found)
    if not isinstance(found, Tensor):
        raise TypeError("no tensor to compare with the noise")
    return found


def _with_target(draw: Callable[[int], dict[str, Tensor]], shape: torch.Size, index: int) -> dict[str, Tensor]:
    return {**draw(index), "target": torch.randn(shape, generator=generator_of(index + 500))}


def _loss_of(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(_first(output), batch["target"])
