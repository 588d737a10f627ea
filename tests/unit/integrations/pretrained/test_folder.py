"""Folders and files that cannot be trained on: refused in words, before anything is built."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq, BertConfig

from tests.unit.engine.models import tiny_llama
from varuna.core.errors import CheckpointError, UsageError
from varuna.integrations.pretrained import config_of, records, tokenizer_of, weights_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model: Any = tiny_llama()
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_its_configuration_and_its_weights(folder: Path) -> None:
    config = config_of(folder, AutoModelForCausalLM)
    assert config.model_type == "llama"
    assert weights_of(folder, lambda: AutoModelForCausalLM.from_config(config)).path == str(folder)


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"found no safetensors file there\. Save one with model\.save_pretrained"
    ):
        config_of(folder, AutoModelForCausalLM)
    with pytest.raises(CheckpointError, match="found nothing there"):
        config_of(folder / "gone", AutoModelForCausalLM)


def test_a_folder_without_a_configuration_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        config_of(folder, AutoModelForCausalLM)


@pytest.mark.parametrize("text", ['{"model_type": "of_tomorrow"}', "{}", "no JSON"])
def test_a_configuration_of_no_known_class_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(
        UsageError, match=r"config\.json is of no model that transformers .* knows: .*Install a version"
    ):
        config_of(folder, AutoModelForCausalLM)


def test_a_configuration_of_another_kind_of_model_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="is of a LlamaConfig, of which AutoModelForSpeechSeq2Seq builds no model"):
        config_of(folder, AutoModelForSpeechSeq2Seq)


def test_a_configuration_of_another_denoiser_is_refused(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="`make install` or `pip install diffusers` brings it")
    small = {"sample_size": 4, "num_layers": 1, "attention_head_dim": 4, "num_attention_heads": 1}
    diffusers.SD3Transformer2DModel(**small, pos_embed_max_size=4).save_pretrained(tmp_path)
    assert config_of(tmp_path, diffusers.SD3Transformer2DModel)["num_layers"] == 1
    with pytest.raises(UsageError, match="is of a SD3Transformer2DModel, of which FluxTransformer2DModel builds no"):
        config_of(tmp_path, diffusers.FluxTransformer2DModel)


def test_files_that_lack_a_part_of_the_base_are_refused(folder: Path) -> None:
    larger = config_of(folder, AutoModelForCausalLM)
    larger.num_hidden_layers += 1
    with pytest.raises(CheckpointError, match="do not fit the model"):
        weights_of(folder, lambda: AutoModelForCausalLM.from_config(larger))


def test_the_base_is_built_without_values(folder: Path) -> None:
    devices = set[str]()

    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(config_of(folder, AutoModelForCausalLM))
        devices.update(each.device.type for each in model.parameters())
        return model

    weights_of(folder, build)
    assert devices == {"meta"}
    assert torch.empty(1).device.type == "cpu"


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    BertConfig().save_pretrained(folder)
    with pytest.raises(UsageError, match=r"has no tokenizer that can be read: .*tokenizer\.save_pretrained\(folder\)"):
        tokenizer_of(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty. Give a file with a JSON object per line"),
        ('{"a": 1}\nno JSON', "line 2 is not JSON"),
        ('{"a": 1}\n\n{"b": 1}', "line 3 lacks a; it has b"),
        ("[1]", "line 1 lacks a; it has list"),
    ],
)
def test_a_file_of_another_form_is_refused_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(UsageError) as refused:
        records(tmp_path / "x.jsonl", "a")
    assert words in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.jsonl is not a file"):
        records(tmp_path / "x.jsonl", "a")


def test_lines_without_anything_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": 1}) + "\n\n" + json.dumps({"a": 2}) + "\n")
    assert records(tmp_path / "x.jsonl", "a") == [{"a": 1}, {"a": 2}]
