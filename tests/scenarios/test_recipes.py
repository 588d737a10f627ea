"""The recipes: what their pages' commands print, and the losses of plain loops that share no code with them."""

import importlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from benchmarks.recipes import COMMANDS, FOLDER, LOSS, PAGE, ROOT
from tests.depth import of_depth
from tests.unit.engine.ranks import single_threaded
from varuna.core.errors import CheckpointError, UsageError
from varuna.data import sample_index
from varuna.data.randomness import reseeded
from varuna.job.script_runner import take_job
from varuna.testing import run

RECIPES = {found["kind"]: (found["command"], float(found["last"])) for found in COMMANDS.finditer(PAGE.read_text())}
Plain = Callable[[Sequence[str], int], Any]
"""Of a recipe's options and a number of steps, the losses."""
STEPS = 4
FAST = {"sft", "dpo"}
NEEDS = {"denoiser": "diffusers", "vision_language": "PIL"}
LAST = 1e-3
"""Relative distance that a last loss may have from the page's: sums in another order grow over the steps."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # PEFT asks transformers by its old name
    pytest.mark.filterwarnings("ignore:The tensor attributes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe's tiny model and data in the current folder; its name."""
    kind: str = request.param
    for needed in ("peft", NEEDS.get(kind, "transformers")):
        pytest.importorskip(needed, reason=f"optional: pip install {needed}")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    folder = tmp_path / "tiny"
    folder.mkdir()
    importlib.import_module("tiny").KINDS[kind](folder)
    return kind


