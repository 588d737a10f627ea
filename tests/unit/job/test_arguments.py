"""Faults that can be seen are refused before anything is built, in words that help."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import varuna
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from varuna import CheckpointError, Checkpoints, Collate, DataError, Loss, ModelError, Network, Trainer, UsageError
from varuna.job.arguments import WRITTEN_ELSEWHERE, choose_device
from varuna.job.spec import JobSpec


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher around us; the process is as it was afterwards."""
    for name in ("RANK", "WORLD_SIZE", "VARUNA_MANAGER", "VARUNA_STAGES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def trainer(**changes: Any) -> Trainer:
    given = {"model": SmallLanguage, "dataset": Tokens(), "optimizer": adamw, "global_batch": 4, "device": "cpu"}
    return Trainer(**{**given, **changes})


BAD = [
    ({"global_batch": 0}, r"global_batch=0.*at least 1"),
    ({"global_batch": -4}, r"global_batch=-4"),
    ({"micro_batch": 0}, r"micro_batch=0 must be between 1 and global_batch=4"),
    ({"micro_batch": 5}, r"micro_batch=5 must be between 1 and global_batch=4\. Lower it"),
    ({"clip_grad_norm": 0.0}, r"clip_grad_norm=0\.0 must be above 0; leave it out"),
    ({"clip_grad_norm": -1.0}, r"clip_grad_norm=-1\.0"),
    ({"clip_grad_norm": float("nan")}, r"clip_grad_norm=nan"),
    ({"cut": 0}, r"cut=0 must be at least 1"),
    ({"checkpoints": True}, r"checkpoints=True must be a folder, a URL or varuna\.Checkpoints\(path, .*is a bool"),
    ({"checkpoints": "ftp://a/b"}, r"'ftp://a/b' is not a place for checkpoints"),
    ({"memory": True}, r"memory=True must be a varuna\.Memory\(\.\.\.\), but is a bool"),
    ({"network": "nccl"}, r"network='nccl' must be a varuna\.Network\(\.\.\.\), but is a str"),
    ({"global_batch": "8"}, r"global_batch='8' must be a whole number, but is a str"),
    ({"global_batch": 8.0}, r"global_batch=8\.0 must be a whole number, but is a float"),
    ({"clip_grad_norm": "1"}, r"clip_grad_norm='1' must be a number, but is a str"),
    ({"device": "tpu"}, r"device='tpu' is not a torch device"),
    ({"model": {}}, r"model= must be a torch module, or a function that builds one, .*it is a dict\."),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, r"optimizer= is a SGD that is built already.*both as functions"),
    ({"loss": 0.5}, r"loss= must be one of torch's loss modules, or a function of the output .*it is a float\."),
    ({"lr_scheduler": "cosine"}, r"lr_scheduler= must be a torch scheduler, or a function .*a str"),
    (
        {"model": lambda seed: SmallLanguage()},
        r"model= is called with nothing, which it does not take \(missing a requ",
    ),
    ({"optimizer": lambda: None}, r"optimizer= is called with the list of \(name, parameter\), which it does not take"),
    ({"loss": lambda output: output}, r"loss= is called with the output, the batch, which .*too many positional"),
    ({"compile": "fast"}, r"compile='fast': torch has no such backend.*aot_eager"),
]


VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: Checkpoints("x", every=0), r"every=0 must be above 0: steps \(int\) or a timedelta"),
    (lambda: Checkpoints("x", every=timedelta(0)), r"every=0:00:00 must be above 0"),
    (lambda: Checkpoints("x", every=timedelta(seconds=-1)), r"must be above 0"),
    (lambda: Checkpoints("x", every="10"), r"every='10' must be a whole number"),  # type: ignore[arg-type]
    (lambda: Checkpoints("x", keep_last=0), r"keep_last=0 must be at least 1"),
    (lambda: Checkpoints("x", keep_every=0), r"keep_every=0 must be at least 1 step"),
    (lambda: Checkpoints("x", upload_bytes_per_s=0), r"upload_bytes_per_s=0 must be above 0"),
    (lambda: Loss(weight=0.5), r"weight= must be a function of the batch, .*it is a float"),  # type: ignore[arg-type]
    (lambda: Collate(lengths=[4, 4]), r"lengths=\[4, 4\] contains a length twice"),
    (lambda: Network(links="tcp"), r"links='tcp' must be one of host, nccl"),  # type: ignore[arg-type]
    (lambda: Network(reduction="fp16"), r"reduction='fp16' must be one of fp32, bf16"),  # type: ignore[arg-type]
    (lambda: Network(compress="zstd"), r"compress='zstd' must be True or False"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "text"), VALUES, ids=[text for _, text in VALUES])
