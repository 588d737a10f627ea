"""Methods of Hugging Face's Trainer that its own training loop calls: which of them a subclass may override here."""

import inspect
from collections.abc import Sequence
from typing import Any

from varuna.core.errors import UsageError

_AROUND = """call_model_init compute_loss create_accelerator_and_postprocess create_model_card create_optimizer
    create_scheduler evaluate evaluation_loop get_cp_size get_decay_parameter_names get_eval_dataloader
    get_optimizer_cls_and_kwargs get_sp_size get_tp_size get_train_dataloader init_hf_repo is_world_process_zero log
    num_examples prediction_step push_to_hub save_model train _build_accelerator_args _finish_current_push
    _get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_num_items_in_batch _get_train_sampler
    _move_model_to_device _remove_unused_columns _save _set_signature_columns_if_needed"""
CALLED = frozenset(_AROUND.split())
"""Methods that are called here, too."""

_STEP = (
    "a step belongs to all workers at once. What it changes in the loss goes into compute_loss(); what it does to "
    "gradients into before_step=, which varuna={...} passes on; what it does to inputs into the data collator"
)
_INPUTS = "batches are made on several workers, ahead of time. Change inputs in the data collator, or in compute_loss()"
_SAVES = "output_dir/varuna holds the state of the run, and save_model() or a callback's on_save() writes what is yours"
_LOGS = "override log() or evaluate(), or use a callback"
_CLIPS = "gradients are clipped by max_grad_norm over all workers; before_step= in varuna={...} sees them afterwards"
_DEVICES = "devices hold stages, and precision is bf16 or fp16 of the arguments"
_NOTHING = "there is nothing in Varuna's training loop that it could do. Leave it out"
_UNUSED = """floating_point_ops store_flos get_total_train_batch_size set_initial_training_values _finalize_training
    _init_training_state _prepare_for_training _hp_search_setup _report_to_hp_search _tune_save_checkpoint
    _update_auto_batch_size _push_from_checkpoint _sync_replicated_trainable_parameters _track_num_input_tokens
    _defer_fsdp_gradient_reduction"""
REFUSED = {
    **dict.fromkeys(("training_step", "_inner_training_loop", "_run_epoch"), _STEP),
    **dict.fromkeys(
        ("get_batch_samples", "_prepare_inputs", "_prepare_input", "_prepare_context_parallel_inputs"), _INPUTS
    ),
    **dict.fromkeys(("_clip_grad_norm", "_get_grad_norm", "_mixed_mesh_grad_norm", "_has_mixed_mesh_grads"), _CLIPS),
    **dict.fromkeys(("_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler"), _SAVES),
    **dict.fromkeys(
        ("_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler", "_load_callback_state"), _SAVES
    ),
    **dict.fromkeys(
        ("_load_from_checkpoint", "_load_best_model", "_issue_warnings_after_load", "_get_output_dir"), _SAVES
    ),
    **dict.fromkeys(("_maybe_log_save_evaluate", "_evaluate", "_determine_best_metric", "_get_learning_rate"), _LOGS),
    **dict.fromkeys(("compute_loss_context_manager", "autocast_smart_context_manager", "_wrap_model"), _DEVICES),
    "create_optimizer_and_scheduler": "override create_optimizer() and create_scheduler()",
    **dict.fromkeys(_UNUSED.split(), _NOTHING),
}
"""Methods that are never called, at least not in training, and what to do instead."""


def library_of(kind: type) -> Any:
    """Return the class of transformers or TRL that a trainer's class is derived from."""
    return next(each for each in kind.__mro__ if each.__module__.startswith(("transformers.", "trl.")))


def by_name(kind: type, given: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return a trainer's arguments under the names that its library gives them: their order differs."""
    return {**inspect.signature(library_of(kind)).bind_partial(*given).arguments, **named}


def check_overrides(trainer: Any) -> None:
    """Refuse, by name, every replaced method of the library's loop that Varuna's loop does not call.

    Raises:
        UsageError: there is one.
    """
    library = library_of(type(trainer))
    for name, instead in REFUSED.items():
        theirs = getattr(library, name, None)
        owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), library)
        if name in vars(trainer) or (getattr(type(trainer), name, None) is not theirs):
            raise UsageError(
                f"{owner.__name__} overrides {name}() of Hugging Face's Trainer, which Varuna's training loop never "
                f"calls, so it would have no effect: {instead}. See docs/transformers.md."
            )