def recipes(fast: set[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("made", of_depth(RECIPES, fast), indirect=True)


def options(kind: str) -> list[str]:
    return shlex.split(RECIPES[kind][0])[5:]


def agree(kind: str, told: Sequence[str], plain_losses: Plain, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that the recipe has a plain loop's losses, in one process and in two stages."""
    told = [*told, "--steps", str(STEPS)]
    plain = plain_losses(told, STEPS)
    module = importlib.import_module(kind)
    module.main(told)
    alone = [float(loss) for loss in LOSS.findall(capfd.readouterr().out)]
    assert alone == pytest.approx(plain, rel=2e-5)

    flag = "--adapter" if "--adapter" in Path(module.__file__ or "").read_text() else "--export"
    again = [each.replace("tiny/", f"{Path('tiny').absolute()}/") for each in told]  # workers have folders of their own
    spread = run(lambda: module.main([*again, flag, "other"]), workers=2, stages=2, bound_s=300)
    assert spread.plans == ("2x1",)
    assert spread.losses == pytest.approx(plain, rel=2e-5)


@recipes(FAST)
def test_a_recipe_has_the_losses_of_a_plain_loop_in_one_process_and_in_two_stages(
    made: str, capfd: pytest.CaptureFixture[str]
) -> None:
    agree(made, options(made), PLAIN[made], capfd)


@pytest.mark.parametrize("made", ["sft"], indirect=True)
def test_qlora_has_the_losses_of_a_plain_loop(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes", reason="optional: pip install bitsandbytes")
    agree(made, [*options(made), "--bits", "4"], of_qlora, capfd)


@pytest.mark.parametrize("made", ["sft"], indirect=True)
def test_what_a_recipe_cannot_train_on_is_refused_before_it_has_a_model(made: str) -> None:
    told, main = options(made), importlib.import_module(made).main
    with pytest.raises(UsageError, match=r"all labels .* are masked"):
        main([*told, "--length", "8"])
    Path("tiny/model/model.safetensors").rename("tiny/model/model.bin")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        main(told)


@recipes({"sft"})
def test_the_commands_of_the_page_print_its_last_loss(made: str, tmp_path: Path) -> None:
    command, last = RECIPES[made]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    told = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(told, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(LOSS.findall(done.stdout)[-1]) == pytest.approx(last, rel=LAST)


def test_every_recipe_is_on_the_page_and_has_at_most_60_lines() -> None:
    scripts = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert set(RECIPES) == set(scripts) - {"tiny"} == set(PLAIN)
    for name, text in scripts.items():
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= 60 or name == "tiny", f"{name} has {len(lines)} lines"


# -- plain loops ---------------------------------------------------------------------------------------------

LossOf = Callable[[nn.Module, Sequence[Any]], Tensor]


def plain_loop(told: Sequence[str], kind: str, steps: int, loss_of: LossOf, model: nn.Module | None = None) -> Any:
    """Train an ordinary loop with the recipe's samples, optimizer and first values.

    Args:
        told: the recipe's options.
        kind: its name.
        steps: how many.
        loss_of: of the model and the samples of a step.
        model: in place of the recipe's, whose trained parameters it has.
    """
    spec = take_job(FOLDER / f"{kind}.py", told).spec
    torch.manual_seed(spec.seed)
    own = spec.model()
    if spec.weights is not None:
        copied(own, Path(spec.weights.path))
    if model is not None:
        values = dict(own.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(values[name].data)
    trained = (own if model is None else model).train()
    optimizer: Any = spec.optimizer([each for each in trained.named_parameters() if each[1].requires_grad])
    optimizer = optimizer[0] if isinstance(optimizer, list) else optimizer
    schedule = None if spec.lr_scheduler is None else spec.lr_scheduler(optimizer)
    losses = []
    for step in range(steps):
        positions = range(step * spec.global_batch, (step + 1) * spec.global_batch)
        loss = loss_of(trained, [sample(spec, position) for position in positions])
        optimizer.zero_grad()
        loss.backward()
        if spec.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained.parameters(), spec.clip_grad_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses


def sample(spec: Any, position: int) -> Any:
    epoch, _ = divmod(position, len(spec.dataset))
    index = sample_index(position, size=len(spec.dataset), seed=spec.seed)
    with reseeded(spec.seed, "sample", epoch, index):
        return spec.dataset[index]


def copied(model: nn.Module, folder: Path) -> None:
    """Give the model what the files have, as transformers reads it."""
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    stored = load_file(file)
    for name, parameter in model.named_parameters():
        plain = name.replace(".base_layer.", ".").removeprefix("base_model.model.")
        if plain in stored:
            parameter.data.copy_(stored[plain])


def rows_of(samples: Sequence[Any]) -> dict[str, Tensor]:
    return {name: torch.stack([torch.as_tensor(each[name]) for each in samples]) for name in samples[0]}


def of_chats_apart(model: nn.Module, samples: Sequence[Any]) -> Tensor:
    """Of each chat by itself, without rows, masks or positions: no chat can see another."""
    total, targets = torch.zeros(()), 0
    for each in samples:
        starts = [*(each["position_ids"] == 0).nonzero().flatten().tolist(), len(each["input_ids"])]
        for begin, end in pairwise(starts):
            if (each["labels"][begin:end] != -100).any():
                ids, labels = each["input_ids"][None, begin:end], each["labels"][begin + 1 : end]
                odds = log_softmax(model(input_ids=ids).logits[0, :-1], -1)
                counts = labels != -100
                total = total - odds[counts].gather(1, labels[counts][:, None]).sum()
                targets += int(counts.sum())
    return total / targets


def of_pairs_in_two_passes(model: Any, samples: Sequence[Any]) -> Tensor:
    """DPO with the model's adapters, and in a second pass with its base, of one answer at a time."""

    def odds(row: int) -> Tensor:
        found = []
        for each in samples:
            size = int(each["attention_mask"][row].sum())
            ids, labels = each["input_ids"][row, :size], each["labels"][row, 1:size]
            counts = labels != -100
            taken = log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
            found.append(taken[counts].gather(1, labels[counts][:, None]).sum())
        return torch.stack(found)

    better, worse = odds(0), odds(1)
    with torch.no_grad(), model.disable_adapter():
        base_better, base_worse = odds(0), odds(1)
    return -logsigmoid(0.1 * (better - worse - base_better + base_worse)).mean()


def of_dpo(told: Sequence[str], steps: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("tiny/model")
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    return plain_loop(told, "dpo", steps, of_pairs_in_two_passes, get_peft_model(base, lora))


def of_qlora(told: Sequence[str], steps: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained("tiny/model", quantization_config=nf4, dtype=torch.float32)
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    return plain_loop(told, "sft", steps, of_chats_apart, get_peft_model(base, lora))


def of_micro_batches(size: int) -> LossOf:
    """Of the model's own loss in micro-batches, weighted by their targets."""

    def loss_of(model: nn.Module, samples: Sequence[Any]) -> Tensor:
        parts = [rows_of(samples[at : at + size]) for at in range(0, len(samples), size)]
        counts = [int((each["labels"][:, 1:] != -100).sum()) for each in parts]
        losses = [model(**each).loss * count for each, count in zip(parts, counts, strict=True)]
        return torch.stack(losses).sum() / sum(counts)

    return loss_of


def of_one_batch(model: nn.Module, samples: Sequence[Any]) -> Tensor:
    loss: Tensor = model(**rows_of(samples)).loss
    return loss


def of_pictures_apart(model: Any, samples: Sequence[Any]) -> Tensor:
    losses = []
    for each in samples:
        given = {name: value[None] for name, value in each.items() if name not in ("target", "img_ids", "txt_ids")}
        found = model(**given, img_ids=each["img_ids"], txt_ids=each["txt_ids"]).sample[0]
        losses.append((found - each["target"]).pow(2).mean())
    return torch.stack(losses).mean()


def _plain(kind: str, loss_of: LossOf) -> Plain:
    return lambda told, steps: plain_loop(told, kind, steps, loss_of)


PLAIN: dict[str, Plain] = {
    "sft": _plain("sft", of_chats_apart),
    "full": _plain("full", of_chats_apart),
    "dpo": of_dpo,
    "moe": _plain("moe", of_micro_batches(2)),
    "classifier": _plain("classifier", of_one_batch),
    "whisper": _plain("whisper", of_one_batch),
    "vision_language": _plain("vision_language", of_one_batch),
    "denoiser": _plain("denoiser", of_pictures_apart),
}
