"""A run publishes the model of a plain loop at that step, as others load it, whatever happens meanwhile."""

import fcntl
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.unit.engine.models import SmallLanguage, Tokens, adamw, tiny_gpt2, tiny_llama
from tests.unit.engine.plain import shifted_targets, train_plainly
from tests.unit.engine.ranks import Setup
from tests.waiting import wait_for
from varuna.checkpoint.io.export import ModelForm
from varuna.checkpoint.published import PublishedFolder
from varuna.core.devices import WorkerGroups
from varuna.core.errors import CheckpointError, UsageError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.engine.base.transport import local_store
from varuna.engine.worker.publisher import Publisher
from varuna.job.options import Checkpoints, Publish
from varuna.membership.static import StaticMembership, World
from varuna.planner.choose import plan_run
from varuna.testing import fail_at, run
from varuna.testing.threads import run_all
from varuna.trainer import Trainer

Loop = Callable[[int], object]


def sgd(named: Any) -> torch.optim.Optimizer:
    """An optimizer that does not make noise of gradients that are 0 but for rounding, as Adam does."""
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def script(build: Callable[[], nn.Module], steps: int, publish: Publish, each: Loop = lambda step: None) -> None:
    trainer = Trainer(build, Tokens(), sgd, 8, micro_batch=2, publish=publish)
    for step in trainer.steps(steps):
        if step.is_main:
            each(step.index)


def plain(build: Callable[[], nn.Module], steps: int) -> dict[str, Tensor]:
    return train_plainly(Setup(build=build, optimizer=sgd, clip=None), steps, weigh=shifted_targets).parameters


def published(folder: Path) -> dict[int, Path]:
    return {int(each.name.removeprefix("step-")): each for each in folder.glob("step-*")}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_each_publication_of_two_stages_and_it_is_a_plain_loops(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"

    def until_published(step: int) -> None:
        wait_for(lambda: step % 2 == 0 or (out / f"step-{step + 1:08d}").exists())  # or the next may be skipped

    run(partial(script, tiny_gpt2, 5, Publish(out, every=2, keep=9), until_published), workers=2, stages=2)
    assert sorted(published(tmp_path / "out")) == [2, 4, 5]
    assert (tmp_path / "out" / "latest").resolve().name == "step-00000005"
    for steps, folder in published(tmp_path / "out").items():
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted({*index["weight_map"].values()})
        assert files == sorted(each.name for each in folder.glob("*.safetensors"))
        assert len(files) == 2
        model = AutoModelForCausalLM.from_pretrained(folder)
        check_equal(dict(model.named_parameters()), plain(tiny_gpt2, steps))


def test_a_morph_costs_no_publication_and_mixes_no_steps(tmp_path: Path) -> None:
    def wait(step: int) -> None:
        """No publication is under way when the next step begins: none is skipped, or lost with its writer."""
        wait_for(lambda: step + 1 in published(tmp_path))

    outcome = run(
        partial(script, SmallLanguage, 5, Publish(tmp_path, every=1, keep=9), wait),
        workers=4,
        stages=2,
        faults=[fail_at(rank=1, step=2, phase="B")],
    )
    assert len(outcome.plans) == 2
    found = published(tmp_path)
    assert sorted(found) == [1, 2, 3, 4, 5]
    for steps, folder in found.items():
        own: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            own |= load_file(file)
        check_equal(own, plain(SmallLanguage, steps))


def test_a_slow_disk_skips_publications_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held: list[IO[bytes]] = []

    def hold(step: int) -> None:
        """Whoever publishes waits from step 1 to step 5 for the folder's lock."""
        if step == 0:
            held.append((tmp_path / ".lock").open("rb"))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        if step == 4:
            held.pop().close()

    # the first publication takes the turn before the lock is held
    run(partial(script, SmallLanguage, 8, Publish(tmp_path, every=1, keep=9), hold), workers=1)
    assert "is skipped, because the previous one is still being written" in capsys.readouterr().err
    found = published(tmp_path)
    assert max(found) == 8
    assert len(found) < 8
    check_equal(load_file(found[8] / "model.safetensors"), plain(SmallLanguage, 8))


def test_without_a_shared_folder_nothing_appears_and_a_warning_says_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def two_stages(facts: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(facts, workers=workers, stages=2, micro_batch=micro_batch)

    job, store = Setup(), local_store()
    sessions = []
    for rank in range(2):
        folder = PublishedFolder(tmp_path / str(rank), keep=3)
        folder.prepare()
        publisher = Publisher(folder, 1, ModelForm(None, {}), parts_s=0.2)
        membership = StaticMembership(World(rank, 2, store, "127.0.0.1", 0), two_stages)
        sessions.append(job.session(membership, store, 2, rank=rank, publisher=publisher))
    steps: list[Any] = []
    run_all([partial(steps.extend, session.steps()) for session in sessions])
    assert len(steps) == 4
    assert not [*tmp_path.glob("*/step-*"), *tmp_path.glob("*/latest")]
    assert "must be a folder that the machines of all ranks share" in capsys.readouterr().err
    for session in sessions:
        session.leave()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_of_an_adapter_what_peft_reads_is_published(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="make install brings it", exc_type=ImportError)

    def adapted() -> nn.Module:
        settings = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        model: nn.Module = peft.get_peft_model(tiny_llama(), peft.LoraConfig(**settings))
        return model

    run(partial(script, adapted, 2, Publish(tmp_path, every=2)), workers=2, stages=2)
    (folder,) = published(tmp_path).values()
    assert sorted(each.name for each in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    model = peft.PeftModel.from_pretrained(tiny_llama(), str(folder))
    expected = plain(adapted, 2)
    found = {name: value.detach() for name, value in model.named_parameters() if "lora" in name}
    assert len(found) == 4
    check_equal(found, expected)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: Publish("s3://bucket/out", every=5),
            "appear in a folder, which all machines share, and not in a bucket",
        ),
        (lambda: Publish("out", every=0), "every=0 must be at least 1"),
        (lambda: Publish("out", every=1.5), "every=1.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: Publish("out", every=1, keep=0), "keep=0 must be at least 1"),
        (lambda: Trainer(SmallLanguage, Tokens(), adamw, 8, publish="out"), r"publish='out' must be a varuna.Publish"),  # type: ignore[arg-type]
        (
            lambda: Trainer(SmallLanguage, Tokens(), adamw, 8, publish=Publish("out", every=1), checkpoints="out"),
            "both name .*out. Give each its own folder",
        ),
    ],
)
def test_what_cannot_be_published_is_refused_in_words(made: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made()


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(CheckpointError, match="cannot publish in"):
        run(partial(script, SmallLanguage, 2, Publish(tmp_path / "out", every=1)), workers=1)


def test_checkpoints_and_publications_of_the_same_step_are_the_same_model(tmp_path: Path) -> None:
    def both() -> None:
        trainer = Trainer(
            SmallLanguage,
            Tokens(),
            adamw,
            8,
            micro_batch=2,
            checkpoints=Checkpoints(tmp_path / "saved", every=2),
            publish=Publish(tmp_path / "out", every=2),
        )
        for _ in trainer.steps(4):
            pass
        trainer.export(tmp_path / "exported")

    run(both, workers=2, stages=2)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    newest: dict[str, Tensor] = {}
    for file in (tmp_path / "out" / "latest").glob("*.safetensors"):
        newest |= load_file(file)
    assert newest.keys() == exported.keys()
    assert all(torch.equal(newest[name], exported[name]) for name in exported)
