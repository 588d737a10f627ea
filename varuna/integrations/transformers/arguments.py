"""Treatment of every field of ``TrainingArguments``: used, not needed and said so, or refused by name."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import transformers

from varuna.core.errors import UsageError
from varuna.core.precision import Precision
from varuna.process.console import say_once

_STEP = """per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm label_smoothing_factor torch_compile torch_compile_backend seed data_seed full_determinism use_cpu
    tf32 use_cache average_tokens_across_devices"""
_DATA = """dataloader_drop_last dataloader_num_workers remove_unused_columns label_names train_sampling_strategy
    length_column_name"""
_TOLD = """output_dir logging_strategy logging_steps logging_first_step log_level log_level_replica log_on_each_node
    disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id"""
_EVALUATION = """eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only
    eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics predict_with_generate
    generation_max_length generation_num_beams generation_config"""
_SAVED = """save_strategy save_steps save_total_limit save_only_model load_best_model_at_end metric_for_best_model
    greater_is_better do_train do_eval do_predict resume_from_checkpoint local_rank"""
USED = frozenset(" ".join((_STEP, _DATA, _TOLD, _EVALUATION, _SAVED)).split())
"""Fields that mean here what they mean to Hugging Face's Trainer."""

_RECOMPUTED = "Varuna recomputes activations wherever that is needed"
_READERS = "Varuna's own readers need no such setting"
_NO_DDP = "there is no DistributedDataParallel"
_CAST = "Varuna computes in half precision throughout, over fp32 parameters, where Hugging Face's Trainer uses autocast"
SAID = {
    **dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), _RECOMPUTED),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), _RECOMPUTED),
    **dict.fromkeys(("dataloader_pin_memory", "dataloader_persistent_workers"), _READERS),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_in_order"), _READERS),
    "dataloader_multiprocessing_context": _READERS,
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _NO_DDP),
    **dict.fromkeys(("ddp_static_graph", "ddp_backend", "ddp_timeout"), _NO_DDP),
    **dict.fromkeys(("bf16", "fp16"), _CAST),
    "auto_find_batch_size": "Varuna chooses micro-batches that fit",
    "torch_empty_cache_steps": "Varuna manages the device's memory",
    "logging_nan_inf_filter": "a step whose loss is not finite ends the run, before it is applied",
}
"""Fields that need not, or cannot, mean the same, and what is said of them. All others are refused."""


def check_arguments(args: transformers.TrainingArguments) -> None:
    """Refuse, by name, every argument that is set and cannot be honoured; say what is done instead of others.

    Raises:
        UsageError: there is one.
    """
    refused = []
    for name in changed(args):
        if name in SAID:
            say_once(f"{name}={getattr(args, name)!r}: {SAID[name]}")
        elif name not in USED:
            refused.append(f"{name}={getattr(args, name)!r}")
    if refused:
        raise UsageError(
            f"varuna.integrations.transformers.Trainer cannot do what {', '.join(refused)} asks for. Leave it out, or "
            "train with varuna.Trainer itself, whose options are in docs/trainer.md."
        )
    if args.parallel_mode is transformers.training_args.ParallelMode.DISTRIBUTED:
        raise UsageError(
            "this script was started by a launcher of torch.distributed (torchrun, accelerate launch), whose process "
            "group transformers has opened. Start it with: varuna run --workers N train.py"
        )


def changed(args: transformers.TrainingArguments) -> Sequence[str]:
    """Return the library's own fields that differ from their defaults; a script's own fields are its business."""
    kinds = [kind for kind in type(args).__mro__ if kind.__module__.startswith("transformers.")]
    plain: Any = kinds[0](output_dir=args.output_dir, use_cpu=args.use_cpu)  # which changes others
    names = [each.name for each in dataclasses.fields(plain) if each.name != "use_cpu"]
    return [name for name in names if getattr(args, name) != getattr(plain, name)]


def precision_of(args: transformers.TrainingArguments) -> Precision:
    """Return the precision to compute in."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def compiler_of(args: transformers.TrainingArguments) -> bool | str:
    """Return the ``compile`` of a ``varuna.Trainer``."""
    return args.torch_compile and (args.torch_compile_backend or True)


def check_callbacks(callbacks: Sequence[transformers.TrainerCallback]) -> None:
    """Refuse callbacks for moments that are inside a step, which many workers make together.

    Raises:
        UsageError: there is one.
    """
    for callback in callbacks:
        for event in ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end"):
            if getattr(type(callback), event) is not getattr(transformers.TrainerCallback, event):
                raise UsageError(
                    f"the callback {type(callback).__name__} has {event}, which cannot be called: no worker has the "
                    "whole model's gradients then. Use on_step_end, or before_step= of varuna.Trainer."
                )
