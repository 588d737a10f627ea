"""A checkpoint becomes a folder that transformers and torch's own checkpoints read, with equal outputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from tests.unit.checkpoint.saves import make_job, make_plan, save, save_parts
from tests.unit.engine.models import tiny_gpt2, tiny_llama
from varuna.checkpoint.collector import Collector
from varuna.checkpoint.io.export import export_checkpoint
from varuna.checkpoint.io.section_state import AVERAGE, SectionState
from varuna.checkpoint.manifest import Manifest, commit
from varuna.checkpoint.names import CONFIG, step_folder
from varuna.cli.main import app
from varuna.core.errors import CheckpointError
from varuna.job.model_config import Configured
from varuna.store.base import Store
from varuna.store.opening import open_store


def saved_model(store: Store, model: nn.Module, step: int = 7, average: torch.dtype | None = None) -> Manifest:
    """A checkpoint of a model in five sections, each parameter in two halves; ``average``: dtype of averages."""
    named = list(model.named_parameters())
    states = {}
    for section in range(5):
        share = named[section * len(named) // 5 : (section + 1) * len(named) // 5]
        tensors = {f"parameters/{name}": value.detach() for name, value in share}
        tensors |= {f"optimizer/{name}/exp_avg": torch.ones_like(value) for name, value in share}
        if average is not None:
            tensors |= {f"optimizer/{name}/{AVERAGE}": value.detach().to(average) for name, value in share}
        states[section] = SectionState(section, tensors)
    plan = make_plan(1, 2)
    collector = Collector(make_job(), run_id="run", writer="w")
    collector.begin(0, plan, first_step=0, rollback=True)
    found = [collector.add(shard) for shard in save_parts(store, step, plan, states=states)]
    [manifest] = [each for each in found if each is not None]
    return commit(store, manifest)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("file_bytes", [20_000, 5 * 10**9])
def test_from_pretrained_gives_the_same_outputs(store: Store, tmp_path: Path, build: type, file_bytes: int) -> None:
    from transformers import AutoModelForCausalLM

    configured = Configured(build)
    model = configured().eval()
    assert configured.json is not None
    store.put(CONFIG, configured.json.encode())
    done = export_checkpoint(store, saved_model(store, model), tmp_path / "out", file_bytes=file_bytes)
    assert (done.files > 1) == (file_bytes == 20_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (done.files > 1)
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded.eval()
    assert type(loaded) is type(model)
    tokens = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is asked to load in this process alone
def test_torchs_own_checkpoints_read_an_export(store: Store, tmp_path: Path) -> None:
    import torch.distributed.checkpoint

    dcp: Any = torch.distributed.checkpoint
    model = tiny_llama()
    export_checkpoint(store, saved_model(store, model), tmp_path / "out", file_bytes=20_000)
    read = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    assert all(torch.equal(read[name], value) for name, value in model.named_parameters())


def test_an_export_is_what_a_trainer_starts_from(store: Store, tmp_path: Path) -> None:
    from varuna.partition.initial.pretrained import fit, list_entries, read_tensors

    model = tiny_gpt2()
    export_checkpoint(store, saved_model(store, model), tmp_path / "out", file_bytes=20_000)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    aliases = {"lm_head.weight": "transformer.wte.weight"}
    found = fit(list_entries(tmp_path / "out"), shapes, aliases, "out")
    assert not found.unexpected
    tensors = read_tensors(found.entries)
    assert all(torch.equal(tensors[name], value) for name, value in model.named_parameters())


def test_the_index_counts_the_bytes_of_averages_in_their_own_dtype(store: Store, tmp_path: Path) -> None:
    manifest = saved_model(store, tiny_gpt2(), average=torch.float64)
    done = export_checkpoint(store, manifest, tmp_path / "out", file_bytes=40_000, average=True)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    written = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert len(written) == done.tensors
    assert {value.dtype for value in written.values()} == {torch.float64}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in written.values()) == done.size_bytes


def test_a_folder_that_is_used_is_left_alone(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not empty"):
        export_checkpoint(store, saved_model(store, nn.Linear(3, 3)), Path(store.url))


def test_a_model_without_a_configuration_has_none() -> None:
    configured = Configured(lambda: nn.Linear(2, 2))
    configured()
    assert configured.json is None


# -- the command -------------------------------------------------------------------------------------------


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, args)], env={"COLUMNS": "200"})
    if isinstance(result.exception, CheckpointError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def flip(store: Store, step: int) -> Path:
    shard = sorted((Path(store.url) / step_folder(step)).glob("section-002*"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return shard


def test_a_listing_says_what_is_there(store: Store) -> None:
    for step, shape in ((4, (1, 1)), (8, (2, 2))):
        save(store, step, *shape)
    save_parts(store, 12, make_plan())
    flip(store, 8).unlink()
    code, text = run("list", store.url)
    assert code == 0
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["12", "8", "4"]
    assert rows[0][-2:] == ["never", "finished"]
    assert rows[1][-1] == "damaged"
    assert "2x2" in rows[1]
    assert "is missing" in text
    assert rows[2][-1] == "complete"


def test_verifying_reads_everything_marks_damage_and_lifts_wrong_marks(store: Store) -> None:
    for step in (4, 8):
        save(store, step, 2, 2)
    assert run("verify", store.url)[0] == 0
    shard = flip(store, 8)
    code, text = run("verify", store.url)
    assert code == 1
    assert f"{shard} is damaged" in text
    mark = shard.parent / "damaged.txt"
    assert mark.exists()
    flip(store, 8)  # somebody put the right bytes back
    assert run("verify", store.url, "--step", 8)[0] == 0
    assert not mark.exists()


def test_exporting_takes_the_newest_intact_one_or_the_one_that_is_named(store: Store, tmp_path: Path) -> None:
    saved_model(store, nn.Linear(3, 3), step=4)
    saved_model(store, nn.Linear(5, 5), step=8)
    config = tmp_path / "config.json"
    config.write_text("{}")
    code, text = run("export", store.url, tmp_path / "new", "--config", config)
    assert (code, text.split(",")[0]) == (0, "step 8: 2 tensors")
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {}
    code, text = run("export", store.url, tmp_path / "old", "--step", 4)
    assert code == 0
    assert "no config.json" in text
    assert run("export", store.url, tmp_path / "x", "--step", 5) == (
        1,
        f"{store.url} has no checkpoint of step 5. It has those of 8, 4.",
    )


def test_a_directory_without_checkpoints_says_so(tmp_path: Path) -> None:
    for verb in ("list", "verify"):
        assert run(verb, tmp_path / "none") == (
            1,
            f"{tmp_path / 'none'} has no checkpoints. Name the folder or URL of the Trainer's checkpoints=.",
        )
