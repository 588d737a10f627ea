"""Jobs of diffusers: every denoiser, in a configuration that the signature of its constructor gives."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.field import latents, libraries
from tests.field.jobs import MOST_PARAMETERS, Attempt, Job, Prepared, quiet
from tests.field.latents import SIDE, USUAL, inputs, width_of
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
    return {
        name: type(parameter.default)(shares[len(parameter.default)])
        for name, parameter in parameters.items()
        if _AXES.search(name) and isinstance(parameter.default, list | tuple) and len(parameter.default) in shares
    }


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
"""What may be made smaller without regard to rotary embeddings."""


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
    for fields in _fields(kind):
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
    model = _built(kind, fields, ())
    takes = inspect.signature(kind.forward).parameters
    channels = width_of(fields, "in_channels", "latent_dim", "in_visual_dim", "in_dim", default=4)
    square = (SIDE, SIDE)
    shapes = [
        (channels, *square),
        (channels, 2, *square),
        (2, channels, *square),
        (LENGTH, channels),
        (channels, 4 * LENGTH),
    ]
    if "embedding_dim" in fields:
        shapes.append((width_of(fields, "embedding_dim"),))
    for shape in shapes:
        lengths = dict.fromkeys(
            (int(fields.get("num_embeddings") or _WORDS), max(shape) if len(shape) == 2 else _WORDS)
        )
        for words, fraction, given in itertools.product(lengths, (False, True), _given(takes, fields)):
            draw = partial(inputs, given, fields, shape, words, fraction)
            build = partial(_built, kind, fields, shape)
            try:
                with torch.no_grad():
                    batch = {name: value[None].repeat(2, *[1] * value.dim()) for name, value in draw(0).items()}
                    output = _first(build()(**batch) if isinstance(model, Placed) else model(**batch))
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            yield Prepared(build, Drawn(partial(_with_target, draw, output.shape[1:])), _loss_of)


_WORDS = 6
"""Of a text beside the latents."""


def _given(takes: Mapping[str, inspect.Parameter], fields: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Names of what a denoiser is given: as usual, all that we know of, as little as it takes."""
    known = [name for name in takes if name in latents.known(fields, (1,), 1, torch.zeros(()), torch.Generator())]
    least = {name for name in known if takes[name].default is inspect.Parameter.empty}
    usual = least | {
        name
        for name in known
        if name in USUAL or (name == "class_labels" and fields.get("num_embeds_ada_norm") is not None)
    }
    for names in dict.fromkeys(frozenset(each) for each in (usual, known, least)):
        yield tuple(name for name in known if name in names)


def _built(kind: type[nn.Module], fields: Mapping[str, Any], shape: tuple[int, ...]) -> nn.Module:
    module = kind(**fields)
    takes = inspect.signature(kind.forward).parameters
    return quiet(Placed(module, shape) if _PLACES & set(takes) else module)


_PLACES = {"img_ids", "txt_ids", "img_shapes", "num_frames", "height", "width", "audio_num_frames"}
"""Arguments that say how patches lie, the same for all examples."""


class Placed(nn.Module):
    """A denoiser of sequences that wants to be told how patches and words lie, the same for all examples."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self.axes = len(getattr(model.config, "axes_dims_rope", (0, 0, 0)))
        across = math.isqrt(shape[0]) if len(shape) == 2 else SIDE
        frames = 1 if len(shape) < 4 else 2
        told = {"num_frames": frames, "height": across, "width": across, "audio_num_frames": LENGTH}
        takes = inspect.signature(model.forward).parameters
        self.told: dict[str, Any] = {name: value for name, value in told.items() if name in takes}
        if "img_shapes" in takes:
            self.told["img_shapes"] = [[(frames, across, across)]]
        self.ids = {"img_ids", "txt_ids"} <= set(takes)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        pooled_projections: Tensor | None = None,
        guidance: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        audio_hidden_states: Tensor | None = None,
        audio_encoder_hidden_states: Tensor | None = None,
    ) -> Any:
        told: dict[str, Any] = dict(self.told)
        if self.ids:
            places = torch.arange(hidden_states.shape[1], device=hidden_states.device)[:, None].expand(-1, self.axes)
            told["img_ids"] = places.float()
            told["txt_ids"] = torch.zeros(encoder_hidden_states.shape[1], self.axes, device=hidden_states.device)
        named = {
            "pooled_projections": pooled_projections,
            "guidance": guidance,
            "encoder_attention_mask": encoder_attention_mask,
            "encoder_hidden_states_mask": encoder_hidden_states_mask,
            "audio_hidden_states": audio_hidden_states,
            "audio_encoder_hidden_states": audio_encoder_hidden_states,
        }
        return self.model(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            timestep=timestep,
            **told,
            **{name: value for name, value in named.items() if value is not None},
        )


def _first(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
    if found is None and hasattr(output, "to_tuple"):
        found = output.to_tuple()[0]
    if not isinstance(found, Tensor):
        raise TypeError("no tensor to compare with the noise")
    return found


def _with_target(draw: Callable[[int], dict[str, Tensor]], shape: torch.Size, index: int) -> dict[str, Tensor]:
    return {**draw(index), "target": torch.randn(shape, generator=generator_of(index + 500))}


def _loss_of(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(_first(output), batch["target"])
