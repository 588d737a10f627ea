"""Rules find the roles of fields by their names."""

from typing import Any

import pytest
from transformers import BertConfig

from tests.field.huggingface import _default, config_of
from tests.field.shrink import DEPTH, HEADS, WIDTH, changed, shrunk


@pytest.mark.parametrize(
    ("name", "value", "tiny"),
    [
        ("hidden_size", 4096, WIDTH),
        ("num_hidden_layers", 32, DEPTH),
        ("encoder_attention_heads", 16, HEADS),
        ("num_key_value_heads", 8, 1),
        ("hidden_dropout_prob", 0.1, 0.0),
        ("hidden_sizes", [64, 128, 256, 512], [16, 32, 64, 128]),
        ("hidden_sizes", [144, 192, 240], [16, 20, 24]),
        ("depths", (3, 4, 18, 5), (1, 1, 1, 1)),
        ("num_channels", 3, 3),
        ("layer_norm_eps", 1e-5, 1e-5),
        ("hidden_act", "gelu", "gelu"),
        ("use_cache", True, True),
        ("context_length", 16384, 128),
    ],
)
def test_fields_shrink_by_their_role(name: str, value: Any, tiny: Any) -> None:
    assert shrunk(name, value) == tiny
    assert type(shrunk(name, value)) is type(tiny)


def test_fields_may_be_kept_and_only_those_that_change_are_named() -> None:
    kept: Any = config_of("bert", "BertForMaskedLM", "tokens", ("hidden_size",))
    assert (kept.hidden_size, kept.num_hidden_layers) == (BertConfig().hidden_size, DEPTH)
    assert {"hidden_size", "num_attention_heads"} <= set(changed(BertConfig()))
    assert not {"num_hidden_layers", "vocab_size", "layer_norm_eps"} & set(changed(BertConfig()))


def test_a_configuration_shrinks_with_its_parts() -> None:
    config: Any = config_of("clip", "CLIPForImageClassification", "image")
    assert type(config).__name__ == "CLIPConfig"
    for part in (config.text_config, config.vision_config):
        assert (part.hidden_size, part.num_hidden_layers, part.num_attention_heads) == (WIDTH, DEPTH, HEADS)
    assert config.text_config.eos_token_id < config.text_config.vocab_size < 100


def test_a_head_takes_what_the_last_stages_of_its_backbone_give() -> None:
    config: Any = config_of("rt_detr", "RTDetrForObjectDetection", "boxes")
    assert config.encoder_in_channels == config.backbone_config.hidden_sizes[-3:]


def test_a_backbone_gives_as_many_stages_as_before_and_widths_follow_what_feeds_them() -> None:
    detector: Any = config_of("d_fine", "DFineForObjectDetection", "boxes")
    assert detector.backbone_config.out_features == ["stage2", "stage3", "stage4"]
    assert detector.decoder_in_channels == (detector.encoder_hidden_dim,) * 3
    layered: Any = config_of("tipsv2_dpt", "Tipsv2DptForSemanticSegmentation", "pixels").backbone_config
    assert layered.out_indices == [1, 2, 3, 4]
    stem: Any = config_of("textnet", "TextNetForImageClassification", "image")
    assert stem.stem_out_channels == stem.hidden_sizes[0]


def test_a_part_keeps_what_the_whole_has_given_it() -> None:
    default: Any = _default("tipsv2_dpt", "Tipsv2DptForSemanticSegmentation").backbone_config
    config: Any = config_of("tipsv2_dpt", "Tipsv2DptForSemanticSegmentation", "pixels")
    assert config.backbone_config.reshape_hidden_states is default.reshape_hidden_states is False
    assert type(default)().reshape_hidden_states is True
