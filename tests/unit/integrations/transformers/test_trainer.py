"""Losses of Hugging Face's own Trainer, from the same arguments and samples, on one worker and on several."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from tests.depth import of_depth
from tests.unit.engine.models import SmallLanguage, Tokens, tiny_llama
from varuna.core.errors import UsageError
from varuna.integrations.transformers import Trainer
from varuna.testing import run

Made = Callable[..., transformers.Trainer]


class Small(SmallLanguage):
    """As transformers' models return what they compute; weights of modules of the user's are saved untied only."""

    config = SimpleNamespace()

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Counting(Small):
    """As language models of transformers do, which divide by the number of targets that the Trainer has counted."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        found = super().forward(input_ids)
        if labels is None:
            return found
        logits, targets = found["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, targets), **found}
        return {"loss": nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch, **found}


def model(kind: Callable[[], nn.Module] = Small) -> nn.Module:
    torch.manual_seed(7)
    return kind()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    told = {"logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "learning_rate": 1e-2}
    return TrainingArguments(output_dir=str(folder), **{**told, **options})


def made(
    kind: Made,
    folder: Path,
    *,
    more: Any = None,
    built: Callable[[], nn.Module] = Small,
    padded: bool = False,
    **options: Any,
) -> Any:
    data = {"train_dataset": Tokens(size=24, padded=padded), "eval_dataset": Tokens(size=6)}
    return kind(model(built), arguments(folder, **options), **data, **(more or {}))


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def right(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


class Weighted:
    """A ``compute_loss`` as scripts write it."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 0.5 * nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


class WeightedHere(Weighted, Trainer):
    pass


class WeightedThere(Weighted, transformers.Trainer):
    pass


def by_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total = nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    mean: Tensor = total / num_items_in_batch
    return mean


CASES: dict[str, dict[str, Any]] = {
    "linear": {"num_train_epochs": 2, "per_device_train_batch_size": 8},
    "accumulated": {
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "data_seed": 3,
    },
    "sequential": {"max_steps": 4, "train_sampling_strategy": "sequential", "optim": "adafactor"},
    "counted": {"max_steps": 4, "gradient_accumulation_steps": 2, "built": Counting, "padded": True},
    "smoothed": {"max_steps": 4, "label_smoothing_factor": 0.2},
    "own": {"max_steps": 3, "more": {"compute_loss_func": by_tokens}, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("case", of_depth(CASES, {"accumulated", "sequential", "own"}))
def test_losses_are_those_of_hugging_faces_trainer(case: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 4, **CASES[case]}
    expected = losses(made(transformers.Trainer, tmp_path, **options))
    assert losses(made(Trainer, tmp_path, **options)) == pytest.approx(expected, rel=2e-5)
    assert len(set(expected)) == len(expected)


def test_an_overridden_compute_loss_is_what_is_trained(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 8}
    expected = losses(made(WeightedThere, tmp_path, **options))
    assert losses(made(WeightedHere, tmp_path, **options)) == pytest.approx(expected, rel=2e-5)


def test_metrics_predictions_and_saved_weights_are_those_of_hugging_faces_trainer(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "more": {"compute_metrics": right},
    }
    here, there = made(Trainer, tmp_path / "a", **options), made(transformers.Trainer, tmp_path / "b", **options)
    here.train()
    there.train()
    logged = [[each["eval_loss"] for each in one.state.log_history if "eval_loss" in each] for one in (here, there)]
    assert logged[0] == pytest.approx(logged[1], rel=2e-5)
    assert here.evaluate()["eval_accuracy"] == there.evaluate()["eval_accuracy"]
    found, expected = here.predict(Tokens(size=5)), there.predict(Tokens(size=5))
    assert found.predictions == pytest.approx(expected.predictions, rel=1e-3, abs=1e-4)
    here.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, value in saved.items():
        torch.testing.assert_close(value, there.model.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_any_number_of_workers_trains_and_evaluates_alike(tmp_path: Path) -> None:
    def script() -> Any:
        options: dict[str, Any] = {
            "max_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 4,
        }
        trainer = made(Trainer, tmp_path / "many", **options, more={"compute_metrics": right})
        done = trainer.train()
        return done.training_loss, trainer.evaluate(), trainer.predict(Tokens(size=4)).predictions

    alone = made(Trainer, tmp_path / "one", max_steps=4, more={"compute_metrics": right})
    loss = alone.train().training_loss
    expected = alone.predict(Tokens(size=4)).predictions
    found = run(script, workers=4, stages=2)
    assert found.plans == ("2x2",)
    for trained, metrics, predictions in found.returned.values():
        assert trained == pytest.approx(loss, rel=1e-6)
        assert metrics["eval_accuracy"] == alone.evaluate()["eval_accuracy"]
        assert predictions == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert (tmp_path / "many" / "checkpoint-4" / "model.safetensors").exists()


@pytest.mark.nightly
def test_a_run_resumes_from_its_checkpoint_and_keeps_its_history(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    expected = losses(made(Trainer, tmp_path / "whole", **options))

    class Leave(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 4
            return control

    cut = losses(made(Trainer, tmp_path / "cut", **options, more={"callbacks": [Leave()]}))
    assert cut == expected[:4]
    again = made(Trainer, tmp_path / "cut", **options)
    again.train(resume_from_checkpoint=True)
    assert [each["loss"] for each in again.state.log_history if "loss" in each] == expected
    assert sorted(each.name for each in (tmp_path / "cut").iterdir()) == ["checkpoint-6", "varuna"]
    over = made(Trainer, tmp_path / "cut", **options)
    over.train()
    assert over.evaluate()["eval_loss"] == again.evaluate()["eval_loss"]


@pytest.mark.nightly
def test_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 30,
        "learning_rate": 3.0,  # gets worse
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "best",
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "load_best_model_at_end": True,
        "more": {"callbacks": [EarlyStoppingCallback(2)]},
    }
    trainer = made(Trainer, tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step < 30
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile_mode": "reduce-overhead"}, "torch_compile_mode"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=named):
        made(Trainer, tmp_path, **options)


def test_callbacks_inside_a_step_are_refused(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            pass

    with pytest.raises(UsageError, match="Looks has on_pre_optimizer_step"):
        made(Trainer, tmp_path, max_steps=1, more={"callbacks": [Looks()]}).train()


def test_a_model_of_the_library_trains_on_after_it_was_saved(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, built=tiny_llama, max_steps=2, save_strategy="steps", save_steps=1)
    assert len(losses(trainer)) == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


class Decaying(TrainerCallback):
    """Writes options before steps, as the library's loop lets it."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if state.global_step >= self.first:
            optimizer.param_groups[0].update(lr=0.05 / (1 + state.global_step))


@pytest.mark.parametrize("first", [1, 0])
def test_what_a_callback_writes_before_a_step_is_for_that_step(first: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "optim": "sgd", "more": {"callbacks": [Decaying(first)]}}
    if first == 0:
        with pytest.raises(UsageError, match=r"wrote 'lr' .* before the first step.*optimizers="):
            losses(made(Trainer, tmp_path, **options))
        return
    expected = losses(made(transformers.Trainer, tmp_path, **options))
    assert losses(made(Trainer, tmp_path, **options)) == pytest.approx(expected, rel=1e-3)


class Doing(TrainerCallback):
    """Does something at an event, when there is a number of steps."""

    def __init__(self, event: str, does: Callable[..., Any], *, at: int = 1) -> None:
        def act(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == at:
                does(args, state, control)

        setattr(self, event, act)


CHANGED: dict[str, tuple[Callable[..., Any], str]] = {
    "clipping": (lambda args, *_: setattr(args, "max_grad_norm", 0.1), r"args\.max_grad_norm from 1\.0 to 0\.1"),
    "accumulation": (lambda args, *_: setattr(args, "gradient_accumulation_steps", 2), "args.gradient_accumulation"),
    "the number of steps": (lambda _, state, *__: setattr(state, "max_steps", 9), r"state\.max_steps from 4 to 9"),
    "the step": (lambda _, state, *__: setattr(state, "global_step", 3), r"state\.global_step from 1 to 3"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_the_librarys_loop_reads_in_each_step_may_not_change(case: str, tmp_path: Path) -> None:
    change, words = CHANGED[case]
    with pytest.raises(UsageError, match=f"changed {words}.*decided before step 0"):
        losses(made(Trainer, tmp_path, max_steps=4, more={"callbacks": [Doing("on_step_end", change)]}))


def test_a_label_smoother_may_not_change(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, max_steps=4, label_smoothing_factor=0.1)
    trainer.add_callback(Doing("on_step_end", lambda *_: setattr(trainer.label_smoother, "epsilon", 0.5)))
    with pytest.raises(UsageError, match=r"changed .*epsilon, which loss= reads: it was 0\.1"):
        losses(trainer)


@pytest.mark.parametrize(
    ("event", "at"), [("on_step_begin", 2), ("on_step_end", 2), ("on_log", 2), ("on_epoch_begin", 3)]
)
def test_a_run_ends_after_the_step_in_which_a_callback_stops_it(event: str, at: int, tmp_path: Path) -> None:
    stops = Doing(event, lambda _, __, control: setattr(control, "should_training_stop", True), at=at)
    options: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 8, "more": {"callbacks": [stops]}}
    expected = losses(made(transformers.Trainer, tmp_path, **options))
    assert losses(made(Trainer, tmp_path, **options)) == pytest.approx(expected, rel=1e-3)


class Epochs(Tokens):
    """Other samples in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__((index + self.epoch) % len(self))


def test_a_dataset_is_told_the_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 0.1}
    expected, found = (
        losses(kind(model(), arguments(tmp_path, **options), train_dataset=Epochs(size=8)))
        for kind in (transformers.Trainer, Trainer)
    )
    assert found == pytest.approx(expected, rel=1e-3)
