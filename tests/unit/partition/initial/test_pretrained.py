"""Destinations of the entries of a safetensors checkpoint, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.unit.engine.models import Tokens, tiny_gpt2, tiny_llama
from varuna.core.errors import CheckpointError, UsageError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.capture.construction import construct
from varuna.partition.initial.constructor import Initial
from varuna.partition.initial.initial_values import Init, InitialParameters, begin_with, check_beginning
from varuna.partition.initial.pretrained import fingerprint, list_entries


def pretrained(build: object, path: Path, *, init: Init = "constructor", may_miss: bool = False) -> InitialParameters:
    recipe = Recipe(build)  # type: ignore[arg-type]
    shapes = construct(recipe.build, 0).shapes
    return begin_with(recipe, shapes, seed=0, init=init, weights=path, digest="test-weights", may_miss=may_miss)


def of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(value.equal(expected[name]) for name, value in found.items())


@pytest.mark.parametrize("shards", ["5GB", "30KB"])
def test_a_saved_model_is_read_whole_or_sharded(tmp_path: Path, shards: str) -> None:
    model = tiny_gpt2()
    model.save_pretrained(tmp_path, max_shard_size=shards)  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "30KB")
    expected = of(model)
    assert same(pretrained(tiny_gpt2, tmp_path).parameters(expected), expected)


def test_an_index_of_another_librarys_name_is_read(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.save_pretrained(tmp_path, max_shard_size="30KB")  # type: ignore[operator]
    entries = list_entries(tmp_path)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "diffusion_pytorch_model.safetensors.index.json")
    assert list_entries(tmp_path) == entries


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.save_pretrained(tmp_path, max_shard_size="30KB")  # type: ignore[operator]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = ["transformer.h.0.ln_1.weight"]
    beginning = pretrained(tiny_gpt2, tmp_path)
    for file in set(index.values()) - {index[name] for name in wanted}:
        (tmp_path / file).unlink()
    assert same(beginning.parameters(wanted), {name: of(model)[name] for name in wanted})


def test_the_prefix_of_a_base_model_may_be_missing_or_added(tmp_path: Path) -> None:
    model = tiny_gpt2()
    expected = of(model)
    base = {name.removeprefix("transformer."): value.clone() for name, value in expected.items()}
    added = {f"module.{name}": value.clone() for name, value in expected.items()}
    for number, tensors in enumerate((base, added)):
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors, file)
        assert same(pretrained(tiny_gpt2, file).parameters(expected), expected)


def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    expected = of(tiny_gpt2())
    renamed = {name.replace("transformer.wte", "lm_head"): value.clone() for name, value in expected.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert same(pretrained(tiny_gpt2, tmp_path).parameters(expected), expected)


def test_reduced_precision_becomes_fp32(tmp_path: Path) -> None:
    expected = of(tiny_llama())
    save_file({name: value.bfloat16() for name, value in expected.items()}, tmp_path / "model.safetensors")
    found = pretrained(tiny_llama, tmp_path).parameters(expected)
    assert same(found, {name: value.bfloat16().float() for name, value in expected.items()})


def test_all_that_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors = {name: value.clone() for name, value in of(tiny_gpt2()).items()}
    del tensors["transformer.h.1.ln_1.bias"]
    tensors["transformer.ln_f.weight"] = torch.ones(7)
    tensors["extra.bias"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        pretrained(tiny_gpt2, tmp_path)
    for part in (
        "h.1.ln_1.bias missing",
        "ln_f.weight is [7] in the file but [32] in the model",
        "extra.bias unexpected",
    ):
        assert part in str(error.value)
    with pytest.raises(CheckpointError, match="do not fit"):
        pretrained(tiny_llama, tmp_path)


def test_unexpected_tensors_are_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {name: value.clone() for name, value in of(tiny_gpt2()).items()}
    save_file({**tensors, "score.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    checked: list[Initial | None] = []
    beginning = pretrained(tiny_gpt2, tmp_path)
    beginning.parameters([])
    assert "score.weight" not in capsys.readouterr().err
    beginning.parameters([], checked.append)
    assert "no place for score.weight" in capsys.readouterr().err
    assert len(checked) == 1


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores = nn.Linear(3, 4), nn.Linear(4, 5)


class NewHead(nn.Module):
    """A body of its own; scores of another shape, and a head that the body's file has never heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores, self.head = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)