def test_a_value_out_of_range_is_refused_where_it_is_made(make: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


ELSEWHERE = [
    ("checkpoint_dir", r'Pass checkpoints="\.\.\."\.'),
    ("checkpoint_every", r"Pass checkpoints=varuna\.Checkpoints\(path, every=\.\.\.\)\."),
    ("cut_at", r"Pass cut=\[\.\.\.\] with the names of modules"),
    ("batch_size", r"Pass global_batch=\.\.\., the examples of one optimizer step"),
    ("weight", r"Pass loss=varuna\.Loss\(\.\.\., weight=\.\.\.\)"),
    ("shard_optimizer", r"Pass memory=varuna\.Memory\(shard_optimizer=True\)"),
    ("reduction", r"Pass network=varuna\.Network\(reduction=\.\.\.\)"),
    ("clip_grad_nrom", r"Pass clip_grad_norm=\."),
    ("magic", r"Pass some of batch_ramp, loss, metrics, collate, .*, network\."),
]


@pytest.mark.parametrize(("name", "remedy"), ELSEWHERE, ids=[name for name, _ in ELSEWHERE])
def test_what_a_trainer_does_not_take_is_refused_with_how_it_is_written(name: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=rf"Trainer\(\) has no argument {name}=\. {remedy}"):
        trainer(**{name: 1})


def test_every_option_that_is_written_elsewhere_exists_there() -> None:
    """A remedy that itself is refused would lead nowhere."""
    for name, remedy in WRITTEN_ELSEWHERE.items():
        argument, _, value = remedy.partition("=")
        assert argument in signature(Trainer).parameters
        if value.startswith("varuna."):
            kind = getattr(varuna, value.removeprefix("varuna.").partition("(")[0])
            field = value.partition("(")[2].removeprefix("path, ").removeprefix("..., ").partition("=")[0]
            assert field in {each.name for each in fields(kind)}, name


def test_a_trainer_shows_what_it_does_and_nothing_else() -> None:
    shown = [name for name in dir(trainer()) if not name.startswith("_")]
    assert shown == ["checkpoint", "evaluate", "export", "generate", "log", "predict", "step_scheduler", "steps"]


@pytest.mark.parametrize(("changes", "text"), BAD, ids=[text for _, text in BAD])
def test_an_argument_out_of_range_is_refused_with_its_name_and_value(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        trainer(**changes)


def test_good_arguments_build_and_write_nothing(tmp_path: Path) -> None:
    def refuse() -> Any:
        pytest.fail("the model was built")

    folder = tmp_path / "checkpoints"
    trainer(model=refuse, micro_batch=4, clip_grad_norm=0.5, cut=1, checkpoints=Checkpoints(folder, every=1))
    assert not folder.exists()


def test_a_stream_is_refused_with_the_way_to_make_it_map_style() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(DataError, match=r"\(Stream\) cannot be indexed\. .*Wrap the stream map-style.*list\(stream\)"):
        trainer(dataset=Stream())


@pytest.mark.parametrize("dataset", [iter([1]), None, 7])
def test_what_cannot_be_indexed_is_no_dataset(dataset: object) -> None:
    with pytest.raises(DataError, match=rf"\({type(dataset).__name__}\) cannot be indexed"):
        trainer(dataset=dataset)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match=r"is empty: len\(dataset\) is 0"):
        trainer(dataset=[])


@pytest.mark.parametrize(
    ("n", "said"),
    [(-1, r"steps\(n\): n is .* must be >= 0 \(got -1\)"), (4.5, r"n=4\.5 must be a whole number"), ("4", r"n='4'")],
)
def test_a_length_of_the_run_that_is_none_is_refused(n: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        next(trainer().steps(n))


@pytest.mark.nightly
def test_a_model_that_fails_on_its_first_samples_is_no_broken_link() -> None:
    class Halved(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.line(x.half()).sum()  # capture lets this pass
            return out

    samples = [{"x": torch.ones(2)} for _ in range(4)]
    with pytest.raises(ModelError, match=rf"first samples at {__file__}:\d+: RuntimeError: mat1 and mat2 must have"):
        next(trainer(model=Halved, dataset=samples).steps(1))


def test_export_before_the_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run the loop first"):
        trainer().export(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_steps_can_be_taken_once_and_then_exported(tmp_path: Path) -> None:
    mine = trainer()
    assert [step.index for step in mine.steps(2)] == [0, 1]
    with pytest.raises(UsageError, match="can be called once"):
        next(mine.steps(3))
    mine.export(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").exists()


def test_a_folder_that_cannot_be_written_is_found_out_before_the_model_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    built: list[int] = []

    def build() -> Any:
        built.append(1)
        return SmallLanguage()

    with pytest.raises(CheckpointError, match="file"):
        next(trainer(model=build, checkpoints=tmp_path / "file" / "below").steps(1))
    assert built == []


def test_a_wrong_weight_ends_the_run_with_the_remedy_and_does_not_hang() -> None:
    with pytest.raises(ModelError, match=r"or leave weight= out"):
        next(trainer(loss=Loss(weight=lambda batch: (batch["labels"] % 7).sum())).steps(1))


def test_compiling_needs_a_compiler_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"compile=True needs a C\+\+ compiler \(no-such-compiler.*leave compile= out"):
        trainer(compile=True)


@pytest.mark.parametrize(("wished", "rank", "found"), [(None, "3", 1), ("cuda", "2", 0), ("cuda:1", "2", 1)])
def test_workers_of_a_machine_take_its_gpus_in_turn_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, wished: str | None, rank: str, found: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert choose_device(wished) == torch.device("cuda", found)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for wished in ("cuda", "cuda:0"):
        with pytest.raises(UsageError, match=rf"device='{wished}': torch sees 0 GPUs here. Leave device= out"):
            trainer(device=wished)


def test_nccl_is_refused_on_a_machine_with_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_MACHINE_PORT", "somewhere")
    with pytest.raises(UsageError, match=r'links="nccl" takes free ports .* start the agents without --port'):
        next(trainer(network=Network(links="nccl")).steps(1))


def test_nccl_between_cpus_is_refused_once_they_train_and_other_links_at_once() -> None:
    with pytest.raises(UsageError, match=r'links="nccl" connects GPUs, .* computes on cpu\. Leave links= out'):
        next(trainer(network=Network(links="nccl")).steps(1))
    spec = JobSpec(SmallLanguage, Tokens(), adamw, 4, device=torch.device("cpu"), network=Network(links="nccl"))
    assert spec.partitioned.sections  # as ``varuna inspect`` looks at it
