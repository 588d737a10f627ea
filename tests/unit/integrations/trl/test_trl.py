"""Losses of TRL's own trainers, from the same configurations and samples, on one worker and on several."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from tests.depth import nightly_rows, of_depth
from varuna.core.errors import UsageError
from varuna.testing import run

trl: Any = pytest.importorskip("trl", reason="optional: pip install trl", exc_type=ImportError)
datasets: Any = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft", exc_type=ImportError)
ours: Any = importlib.import_module("varuna.integrations.trl")
tiny: Any = importlib.import_module("examples.recipes.tiny")

pytestmark = [pytest.mark.filterwarnings("ignore")]

Change = Callable[[Any], object]
WORDS = [tiny.say(at, 2 + at % 3) for at in range(24)]
TEXTS = {"text": [f"say {each}" for each in WORDS]}
ANSWERS = {"prompt": [f"say {each} " for each in WORDS], "completion": WORDS}
CHATS = {
    "prompt": [[{"role": "user", "content": f"say {each}"}] for each in WORDS],
    "completion": [[{"role": "assistant", "content": each}] for each in WORDS],
}
PAIRS = {"prompt": ANSWERS["prompt"], "chosen": WORDS, "rejected": [tiny.say(at + 500, 2) for at in range(24)]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.sft(folder)
    return str(folder / "model")


def lora() -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights="gaussian")


def made(library: Any, name: str, model: str, folder: Path, rows: dict[str, Any], **options: Any) -> Any:
    """A trainer of TRL's, or ours of that name."""
    adapters = {"peft_config": lora()} if options.pop("adapters", False) else {}
    more = options.pop("more", {})
    told = {"logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    told |= {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "report_to": "none"}
    config = getattr(trl, f"{name}Config")(output_dir=str(folder), **{**told, **options})
    data = {"train_dataset": datasets.Dataset.from_dict(rows)}
    return getattr(library, f"{name}Trainer")(model, args=config, **data, **adapters, **more)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def of_the_first_half(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A script's own loss: tokens in the second half of the vocabulary do not count."""
    kept = labels.masked_fill(labels >= 128, -100)
    return cross_entropy(output.logits[:, :-1].mT, kept[:, 1:], reduction="sum") / num_items_in_batch


WHOLE_STEPS = {"dataloader_drop_last": True}
"""The last step of an epoch, which Varuna fills, is left out."""
SFT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts": (TEXTS, {"padding_free": True, "max_length": None}),
    "answers": (ANSWERS, {"adapters": True, "gradient_accumulation_steps": 2}),
    "chats": (CHATS, {"max_length": 24}),
    "packed": (TEXTS, {**WHOLE_STEPS, "packing": True, "max_length": 48}),
    "wrapped": (TEXTS, {**WHOLE_STEPS, "packing": True, "packing_strategy": "wrapped", "max_length": 32}),
    "dft": (ANSWERS, {"loss_type": "dft"}),
    "whole": (ANSWERS, {"completion_only_loss": False, "pad_to_multiple_of": 8}),
    "smoothed": (TEXTS, {"label_smoothing_factor": 0.1}),
    "own": (ANSWERS, {"more": {"compute_loss_func": of_the_first_half}}),
}
DPO: dict[str, dict[str, Any]] = {
    "adapters": {"adapters": True, "gradient_accumulation_steps": 2},
    "precomputed": {"precompute_ref_log_probs": True},
    "adapters-precomputed": {"adapters": True, "precompute_ref_log_probs": True, "max_length": 24},
    "hinge": {"adapters": True, "pad_to_multiple_of": 8, "loss_type": ["hinge"]},
    "ipo": {"adapters": True, "loss_type": ["ipo"]},
    "robust": {"adapters": True, "loss_type": ["robust"], "label_smoothing": 0.1},
    "apo": {"adapters": True, "loss_type": ["apo_zero", "apo_down"], "loss_weights": [0.5, 2.0]},
}


@pytest.mark.parametrize("case", of_depth(SFT, {"answers", "packed"}))
def test_losses_of_supervised_fine_tuning_are_trls(case: str, model: str, tmp_path: Path) -> None:
    rows, options = SFT[case]
    expected = losses(made(trl, "SFT", model, tmp_path / "a", rows, **options))
    assert losses(made(ours, "SFT", model, tmp_path / "b", rows, **options)) == pytest.approx(expected, rel=2e-5)
    assert len(set(expected)) == len(expected) == 4


@pytest.mark.parametrize("case", of_depth(DPO, {"adapters", "precomputed"}))
def test_losses_of_preferences_are_trls(case: str, model: str, tmp_path: Path) -> None:
    expected = losses(made(trl, "DPO", model, tmp_path / "a", PAIRS, **DPO[case]))
    assert losses(made(ours, "DPO", model, tmp_path / "b", PAIRS, **DPO[case])) == pytest.approx(expected, rel=2e-5)
    assert len(set(expected)) == len(expected) == 4


@pytest.mark.parametrize(("name", "rows"), [("SFT", ANSWERS), ("DPO", PAIRS)])
def test_any_number_of_workers_trains_alike(name: str, rows: dict[str, Any], model: str, tmp_path: Path) -> None:
    expected = losses(made(trl, name, model, tmp_path / "one", rows, adapters=True))

    def script() -> list[float]:
        return losses(made(ours, name, model, tmp_path / "many", rows, adapters=True))

    found = run(script, workers=2, stages=2)
    assert found.plans == ("2x1",)
    for each in found.returned.values():
        assert each == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("name", "rows", "metric"),
    [("DPO", PAIRS, "eval_rewards/margins"), *nightly_rows(("SFT", ANSWERS, "eval_mean_token_accuracy"))],
)
def test_an_evaluation_is_trls_and_so_are_the_saved_adapters(
    name: str, rows: dict[str, Any], metric: str, model: str, tmp_path: Path
) -> None:
    more = {"eval_dataset": datasets.Dataset.from_dict({column: value[:6] for column, value in rows.items()})}
    options: dict[str, Any] = {"adapters": True, "more": more, "eval_strategy": "steps", "eval_steps": 2}
    here = made(ours, name, model, tmp_path / "a", rows, **options)
    there = made(trl, name, model, tmp_path / "b", rows, **options)
    assert losses(here) == pytest.approx(losses(there), rel=2e-5)
    for key in ("eval_loss", metric):
        logged = [[each[key] for each in one.state.log_history if key in each] for one in (here, there)]
        assert len(logged[0]) == 2
        assert logged[0] == pytest.approx(logged[1], rel=1e-3)
    for one, folder in ((here, "a"), (there, "b")):
        one.save_model(str(tmp_path / folder / "saved"))
    saved, expected = (load_file(tmp_path / each / "saved" / "adapter_model.safetensors") for each in "ab")
    assert saved.keys() == expected.keys()
    assert all(value.allclose(expected[key], rtol=1e-3, atol=1e-5) for key, value in saved.items())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("DPO", {"ld_alpha": 0.5, "f_divergence_type": "js_divergence"}, ["f_divergence_type='js_div", "ld_alpha=0.5"]),
        ("DPO", {"loss_type": ["bco_pair"]}, ["loss_type=['bco_pair'] (known: 'apo_down', "]),
        ("DPO", {"use_weighting": True}, ["use_weighting=True"]),
        ("SFT", {"fsdp": "full_shard"}, ["fsdp="]),
        ("SFT", {"activation_offloading": True}, ["activation_offloading=True"]),
    ],
)
def test_fields_that_cannot_hold_are_refused_by_name(
    name: str, options: dict[str, Any], words: list[str], model: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        made(ours, name, model, tmp_path, PAIRS if name == "DPO" else TEXTS, **options).train()
    assert all(each in str(refused.value) for each in words), refused.value


def test_a_reference_of_its_own_is_refused_with_both_ways_out(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"precompute_ref_log_probs=True in the DPOConfig, or train adapters"):
        made(ours, "DPO", model, tmp_path, PAIRS)


def test_adapters_that_are_their_own_reference_are_refused(model: str, tmp_path: Path) -> None:
    trained = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model), lora())
    with pytest.raises(UsageError, match=r"Merge them into the model before \(merge_and_unload"):
        made(ours, "DPO", trained, tmp_path, PAIRS)


