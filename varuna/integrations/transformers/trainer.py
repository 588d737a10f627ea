"""Hugging Face's Trainer with its training loop over Varuna; what is around the loop is the library's own code."""

import functools
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import (
    TrainOutput,
    align_special_tokens,
    get_last_checkpoint,
    has_length,
    rotate_checkpoints,
    speed_metrics,
)

import varuna
from varuna.core.errors import UsageError
from varuna.integrations.transformers.arguments import (
    check_arguments,
    check_callbacks,
    compiler_of,
    precision_of,
)
from varuna.integrations.transformers.data import Ordered, one_length
from varuna.integrations.transformers.main_rank import IS_LAUNCHED, Found, OnMainRank
from varuna.integrations.transformers.overrides import by_name, check_overrides
from varuna.job.built import GivenModel, SchedulerLike, fill_module
from varuna.job.given_optimizer import OptimizerLike
from varuna.job.handed_functions import functions_of
from varuna.job.handed_over.watching import COMPUTE_LOSS, LOSS, HandedOver
from varuna.membership.launched import watch_exceptions
from varuna.process.console import say_once
from varuna.results import Step

ComputeLoss = Callable[[nn.Module, dict[str, Any]], Tensor]
_inside: set[int] = set()
"""modules whose loss is being computed: the call in there is the model's own"""


class ReturningLoss(GivenModel):
    """Builds copies of a module that return their loss."""

    def __init__(self, module: nn.Module, compute_loss: ComputeLoss) -> None:
        """Describe the copies.

        Args:
            module: the model.
            compute_loss: replaces their ``forward``: gets the copy and its inputs, returns a scalar.
        """
        super().__init__(module)
        self._compute_loss = compute_loss

    def __call__(self) -> nn.Module:
        """Build a copy."""
        return _returning_loss(super().__call__(), self._compute_loss)


def _returning_loss(module: nn.Module, compute_loss: ComputeLoss) -> nn.Module:
    """Return the module, of a class of the same name whose ``forward`` is ``compute_loss``."""
    own = type(module)

    @functools.wraps(own.forward)
    def forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        if id(self) in _inside:
            return own.forward(self, *args, **inputs)
        _inside.add(id(self))
        try:
            return compute_loss(self, inputs)
        finally:
            _inside.discard(id(self))

    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__})
    return module


def check_optimizer(whole: object) -> torch.optim.Optimizer:
    """Refuse optimizers that are more than an update of each parameter.

    Raises:
        UsageError: it is one, or none of torch's kind.
    """
    if type(whole).__name__ in ("LayerWiseDummyOptimizer", "DummyOptim") or not isinstance(
        whole, torch.optim.Optimizer
    ):
        raise UsageError(
            f"the optimizer is a {type(whole).__name__}, which cannot be built again for the parameters of one stage. "
            "Use one that is built from parameter groups, such as optim='adamw_torch'."
        )
    return whole


_STORE = "varuna"
"""Folder in ``output_dir`` with the run's own checkpoints, from which it resumes."""
_STATE = "trainer_state.json"
_WEIGHTS = "model.safetensors"
_PLACE = int(os.environ.pop("LOCAL_RANK", "0")) if IS_LAUNCHED else 0
"""This worker's among those of its machine. Accelerate would take the variable for torchrun's."""