@pytest.mark.parametrize("init", ["constructor", "per_parameter"])
def test_a_new_head_is_initialised_as_in_plain_pytorch_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], init: Init
) -> None:
    torch.manual_seed(77)
    file = tmp_path / "model.safetensors"
    body = {name: value.detach().clone() for name, value in Body().state_dict().items()}
    save_file({**body, "old.bias": torch.ones(1)}, file)
    beginning = pretrained(NewHead, file, init=init, may_miss=True)
    assert beginning.name.endswith(f"+{init}")
    torch.manual_seed(0)
    model = NewHead()
    model.load_state_dict({name: value for name, value in body.items() if "body" in name}, strict=False)
    found = beginning.parameters(of(model), lambda _: None)
    if init == "constructor":
        assert same(found, of(model))
    assert found["body.weight"].equal(body["body.weight"])
    assert beginning.parameters(["head.weight"])["head.weight"].equal(found["head.weight"])
    said = " ".join(capsys.readouterr().err.split())
    for part in (
        f"2 of 6 parameters are read from {file}; 4 are initialised",
        "head.weight, head.bias missing",
        "scores.weight is [5, 4] in the file but [2, 4] in the model",
        "no place for old.bias",
    ):
        assert part in said


def test_weights_of_another_model_are_not_taken_for_a_new_head(tmp_path: Path) -> None:
    save_file({"other.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"do not fit the model: .*body\.weight.* missing"):
        pretrained(NewHead, tmp_path, may_miss=True)


def test_whoever_may_want_a_new_head_is_told_how(tmp_path: Path) -> None:
    save_file(Body().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r'varuna\.Weights\(.*, missing="initialise"\)'):
        pretrained(NewHead, tmp_path)


class Buffered(nn.Module):
    saved: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)


def test_saved_buffers_come_from_the_file_and_others_from_the_constructor(tmp_path: Path) -> None:
    model = Buffered()
    tensors = {**of(model), "saved": torch.tensor([3.0, 4.0]), "hidden": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    buffers = pretrained(Buffered, tmp_path).buffers(["saved", "hidden"])
    assert same(buffers, {"saved": torch.tensor([3.0, 4.0]), "hidden": torch.arange(3.0)})


def test_the_rotary_table_of_llama_survives(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert not any("inv_freq" in name for name in load_file(tmp_path / "model.safetensors"))
    name = "model.rotary_emb.inv_freq"
    for init in ("constructor", "per_parameter"):
        recipe = Recipe(tiny_llama)
        shapes = construct(recipe.build, 0).shapes
        drawn = begin_with(recipe, shapes, seed=0, init=init, weights=None, digest="test-rotary")
        assert drawn.buffers([name])[name].equal(model.get_buffer(name))
    assert pretrained(tiny_llama, tmp_path).buffers([name])[name].equal(model.get_buffer(name))


def test_the_whole_model_for_tools_has_the_files_values(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert same(of(pretrained(tiny_gpt2, tmp_path).whole_model().module), of(model))


def test_a_large_model_is_not_built_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.partition.initial.initial_values.CHECKED_BELOW_BYTES", 1000)
    recipe = Recipe(tiny_gpt2)
    shapes = construct(recipe.build, 0).shapes
    beginning = begin_with(recipe, shapes, seed=0, init="per_parameter", weights=None, digest="test-large")

    seen: list[Initial | None] = []
    beginning.parameters(["transformer.ln_f.weight"], seen.append)
    assert seen == [None]


def test_files_that_cannot_be_used_are_refused_with_the_next_move(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save_pretrained"):
        list_entries(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="2 safetensors files without an index"):
        list_entries(tmp_path)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read"):
        list_entries(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index"):
        list_entries(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read"):
        list_entries(tmp_path)


def test_other_files_have_another_fingerprint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "two.safetensors")
    one, two = (fingerprint(list_entries(tmp_path / f"{name}.safetensors")) for name in ("one", "two"))
    assert one != two


def test_arguments_are_checked_before_anything_is_built(tmp_path: Path) -> None:
    check_beginning("constructor", str(tmp_path))
    with pytest.raises(UsageError, match=r'init=\'zeros\' must be "constructor" or "per_parameter"'):
        check_beginning("zeros", None)
    with pytest.raises(UsageError, match="does not exist"):
        check_beginning("constructor", tmp_path / "absent")
    with pytest.raises(UsageError, match="not a int"):
        check_beginning("constructor", 3)
    with pytest.raises(UsageError, match="leave out either init='per_parameter' or weights="):
        check_beginning("per_parameter", tmp_path)


def test_the_samples_do_not_matter_to_capture_of_a_truncated_init() -> None:
    class Truncated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 64)
            nn.init.trunc_normal_(self.embed.weight, std=0.02)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.embed(input_ids).flatten(0, 1), labels.flatten())

    from varuna.partition.model import partition

    source = SampleSource(Tokens(), seed=0)
    assert partition(Recipe(Truncated), source.micro_batch([0, 1]).tensors).sections