def test_what_cannot_be_trained_on_is_refused_before_anything_is_captured(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="all labels are masked"):
        made(ours, "SFT", model, tmp_path, {"prompt": ["a" * 40], "completion": ["b"]}, max_length=20)
    with pytest.raises(UsageError, match=r"the chat template fails on a sample: there is no role judge"):
        made(ours, "SFT", model, tmp_path, {"messages": [[{"role": "judge", "content": "b"}]]})
    wrong = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["query"])}
    with pytest.raises(UsageError, match="the adapters match no module of the model"):
        made(ours, "SFT", model, tmp_path, TEXTS, more=wrong)
    texts = tmp_path / "texts"
    texts.mkdir()
    tiny.classifier(texts)
    with pytest.raises(UsageError, match="of which AutoModelForCausalLM builds no model"):
        made(ours, "SFT", str(texts / "model"), tmp_path, TEXTS)


def test_a_balancing_loss_of_routers_is_refused(tmp_path: Path) -> None:
    tiny.moe(tmp_path)
    with pytest.raises(UsageError, match=r"Set router_aux_loss_coef=0\.0"):
        made(ours, "SFT", str(tmp_path / "model"), tmp_path, TEXTS)


def test_an_overridden_loss_is_refused(model: str, tmp_path: Path) -> None:
    class Own(ours.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            return super().compute_loss(*args, **named)

    config = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(UsageError, match=r"Own overrides compute_loss\(\) of TRL's SFTTrainer"):
        Own(model, args=config, train_dataset=datasets.Dataset.from_dict(TEXTS))


def test_plain_arguments_of_transformers_are_taken_as_trl_takes_them(model: str, tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=2, logging_steps=1, save_strategy="no", report_to="none"
    )
    rows = datasets.Dataset.from_dict(TEXTS)
    here, there = (each.SFTTrainer(model, args=args, train_dataset=rows) for each in (ours, trl))
    assert losses(here) == pytest.approx(losses(there), rel=2e-5)


def test_arguments_by_position_are_where_trl_has_them(model: str, tmp_path: Path) -> None:
    config = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, precompute_ref_log_probs=True)
    trainer = ours.DPOTrainer(model, None, config, None, datasets.Dataset.from_dict(PAIRS))
    assert trainer.args is config
    assert len(trainer.train_dataset) == len(WORDS)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data_collator": transformers.default_data_collator}, "data_collator is not supported with TRL's trainers"),
        ({"quantization_config": object()}, "quantization_config is not"),
        ({"peft_config": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}, "tokens to the prompt"),
    ],
)
def test_arguments_that_cannot_hold_are_refused_by_name(
    more: dict[str, Any], words: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        made(ours, "SFT", model, tmp_path, TEXTS, more=more)
