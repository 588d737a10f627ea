"""Tiny configurations, derived from a library's own configuration classes by the names and values of their fields.

A field is shrunk by the first rule whose pattern its name matches; sub-configurations likewise. Fields that no rule
knows keep their default. Rules speak of roles (a width, a depth, a count of heads), not of families: those that need a
word of their own have it in ``exceptions.py``.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Container, Mapping
from functools import cache
from pathlib import Path
from typing import Any

WIDTH, HEADS, DEPTH, VOCABULARY, LENGTH, IMAGE, PATCH = 32, 2, 4, 96, 16, 32, 8
"""Hidden size, attention heads, layers, tokens, tokens of a sample, pixels of a side, pixels of a patch's side."""

Rule = Callable[[Any], Any]


def _at_most(bound: int) -> Rule:
    return lambda value: min(value, bound) if value > 0 else value


def _widths(value: Any) -> Any:
    """Lists of widths keep their shape: 64, 128, 256, 512 become 16, 32, 64, 128; all can be shared among heads."""
    if isinstance(value, int):
        return min(value, WIDTH) if value > 0 else value
    factor = max(1, min(value) // (WIDTH // 2)) if value and min(value) > 0 else 1
    return type(value)(
        min(each // factor if each % factor == 0 else each // factor // 4 * 4, 4 * WIDTH) for each in value
    )


def _each(rule: Rule) -> Rule:
    def applied(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(applied(each) for each in value)
        return rule(value)

    return applied


def _constant(value: Any) -> Rule:
    return lambda _: value


def _first_layers(value: Any) -> Any:
    """Layers whose outputs are taken: of four, the first so many."""
    return type(value)(range(len(value))) if isinstance(value, list | tuple) and len(value) <= DEPTH else value


RULES: tuple[tuple[str, Rule], ...] = (
    # what is drawn at random
    (r"(^|_)(drop|dropout|pdrop|layerdrop|noise)($|_)", _each(lambda value: type(value)(0))),
    (r"mask_(time|feature)_prob$|jitter", lambda value: type(value)(0)),
    (r"^apply_spec_augment$", _constant(False)),
    (r"^conv_dim$", lambda value: value),
    (r"^mamba_(n|num)_heads$", _constant(4)),
    (r"^mamba_(d_head|head_?dim)$", lambda value: WIDTH // HEADS),
    (r"^upsample_groups$", _at_most(WIDTH)),
    # lists that are parts of one chain
    (r"^stage_\w+_channels$|^stem_channels$", _each(lambda value: value // 16 if value % 16 == 0 else value)),
    # what is long
    (r"vocab(ulary)?_size$|^num_(tokens|embeddings)$|n_vocab$|vocab_size_per", _at_most(VOCABULARY)),
    (
        r"max_(.*_)?position(_embedding)?s?$|^n_positions$|^n_ctx$|max_seq(uence)?_len|max_seq_length",
        _at_most(4 * LENGTH),
    ),
    (r"^context_length$", _at_most(8 * LENGTH)),
    (r"^context_size$", _at_most(LENGTH)),
    (
        r"sliding_window|attention_window|local_attention|attention_chunk_size|block_size|attn_chunk_length",
        _each(_at_most(LENGTH // 2)),
    ),
    (r"^window_size$", _each(_at_most(2))),
    (r"^num_windows$", _at_most(4)),
    (r"out_indices$|feature_layers?$", _first_layers),
    # heads, before widths: their names hold "hidden" or "dim" at times
    (r"key_value_heads$|kv_heads$|num_kv|n_head_kv|num_key_value_groups", _each(_at_most(1))),
    (r"heads?$", _each(_at_most(HEADS))),
    (r"(qk_)?rope_head_dim$", _at_most(WIDTH // HEADS // 2)),
    (r"head_(dim|size)$|^d_kv$|kv_channels$|head_channels$|(qk|v)_(nope_)?head_dim$", _at_most(WIDTH // HEADS)),
    (r"lora_rank$", _at_most(8)),
    # experts
    (r"experts_per_tok(en)?$|^top_?k$|moe_top_?k$|experts_top_?k|^moe_k$", _at_most(2)),
    (r"^(n|topk)_groups?$", _constant(1)),
    (r"n(um)?_(.*_)?experts$|expert_num$", _each(_at_most(4))),
    (r"first_k_dense_replace$", _at_most(1)),
    # depth
    (r"conv_layers$|feat_extract_layers$", lambda value: value),
    (r"^depths$|layers_per_(stage|block)|^blocks_per", _each(_at_most(1))),
    (r"num_hidden_groups$|num_stages$|num_encoder_blocks$", lambda value: value),
    (r"(^|_)n(um)?_(.*_)?(layers?|blocks)$|_layers$|^depth$|^n_layers?$", _each(_at_most(DEPTH))),
    # widths
    (
        r"intermediate_size|ffn_?(dim|size|hidden)|feed_?forward(_dim|_size|_proj_dim)?$|^d_(ff|inner|ffn)$|inner_dim|mlp_(dim|hidden)|^n_inner$|feedforward|ffn_hidden",
        lambda value: _widths(value) if isinstance(value, list | tuple) else min(value, 2 * WIDTH),
    ),
    (
        r"hidden_sizes?$|^d_model$|^n_embd$|^dim$|embed(ding)?_(dim|size)s?$|hidden_dim$|_dim$|_dims$|^width$|(^|_)channels$|_size_per_layer|conv_dim|^(encoder|decoder)_hidden|_width$|_rank$|num_filters|out_features_dim|d_state|state_size$|entity_emb_size|_hidden_size$|embedding_size$|hidden_size|^d_latents$",
        _widths,
    ),
    (r"image_size$|^img_size$|input_size$|crop_size$", _each(_at_most(IMAGE))),
    (r"patch_size$|^patch_sizes$", _each(_at_most(PATCH))),
    (r"num_frames$|frames_per_clip$", _at_most(4)),
    (r"num_mel_bins$|num_mels$|input_feat_per_channel$", _at_most(16)),
    (r"feature_size$", _at_most(WIDTH)),
    (r"num_queries$|num_(object_)?queries|^num_latents$", _at_most(8)),
)

_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in RULES)
_KEEP = re.compile(r"num_channels$|(?<!stage_)in_channels$|in_chans$|^num_labels$|^id2label|^label2id")
_SPECIAL = re.compile(r"_token_(id|index)$|_id$|^(boi|eoi|bos|eos|pad|image|video|audio)_.*id$")


def shrunk(name: str, value: Any) -> Any:
    """A field's value in a tiny configuration."""
    if isinstance(value, bool) or _KEEP.search(name):
        return False if name == "apply_spec_augment" else value
    numbers = isinstance(value, int | float) or (isinstance(value, list | tuple) and _is_numbers(value))
    if not numbers:
        return value
    for pattern, rule in _COMPILED:
        if pattern.search(name):
            return rule(value)
    return value


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_numbers(each) for each in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def fields_of(config: Any) -> dict[str, Any]:
    """Return the values that a configuration's constructor takes and does not work out by itself, by field."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        try:
            value = getattr(config, field.name, None)
        except Exception:  # one that differs from layer to layer
            value = field.default
        if value is None and field.name in _NEEDED:
            found[field.name] = _NEEDED[field.name]
            continue
        works_out = field.default is None and field.name not in getattr(type(config), "sub_configs", {})
        if not (works_out or field.name in _NOT_GIVEN or field.name.startswith("_")):
            found[field.name] = value
    return found


_NEEDED = {"head_dim": WIDTH // HEADS, "num_experts_per_tok": 2, "num_key_value_heads": HEADS, "n_routed_experts": 4}
"""Fields that a few classes leave empty although nothing can be built without them."""

_NOT_GIVEN = {
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "hybrid_override_pattern",
    "chunk_size_feed_forward",
}
"""Lists with an entry per layer that the class makes anew; and what only saves memory."""


_FEW_WORDS = 8
"""A vocabulary below is one of special tokens."""


def special_tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Small, distinct numbers for the special tokens that a configuration names, those of text first."""
    if isinstance(words := fields.get("vocab_size"), int) and words < _FEW_WORDS:
        return {}
    names = [
        name
        for name, value in fields.items()
        if _SPECIAL.search(name) and isinstance(value, int | list) and not isinstance(value, bool)
    ]
    found: dict[str, Any] = {}
    taken = 3
    for name in sorted(names):
        fixed = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 2}.get(name)
        if isinstance(fields[name], int) and fields[name] < 0:
            continue
        if fixed is None:
            fixed, taken = taken, taken + 1
        found[name] = [fixed] if isinstance(fields[name], list) else fixed
    return found


def tiny(config: Any, exceptions: Mapping[str, Any], kept: Container[str] = (), *, is_part: bool = False) -> Any:
    """A tiny configuration of the same class.

    Args:
        config: as its class makes it by default.
        exceptions: fields that rules get wrong in this family; those of its parts in mappings under their names.
        kept: fields that are left as they are, in all parts.
        is_part: of another, which may have given it other values than its class does.
    """
    fields = fields_of(config)
    usual = {field.name: field.default for field in dataclasses.fields(config)} if is_part else fields
    depth = next((value for name, value in fields.items() if _DEEP.search(name) and isinstance(value, int)), 0)
    given: dict[str, Any] = {}
    for name, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            is_timms = value.model_type == "timm_backbone"
            given[name] = _residual(value) if is_timms else tiny(value, exceptions.get(name, {}), kept, is_part=True)
            continue
        if name in kept:
            given |= {name: value} if _differs(value, usual[name]) else {}
            continue
        new = value if value is None or name == "rope_parameters" else shrunk(name, value)
        if isinstance(new, list) and depth > DEPTH and len(new) == depth:
            new = new[:DEPTH]
        if new != value or name in _NEEDED or _differs(value, usual[name]):
            given[name] = new
    heads, shared = (fields.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if shared is not None and heads == shared and "num_attention_heads" not in kept:
        given["num_key_value_heads"] = HEADS
    if (rope := _rope(config)) is not None:
        given["rope_parameters"] = rope
    if widths := _widths_of(given.get("backbone_config")):
        several = {name: len(value) for name, value in fields.items() if name in _OF_BACKBONE and value}
        given.update({name: widths[-number:] for name, number in several.items()})
    given.update(_followers(fields, given))
    given.update(special_tokens(fields))
    given.update({name: value for name, value in exceptions.items() if not isinstance(value, Mapping)})
    made = type(config)(**given)
    if hasattr(config, "stage_names") and "out_indices" not in given:
        _take_stages(config, made)
    return made


def _differs(value: Any, usual: Any) -> bool:
    """Whether a part's value is not that of its class."""
    return (
        isinstance(value, bool | int | float | str) and isinstance(usual, bool | int | float | str) and value != usual
    )


def _followers(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of one width of the model again and again, as it comes out of a part that has become narrower."""
    found: dict[str, Any] = {}
    chain = fields.get("hidden_sizes")
    for name, value in fields.items():
        if _STEM.search(name) and isinstance(chain, list | tuple) and value == chain[0] and "hidden_sizes" in given:
            found[name] = given["hidden_sizes"][0]  # what the first stage takes
        if name in given or not (isinstance(value, list | tuple) and len(value) > 1 and len(set(map(str, value))) == 1):
            continue
        width = next((given[other] for other in _WIDTHS if fields.get(other) == value[0] and other in given), None)
        if width is not None:
            found[name] = type(value)([width] * len(value))
    return found


_STEM = re.compile(r"^stem_(out_)?(channels|dim)")
_WIDTHS = ("encoder_hidden_dim", "d_model", "hidden_size", "hidden_dim")


def _take_stages(config: Any, made: Any) -> None:
    """A backbone gives the outputs of as many stages as before: the same, or the last where there are fewer."""
    taken = list(config.out_indices)
    if len(made.stage_names) != len(config.stage_names):
        taken = list(range(len(made.stage_names)))[-len(taken) :]
    made.set_output_features_output_indices(out_features=None, out_indices=taken)


def _widths_of(backbone: Any) -> list[int]:
    """Channels of a backbone's stages; none where it has no such list."""
    found = getattr(backbone, "stage_out_channels", None) or getattr(backbone, "hidden_sizes", None)
    return list(found) if isinstance(found, list | tuple) else []


_OF_BACKBONE = {"encoder_in_channels"}
"""Lists of what the last stages of a backbone give."""


def _residual(backbone: Any) -> Any:
    """In place of a model of timm, which has no configuration: a small one that gives as many stages' features."""
    import transformers

    made: Any = transformers.ResNetConfig
    stages = [f"stage{number}" for number in range(1, 5)]
    taken = len(getattr(backbone, "out_indices", None) or (0,))
    return made(
        embedding_size=WIDTH // 2,
        hidden_sizes=[WIDTH // 2, WIDTH, WIDTH, 2 * WIDTH],
        depths=[1] * 4,
        layer_type="basic",
        out_features=stages[-taken:],
    )


def changed(config: Any) -> tuple[str, ...]:
    """Fields that the rules make smaller, here or in a part, but for those that only say how much there is."""
    found: dict[str, None] = {}
    for name, value in fields_of(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found |= dict.fromkeys(changed(value))
        elif not _AMOUNTS.search(name) and value is not None and shrunk(name, value) != value:
            found[name] = None
    return tuple(found)


_AMOUNTS = re.compile(r"vocab|drop|noise|_prob$|hidden_layers$|^(n_|num_)?layers?$|^depth$")
_DEEP = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|depth)$")


def _rope(config: Any) -> dict[str, Any] | None:
    """Sections of rotary embeddings for several axes add up to half of a head; None where there are none."""
    value = getattr(config, "rope_parameters", None)
    if not (
        (isinstance(value, dict) and "mrope_section" in value) or _has_sections(Path(inspect.getfile(type(config))))
    ):
        return None
    half = WIDTH // HEADS // 2
    given = value or {"rope_type": "default", "rope_theta": 10000.0}
    return {**given, "mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}


@cache
def _has_sections(path: Path) -> bool:
    """Whether the model of a configuration in this file takes sections that the configuration may leave out."""
    models = path.with_name(path.name.replace("configuration_", "modeling_"))
    return models.exists() and '.get("mrope_section"' in models.read_text()
