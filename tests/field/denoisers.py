"""Jobs of diffusers: every denoiser, in a configuration that the signature of its constructor gives."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.field import libraries
from tests.field.jobs import MOST_PARAMETERS, Attempt, Job, Prepared, quiet
from tests.field.samples import Drawn, generator_of
from tests.field.shrink import HEADS, LENGTH, WIDTH, shrunk

_NAMES = re.compile(r"^(?!.*(ControlNet|Decoder|Autoencoder))\w*(UNet|Transformer|DiT|UVit)\w*$")
_SIDE = 8


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
    are the channels that come and go; then what has no default is given one; then all widths are of one size.
    """
    parameters = inspect.signature(kind.__init__).parameters
    yield _shrunk_by(parameters, {**_FIXED, "axes_dims_rope": (4, 6, 6)}, lambda name: True)
    heads = {name: value for name, value in _FIXED.items() if not name.endswith(("_dim", "channels"))}
    for given in (heads, {**heads, **_MISSING}):
        yield _shrunk_by(parameters, given, lambda name: bool(_FREE.search(name)))
    yield _shrunk_by(parameters, {**_FIXED, **_EVEN}, lambda name: True)


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
    "layers_per_block": 1,
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": _SIDE,
    "sample_width": _SIDE,
    "sample_height": _SIDE,
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
_EVEN = {"block_out_channels": (WIDTH, 2 * WIDTH), "norm_num_groups": 8, "attention_head_dim": 8}


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
    build = partial(_built, kind, fields)
    model = build()
    channels = int(fields.get("in_channels", 4))
    square = (_SIDE, _SIDE)
    for shape in (
        (channels, *square),
        (channels, 2, *square),
        (2, channels, *square),
        (LENGTH, channels),
        (channels, 4 * LENGTH),
    ):
        for fraction in (False, True):
            draw = partial(_inputs, inspect.signature(kind.forward).parameters, fields, shape, fraction)
            try:
                with torch.no_grad():
                    batch = {name: value[None].repeat(2, *[1] * value.dim()) for name, value in draw(0).items()}
                    output = _first(model(**batch))
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            yield Prepared(build, Drawn(partial(_with_target, draw, output.shape[1:])), _loss_of)


def _built(kind: type[nn.Module], fields: Mapping[str, Any]) -> nn.Module:
    module = kind(**fields)
    takes = inspect.signature(kind.forward).parameters
    return quiet(Placed(module) if {"img_ids", "txt_ids"} <= set(takes) else module)


class Placed(nn.Module):
    """A denoiser of sequences that wants the places of patches and words, the same for all examples."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.axes = len(getattr(model.config, "axes_dims_rope", (0, 0, 0)))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        pooled_projections: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Any:
        places = torch.arange(hidden_states.shape[1], device=hidden_states.device)[:, None].expand(-1, self.axes)
        words = torch.zeros(encoder_hidden_states.shape[1], self.axes, device=hidden_states.device)
        named = {"pooled_projections": pooled_projections, "guidance": guidance}
        return self.model(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            timestep=timestep,
            img_ids=places.float(),
            txt_ids=words,
            **{name: value for name, value in named.items() if value is not None},
        )


def _inputs(
    takes: Mapping[str, inspect.Parameter],
    fields: Mapping[str, Any],
    shape: tuple[int, ...],
    fraction: bool,
    index: int,
) -> dict[str, Tensor]:
    """One sample, by the names of what the denoiser takes."""
    generator = generator_of(index)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def width(*names: str) -> int:
        found = next((fields[name] for name in names if name in fields), WIDTH)
        return int(found[0] if isinstance(found, list | tuple) else found)

    text = width(
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
    )
    moment = torch.rand((), generator=generator) if fraction else torch.randint(0, 900, (), generator=generator)
    known: dict[str, Callable[[], Tensor]] = {
        "sample": lambda: drawn(*shape),
        "hidden_states": lambda: drawn(*shape),
        "timestep": lambda: moment,
        "encoder_hidden_states": lambda: drawn(6, text),
        "pooled_projections": lambda: drawn(width("pooled_projection_dim")),
        "class_labels": lambda: torch.randint(0, 10, (), generator=generator),
        "guidance": lambda: torch.rand((), generator=generator),
        "encoder_attention_mask": lambda: torch.ones(6),
        "proj_embedding": lambda: drawn(width("embedding_dim")),
        "added_time_ids": lambda: drawn(3),
        **dict.fromkeys(("r_timestep", "timestep_r", "timestep_ratio"), lambda: moment),
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), lambda: torch.full((2,), 64.0)),
        **dict.fromkeys(("image_latents", "context_latents", "audio_hidden_states"), lambda: drawn(*shape)),
        **dict.fromkeys(("text_bth", "cap_feats", "audio_encoder_hidden_states"), lambda: drawn(6, text)),
        **dict.fromkeys(("encoder_mask", "text_mask"), lambda: torch.ones(6)),
        "text_lens": lambda: torch.tensor(6),
        "fps": lambda: torch.tensor(8.0),
        "image_embeds": lambda: drawn(4, width("image_dim", "image_embed_dim", "image_proj_dim")),
        "global_hidden_states": lambda: drawn(width("global_states_input_dim", "global_dim", "global_cond_dim")),
        "clip_text_pooled": lambda: drawn(1, width("clip_text_pooled_in_channels")),
    }
    required = {
        "sample",
        "hidden_states",
        "timestep",
        "encoder_hidden_states",
        "pooled_projections",
        "proj_embedding",
        "added_time_ids",
        "encoder_attention_mask",
    }
    found = {}
    for name, parameter in takes.items():
        optional = parameter.default is not inspect.Parameter.empty
        if name in known and (
            name in required or not optional or (name == "class_labels" and "num_embeds_ada_norm" in fields)
        ):
            found[name] = known[name]()
    return found


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