@dataclass(frozen=True)
class _Schedule:
    """The data to read, and for how many steps."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    steps: int
    steps_per_epoch: int

    @property
    def epochs(self) -> int:
        return -(-self.steps // self.steps_per_epoch)


class OverVaruna(OnMainRank):
    """The training loop; see docs/transformers.md."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take the arguments of Hugging Face's Trainer.

        Args:
            given: as there.
            named: as there, and ``varuna={...}``: further arguments of ``varuna.Trainer``, such as ``micro_batch``.

        Raises:
            UsageError: an argument cannot be honoured.
        """
        told = by_name(type(self), given, named)
        self._options: dict[str, Any] = dict(told.pop("varuna", None) or {})
        args = told.get("args")
        if args is not None:
            check_arguments(args)
            args._n_gpu = min(1, args.n_gpu)  # a process has one device: batches are not multiplied
        super().__init__(**told)

    # -- training -------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train, as Hugging Face's Trainer does; a run that has checkpoints in ``output_dir`` resumes from them.

        Raises:
            UsageError: an argument cannot be honoured.
            VarunaError: see ``varuna.Trainer.steps``.
        """
        if trial is not None:
            raise UsageError("hyperparameter_search is not supported: start one run for each set of hyper-parameters")
        check_callbacks(self.callback_handler.callbacks)
        watch_exceptions()  # what is refused is told without our frames
        check_overrides(self)
        if self.model_init is not None:
            transformers.set_seed(self.args.seed)
            self.model = self.call_model_init()
            self.optimizer = self.lr_scheduler = None
        self.model.train()  # as the library does before each step
        texts = transformers.PreTrainedTokenizerBase | transformers.ProcessorMixin
        if isinstance(self.processing_class, texts) and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)
        self._check_resuming(resume_from_checkpoint)
        schedule = self._schedule()
        self._job = self._over_varuna(schedule)
        self._decided = {f"args.{key}": getattr(self.args, key) for key in _IN_EACH_STEP}
        self._job._tells_speed = False  # the library has its own progress bar
        steps = self._job.steps(schedule.steps)
        self.is_in_train, losses, began_s, first = True, dict[int, float](), time.time(), None
        for step in steps:
            self._training = self._job._training
            with self._job._handed.unwatched():
                if first is None:
                    first = step.index
                    self._begin(step, schedule)
                self._agree(step, losses)
                losses[step.index] = step.loss
                is_last = self._after(step, schedule, losses, ignore_keys_for_eval)
            if is_last and self._training is not None:
                self._training.session.stop()  # all ranks leave together, after one more step if there are several
        return self._end(losses, first, schedule, began_s)

    def _schedule(self) -> _Schedule:
        args = self.args
        whole = args.per_device_train_batch_size * args.gradient_accumulation_steps
        given: Any = self.data_collator
        self.data_collator = self._collator()
        try:
            loader = self.get_train_dataloader()
        finally:
            self.data_collator = given
        if not has_length(loader.dataset):
            return _Schedule(loader.dataset, loader.collate_fn, args.max_steps, args.max_steps)
        size = len(loader.dataset)
        kept = size - size % args.per_device_train_batch_size if args.dataloader_drop_last else size
        if not kept:
            raise UsageError(f"dataloader_drop_last=True leaves no batch: the dataset has {size} samples")
        # every step is a whole global batch, so an epoch's last one is completed from its beginning
        per_epoch = -(-kept // whole)
        if per_epoch * whole != kept:
            say_once(
                f"every step has {whole} samples: the last one of an epoch takes {per_epoch * whole - kept} from the "
                f"beginning of the epoch's order, where Hugging Face's Trainer makes a step of {kept % whole}"
            )
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        order = Ordered(
            loader.dataset,
            loader.batch_sampler.sampler,
            seed=args.seed if args.data_seed is None else args.data_seed,
            kept=kept,
            per_epoch=per_epoch * whole,
        )
        return _Schedule(order, loader.collate_fn, steps, per_epoch)

    def _collator(self) -> Any:
        """Return the function that joins samples to micro-batches of one shape."""
        has_rows = self.train_dataset is not None and has_length(self.train_dataset)
        return one_length(self.data_collator, self.train_dataset) if has_rows else self.data_collator

    def _over_varuna(self, schedule: _Schedule) -> varuna.Trainer:
        args = self.args
        own = type(self).compute_loss is not transformers.Trainer.compute_loss
        told = self.compute_loss_func is not None or self.label_smoother is not None
        computes = own or told or self.model_accepts_loss_kwargs  # it is told how many targets the batch has
        self.create_optimizer()
        whole = check_optimizer(self.optimizer)
        rates = self.lr_scheduler or self._fresh_scheduler(schedule.steps, torch.optim.SGD([torch.zeros(1)], lr=1.0))
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = whole, rates
        device = torch.device("cuda", _PLACE % torch.cuda.device_count()) if args.device.type == "cuda" else args.device
        options = {
            "collate": schedule.collate,
            "num_workers": args.dataloader_num_workers or None,
            "seed": args.seed,
            "lr_scheduler": self._scheduler(schedule.steps),
            "clip_grad_norm": args.max_grad_norm or None,
            "precision": precision_of(args),
            "compile": compiler_of(args),
            "device": device,
            "checkpoints": self._checkpoints(schedule),
            **self._options,
        }
        made = varuna.Trainer(
            ReturningLoss(self.model, self._loss) if computes else GivenModel(self.model),
            schedule.dataset,
            OptimizerLike(
                whole, list(self.model.named_parameters()), is_scheduled=True, in_loop=self._has_own_callbacks
            ),
            args.per_device_train_batch_size * args.gradient_accumulation_steps,
            **options,
        )
        given = [(COMPUTE_LOSS, self.compute_loss)] if own else []
        given += [(LOSS, each) for each in (self.compute_loss_func, self.label_smoother) if each is not None]
        made._handed = HandedOver(
            [*given, *functions_of(made._spec)], model=self.model, optimizer=whole, schedule=rates
        )
        return made

    @property
    def _has_own_callbacks(self) -> bool:
        """Whether a callback is not the library's: it may write the optimizer's options."""
        kinds = {type(each) for each in self.callback_handler.callbacks}
        return any(not kind.__module__.startswith("transformers.") for kind in kinds)

    def _loss(self, module: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the result of ``compute_loss`` for a micro-batch, whose targets are counted from its own labels."""
        counted = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        found: torch.Tensor = self.compute_loss(module, inputs, num_items_in_batch=counted)
        return found

    def _scheduler(self, steps: int) -> Callable[[torch.optim.Optimizer], Any]:
        given = self.lr_scheduler
        if given is None:
            return lambda optimizer: self._fresh_scheduler(steps, optimizer)
        return SchedulerLike(given)

    def _fresh_scheduler(self, steps: int, optimizer: torch.optim.Optimizer) -> Any:
        made = self.create_scheduler(steps, optimizer)
        self.lr_scheduler = None  # the next stage gets one of its own
        return made

    def _checkpoints(self, schedule: _Schedule) -> varuna.Checkpoints | None:
        args = self.args
        if args.save_strategy == "no" or args.save_only_model:
            return None
        self.state.compute_steps(args, schedule.steps)
        every: dict[str, dict[str, Any]] = {
            "steps": {"every": int(self.state.save_steps)},
            "epoch": {"every": schedule.steps_per_epoch},
        }
        kept: dict[str, Any] = {} if args.save_total_limit is None else {"keep_last": max(1, args.save_total_limit)}
        return varuna.Checkpoints(
            Path(args.output_dir) / _STORE, **every.get(str(args.save_strategy.value), {}), **kept
        )

    def _check_resuming(self, asked: str | bool | None) -> None:
        """Refuse to resume from anything but the run's newest checkpoint."""
        newest = get_last_checkpoint(self.args.output_dir) if os.path.isdir(self.args.output_dir) else None
        if asked is True and newest is None:
            raise UsageError(f"resume_from_checkpoint=True: there is no checkpoint in {self.args.output_dir}")
        if isinstance(asked, str) and (newest is None or not Path(newest).samefile(asked)):
            raise UsageError(
                f"resume_from_checkpoint={asked!r}: a run resumes from the newest checkpoint of its output_dir, "
                f"{newest or 'and there is none'}. To start from other weights, load them into the model."
            )
        if not asked and newest is not None:
            say_once(f"{self.args.output_dir} has checkpoints: the run resumes. To begin anew, empty the folder.")

    # -- between steps --------------------------------------------------------------------------------------

    def _begin(self, step: Step, schedule: _Schedule) -> None:
        self._is_main = step.is_main
        stateful: list[Any] = [each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)]
        self.state = transformers.TrainerState(stateful_callbacks=[*stateful, self.control])
        # the first step may be one that the run had before: its turn of the loop was not over when it was saved
        folders = (Path(self.args.output_dir) / f"checkpoint-{at}" / _STATE for at in (step.index, step.index + 1))
        saved = next((each for each in folders if each.exists()), None) if step.index else None
        if saved is not None:
            self.state = transformers.TrainerState.load_from_json(str(saved))
        self.state.compute_steps(self.args, schedule.steps)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.max_steps, self.state.num_train_epochs = schedule.steps, schedule.epochs
        self._say_who(step)
        self.state.global_step = step.index
        self._call("on_train_begin")
        self._call_before(step.index, schedule)
        options = self._job._handed.options if self._job is not None else None
        if options is not None and (found := options.written()):
            raise UsageError(
                f"a callback wrote {next(iter(found))[1]!r} into the optimizer's groups before the first step, which "
                "has been made. Give the first value to the optimizer, optimizers=(optimizer, None), and write those "
                "of later steps in on_step_begin or on_step_end."
            )

    def _call_before(self, index: int, schedule: _Schedule) -> None:
        """Give the callbacks control before a step."""
        if index % schedule.steps_per_epoch == 0:
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def _agree(self, step: Step, losses: dict[int, float]) -> None:
        """Tell ranks that came later what happened, in a new generation; forget a step that is redone."""
        for redone in [index for index in losses if index >= step.index]:  # the run has gone back to this step
            del losses[redone]
        self.state.log_history = [each for each in self.state.log_history if each["step"] <= step.index]
        if step.generation != self._generation and step.plan.workers > 1:
            told = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint")
            mine = {name: getattr(self.state, name) for name in told} if step.is_main else None
            for name, value in (self._tell(mine, "the history of the run") or {}).items():
                setattr(self.state, name, value)
        self._generation = step.generation
        self._say_who(step)

    def _say_who(self, step: Step) -> None:
        self._is_main = step.is_main
        self.state.is_world_process_zero = self.state.is_local_process_zero = step.is_main

    def _after(self, step: Step, schedule: _Schedule, losses: dict[int, float], ignore_keys: Any) -> bool:
        """Give the callbacks control after a step; return whether they stop, which before a step means after it."""
        self.state.global_step = step.index + 1
        self.state.epoch = self.state.global_step / schedule.steps_per_epoch
        self._call("on_step_end")
        self._log_evaluate_save(step, losses, ignore_keys)
        if self.control.should_epoch_stop:
            raise UsageError(
                "a callback set should_epoch_stop: an epoch cannot be cut short. Set should_training_stop."
            )
        if self.state.global_step % schedule.steps_per_epoch == 0 or self.state.global_step == schedule.steps:
            self._call("on_epoch_end")
            self._log_evaluate_save(step, losses, ignore_keys)
        stops: bool = self.control.should_training_stop
        if self.state.global_step < schedule.steps and not stops:
            self._call_before(step.index + 1, schedule)
        return stops

    def _log_evaluate_save(self, step: Step, losses: dict[int, float], ignore_keys: Any) -> None:
        """Log, evaluate and save, as callbacks ask for it."""
        before = max((each["step"] for each in self.state.log_history if "loss" in each), default=0)
        if self.control.should_log and self.state.global_step > before:
            newest = [loss for index, loss in losses.items() if index >= before]
            logs = {"loss": sum(newest) / len(newest), "grad_norm": step.grad_norm, "learning_rate": step.lr}
            self._give_control(functools.partial(self.log, logs), "log()")
        if self.control.should_evaluate:
            is_best = self._is_best(self.evaluate(ignore_keys=ignore_keys))
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
            self.control.should_evaluate = False
        if self.control.should_save:
            self._save_folder()
            self._call("on_save")
            self.control.should_save = False

    def _is_best(self, metrics: dict[str, float]) -> bool:
        name, state = self.args.metric_for_best_model, self.state
        if name is None or not metrics:
            return False
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise UsageError(f"metric_for_best_model={name!r} is not among the metrics: {', '.join(metrics)}")
        found, best = metrics[name], state.best_metric
        if best is not None and not (found > best if self.args.greater_is_better else found < best):
            return False
        state.best_metric, state.best_global_step = found, state.global_step
        return True

    def _save_folder(self) -> None:
        """Write ``checkpoint-N`` as Hugging Face's Trainer names it: the model, what reads its inputs, and the log."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.save_model(str(folder))
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        if self._is_main:
            self.state.save_to_json(str(folder / _STATE))
            rotate_checkpoints(
                output_dir=self.args.output_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _end(self, losses: dict[int, float], first: int | None, schedule: _Schedule, began_s: float) -> TrainOutput:
        if first is None:
            self._take_the_end(schedule)
        done = len(losses)
        metrics = speed_metrics(
            "train", began_s, num_samples=done * self.args.train_batch_size * self.args.gradient_accumulation_steps
        )
        metrics["train_loss"] = sum(losses.values()) / max(1, len(losses))
        self.is_in_train = False
        self.log(metrics)
        self._take_trained()
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None and self._is_main:
            fill_module(self.model, load_file(Path(best) / _WEIGHTS))
        self._call("on_train_end")
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def _take_the_end(self, schedule: _Schedule) -> None:
        """Take the end of a run that had ended already: there was no step to make."""
        if IS_LAUNCHED:
            sys.exit(0)  # a spare, or a worker that came after the last step: the others have all results
        folder = Path(self.args.output_dir) / f"checkpoint-{schedule.steps}"
        if (folder / _WEIGHTS).exists():
            fill_module(self.model, load_file(folder / _WEIGHTS))
            self.state = transformers.TrainerState.load_from_json(str(folder / _STATE))

    def _call(self, event: str) -> None:
        """Give the callbacks control."""
        heard = getattr(self.callback_handler, event)
        self.control = self._give_control(lambda: heard(self.args, self.state, self.control), f"a callback's {event}()")

    def _give_control(self, call: Callable[[], Found], name: str) -> Found:
        """Call what may be the user's; what it does to the model and the optimizer is taken over or refused."""
        handed = None if self._job is None else self._job._handed
        is_new = self._is_main and self._at == (self._generation, self.state.global_step)
        step, most = self.state.global_step, self.state.max_steps
        with nullcontext() if handed is None else handed.callbacks(may_read=is_new):
            given = call()
        if handed is not None:
            handed.check(None, name)
        decided = {**self._decided, "state.global_step": step, "state.max_steps": min(most, self.state.max_steps)}
        for name, value in decided.items():
            now = attrgetter(name)(self)
            if now != value and self.is_in_train:
                raise UsageError(
                    f"while train() was running, a callback, or a method that is overridden, changed {name} from "
                    f"{value!r} to {now!r}. The library's loop reads it in each step; over Varuna it is decided "
                    "before step 0. Leave it as it is, or train twice: the second time with the other value. What the "
                    "optimizer reads, such as lr, can be written into its param_groups."
                )
        return given


_IN_EACH_STEP = ("max_grad_norm", "gradient_accumulation_steps")
"""Arguments that the library's loop reads in each step."""
_Theirs: Any = transformers.Trainer
_TheirSeq2Seq: Any = transformers.Seq2SeqTrainer


class Trainer(OverVaruna, _Theirs):
    """Hugging Face's Trainer, training on one device or on any number of workers that come and go."""


class Seq2SeqTrainer(OverVaruna, _TheirSeq2Seq):
    """Hugging Face's Seq2SeqTrainer, training on one device or on any number of workers that come and go."""
