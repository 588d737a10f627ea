"""The public interface: ``Trainer`` runs a script for one GPU on whatever devices there are.

One turn of ``for step in trainer.steps(n)``, on every rank::

    engine    runs and commits a step        -> Committed
    Trainer   charts it, shows the options   -> Step, the same on all ranks but for is_main and step_s
    script    its turn: the loop's body
    Trainer   handed.check, samples.check    refuse what the body changed of what training reads
              session.write                  options that it wrote -> all workers, from the next step on
    engine    the next step ...

After the last turn the script's own model gets the trained values.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from varuna.core.errors import UsageError
from varuna.core.model import Memory, Network
from varuna.core.precision import Precision
from varuna.data.collate import CollateFunction
from varuna.data.ramp import RampFunction
from varuna.engine.graphs.compiled import compiler_of
from varuna.engine.inference.evaluate import evaluate
from varuna.engine.inference.generate import generate
from varuna.engine.inference.predict import predict
from varuna.engine.stage.job import Frozen
from varuna.engine.stage.optimizer import BeforeStep, OptimizerFactory, SchedulerFactory
from varuna.engine.worker.export import export_model, spread_model
from varuna.engine.worker.generation import Generation
from varuna.engine.worker.loop_state import Committed, Kept
from varuna.engine.worker.session import Session
from varuna.job.adapter_export import export_adapter
from varuna.job.arguments import check_number, check_whole, choose_device, refuse_unknown
from varuna.job.built import GivenModel, as_functions
from varuna.job.charts import Tracker, charts_of
from varuna.job.handed_functions import functions_of
from varuna.job.handed_over.loop_variables import say_begun_anew
from varuna.job.handed_over.sample_watch import SampleWatch
from varuna.job.handed_over.schedules import wholes
from varuna.job.handed_over.watching import HandedOver
from varuna.job.inference import Inference
from varuna.job.options import Checkpoints, Collate, EmaFrom, Loss, OnNan, Publish, Weights
from varuna.job.script_calls import calls_of
from varuna.job.script_runner import offer_job
from varuna.job.spec import JobSpec
from varuna.job.speed import SpeedLines
from varuna.job.training import Training, generators_of_script
from varuna.job.unused_values import unused_values
from varuna.membership.launched import at_end, failed, watch_exceptions
from varuna.partition.after_step import AfterStep
from varuna.partition.capture.capture import LossFunction, MetricsFunction
from varuna.partition.capture.outputs import OutputsFunction, outputs_of
from varuna.partition.initial.initial_values import Init
from varuna.results import Evaluation, Step, evaluation_of, step_of, values_of


class Trainer:
    """Trains an unmodified model on one device, or on any number of workers that come and go."""

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        dataset: Any,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        global_batch: int,
        *,
        batch_ramp: RampFunction | None = None,
        loss: LossFunction | Loss | None = None,
        metrics: MetricsFunction | None = None,
        collate: CollateFunction | Collate | None = None,
        num_workers: int | None = None,
        micro_batch: int | None = None,
        seed: int = 0,
        weights: str | os.PathLike[str] | Weights | None = None,
        init: Init = "constructor",
        lr_scheduler: LRScheduler | SchedulerFactory | None = None,
        clip_grad_norm: float | None = None,
        ema: float | None = None,
        ema_from: EmaFrom = "start",
        on_nan: OnNan = "stop",
        frozen: Frozen | None = None,
        before_step: BeforeStep | None = None,
        after_step: AfterStep | None = None,
        cut: int | Sequence[str] | None = None,
        checkpoints: str | os.PathLike[str] | Checkpoints | None = None,
        publish: Publish | None = None,
        state: Mapping[str, Kept] | None = None,
        loggers: Sequence[str | Tracker] = (),
        device: str | torch.device | None = None,
        precision: Precision = "fp32",
        compile: bool | str = False,
        memory: Memory | None = None,
        network: Network | None = None,
        **unknown: Never,
    ) -> None:
        """Describe the job; nothing is built before ``steps``.

        Args:
            model: the unmodified module, or, so that no worker need hold all of it, a function that builds it.
                ``forward(**sample)`` returns a scalar loss or an object with ``.loss``, unless ``loss`` is given.
            dataset: map-style; ``dataset[i]`` is a dict of tensors, arrays, numbers or lists, a tuple in the order of
                forward's parameters, or with ``collate`` anything. Without ``__len__`` it is read in order.
            optimizer: a torch optimizer over the parameters of a ``model`` that is a module, or a function that builds
                one from a list of (name, parameter), with the model's own names; each worker calls it with the
                parameters of its stage.
            global_batch: examples per optimizer step, whatever the number of workers.
            batch_ramp: ``fn(step)``: examples of that step, where they are fewer than ``global_batch``.
            loss: ``fn(output, batch)`` that returns a scalar mean, or one of torch's loss modules, which then compares
                the output with ``batch["labels"]``, or ``Loss(fn, weight=, per_micro_batch=)``.
            metrics: ``fn(output, batch)`` that returns named scalar sums; they are added up over the global batch.
            collate: from a list of samples to a dict of tensors whose first dimension is the batch, or
                ``Collate(fn, lengths=)``. Default: stack.
            num_workers: processes that read and collate samples, for each worker; 0: a thread does. Default: a thread
                does, and a line says how many processes would help if training waits for samples.
            micro_batch: examples per micro-batch, m. Default: chosen once for the run. Batch normalisation needs it.
            seed: seed of initialisation, sample order and dropout.
            weights: safetensors file, or folder written by ``save_pretrained``, to start from, or
                ``Weights(path, missing="initialise")`` for a model with a new head; each worker reads what its stage
                needs.
            init: what is not in ``weights``: ``"constructor"`` builds the model once per worker, in turn;
                ``"per_parameter"`` draws every parameter separately, so that no worker ever holds the whole model.
            lr_scheduler: a torch scheduler of ``optimizer``, or a function that builds one from an optimizer; it
                advances once per committed step, or, if it is ``ReduceLROnPlateau``, with ``step_scheduler``.
            clip_grad_norm: largest global L2 norm of the gradients.
            ema: decay of an exponential moving average of the trained parameters, such as 0.999, which ``evaluate``,
                ``predict`` and ``export`` use with ``ema=True``.
            ema_from: what the average begins with: the parameters from the ``"start"``, as a copy of the model does
                (timm, diffusers), or those after the ``"first step"``, as torch's ``AveragedModel`` does.
            on_nan: ``"stop"`` ends the run before a loss or gradient that is not finite is applied; ``"continue"`` does
                not look.
            frozen: ``fn(name, step)``: whether a step leaves a trained parameter as it is, as if it had no gradient.
            before_step: ``fn(named)``, or ``fn(named, step)``: gets the (name, parameter) list with reduced, clipped
                gradients, before the optimizer.
            after_step: ``fn(parameters, buffers)``, or with ``step``, changes dicts of both in place after each step.
            cut: where the model may be cut: number of cut-points, or names of modules, as in ``named_modules()``, to
                cut where each is entered and nowhere else. Default: every place where few bytes cross.
            checkpoints: folder or URL (``s3://``, ``gs://``, ``az://``) to save to every 10 minutes, or
                ``Checkpoints(path, every=, keep_last=, ...)``. The same command then resumes from it.
            publish: ``Publish(path, every=, keep=)``: every ``every`` steps the model, or of PEFT's the adapter,
                appears in a folder as Hugging Face writes it, whole, for a server that watches it.
            state: what else is saved with each checkpoint and the same on all workers, by name: dicts, or objects with
                ``state_dict()`` and ``load_state_dict(state)``, which the loop changes.
            loggers: where each step is charted once: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, or objects with
                ``log(step, values)``.
            device: where to compute. Default: this worker's GPU if there is one, else the CPU.
            precision: ``"bf16"`` or ``"fp16"``: compute and send in it, as ``model.to(dtype)`` does, over parameters,
                optimizer state and sums of gradients in fp32; fp16 scales the loss dynamically.
            compile: compile every section once per process with inductor, or with another backend of ``torch.compile``,
                by its name. Backwards are then never split.
            memory: ``Memory(offload_optimizer=, shard_optimizer=, stream_frozen=)``: relieve devices of state.
            network: ``Network(links=, reduction=, compress=)``: send from GPU to GPU, and gradients as bf16.
            unknown: none. An option that is written in another way is refused with that way.

        Raises:
            UsageError: an argument is out of range, or inductor lacks a compiler on this machine.
            DataError: the dataset cannot be read by index.
        """
        watch_exceptions()
        refuse_unknown(unknown, Trainer.__init__.__kwdefaults__ or {})
        where = choose_device(device)
        saved = checkpoints if checkpoints is None or isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        given_loss = loss if isinstance(loss, Loss) else Loss(loss)
        self._given = given = as_functions(model, optimizer, lr_scheduler, given_loss.function)
        self._spec = JobSpec(
            given.model,
            dataset,
            given.optimizer,
            global_batch,
            batch_ramp=batch_ramp,
            loss=given_loss,
            metrics=metrics,
            collate=collate if isinstance(collate, Collate) else Collate(collate),
            num_workers=num_workers,
            micro_batch=micro_batch,
            seed=seed,
            weights=weights if weights is None or isinstance(weights, Weights) else Weights(weights),
            init=init,
            lr_scheduler=given.lr_scheduler,
            clip_grad_norm=clip_grad_norm,
            ema=ema,
            ema_from=ema_from,
            on_nan=on_nan,
            frozen=frozen,
            before_step=before_step,
            after_step=after_step,
            cut=cut,
            checkpoints=saved,
            publish=publish,
            state=state,
            loggers=loggers,
            device=where,
            precision=precision,
            compiler=compiler_of(compile, where),
            memory=Memory() if memory is None else memory,
            network=Network() if network is None else network,
            trains_nothing_else=given.steps is not None,
        )
        self._training: Training | None = None
        self._handed = HandedOver(
            functions_of(self._spec, given.schedule),
            model=given.built.module if isinstance(given.built, GivenModel) else None,
            optimizer=given.steps,
            schedule=given.schedule,
            kept=state,
        )
        self._tells_speed = True  # without a manager, which does
        self._inference, self._charts = Inference(self._spec), charts_of(self._spec)

    def steps(self, n: int | None = None, *, epochs: float | None = None) -> Iterator[Step]:
        """Train until the whole run has ``n`` steps, and yield each; a resumed run yields the steps that are left.

        Any rank may break out of the loop; all ranks then stop together after the next step.

        Args:
            n: steps of the whole run.
            epochs: instead, passes over the dataset. The last step is completed with samples of the next pass.

        Raises:
            UsageError: not one of the two, or ``epochs`` for a dataset without length.
            ModelError: the model cannot be captured or weighed.
            NoPlanError: no plan fits.
            CheckpointError: the directory cannot be used, or no checkpoint in it can be trusted.
            FleetError: the manager refused this worker or ended the run.
            LinkError: a peer is gone and nothing replaces it (torchrun).
        """
        n = self._whole_steps(n, epochs)
        if n < 0:
            raise UsageError(f"steps(n): n is the total number of steps of the run and must be >= 0 (got {n})")
        if self._training is not None:
            raise UsageError("trainer.steps(n) can be called once. Build another Trainer for another run.")
        handed = self._handed
        capturing = handed.before_capture()
        # a tool takes the job here, before guard() makes the script's own objects refuse to be used
        offer_job(self._spec, n)
        self._given.guard()
        generators = generators_of_script()
        with capturing:
            self._training = training = Training(self._spec, n)
        at_end(self._charts.close)
        speed = SpeedLines(n, self._spec.examples_before) if self._tells_speed and not training.is_managed else None
        self._inference.prepare(calls_of(self, ["evaluate", "generate"], sys._getframe(1)))
        # before handed.begin(): what capture and the first reads leave behind is not the script's doing
        committed, samples = training.steps(), SampleWatch(self._spec.source)
        handed.begin()
        try:
            # frame 1 of this generator is the function whose for statement asks for the next step: the script's
            for turn, step in enumerate(committed):
                done = self._told(step)
                if done.is_main and done.index and not turn:
                    say_begun_anew(done.index, sys._getframe(1), wholes(self._spec.kept))
                if speed is not None and done.is_main:
                    speed.add_step(done.index, done.loss)
                self._charts.add_step(done.index, values_of(done), is_main=done.is_main)
                with handed.script(training.session.options(), steps=done.index + 1):
                    yield done
                handed.check(sys._getframe(1))
                samples.check(sys._getframe(1))
                training.session.write(handed.written(done.index))
            self._give_back()
        except GeneratorExit:
            if not sys.is_finalizing() and not failed.is_set():
                training.session.write(handed.written(done.index))
                training.session.stop()
                for _ in committed:  # the stop flag travels with the next step's vote
                    pass
                self._give_back()
            raise
        finally:
            handed.end()
            generators.close()
            if speed is not None:
                speed.close()

    def checkpoint(self) -> None:
        """Save after the next step, beside what ``every`` says. One rank is enough to ask.

        Raises:
            UsageError: there is no ``checkpoints=``, or nothing has been trained yet.
        """
        if self._spec.checkpoints is None:
            raise UsageError('trainer.checkpoint() needs a place: Trainer(..., checkpoints="runs/a")')
        if self._training is None:
            raise UsageError("trainer.checkpoint() works inside the loop over trainer.steps(n)")
        self._handed.check(sys._getframe(1))
        self._training.session.checkpoint()

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to the charts of the newest step, such as the loss of ``evaluate``; those of the main rank count.

        Raises:
            UsageError: there is no ``loggers=``, or a value is not a number.
        """
        if not self._spec.loggers:
            raise UsageError('trainer.log(values) needs a place: Trainer(..., loggers=["tensorboard"])')
        check_number(**values)
        self._charts.more({name: float(value) for name, value in values.items()})

    def step_scheduler(self, value: float) -> None:
        """Tell ``ReduceLROnPlateau`` what was measured, such as ``step.loss`` or the loss of ``evaluate``.

        Call it on every rank after the same steps, with the same value.

        Raises:
            UsageError: the scheduler is another one, or nothing has been trained yet.
        """
        if self._training is None:
            raise UsageError("trainer.step_scheduler(value) works inside the loop over trainer.steps(n)")
        self._training.session.measure(float(value))

    def evaluate(self, dataset: Any, *, examples: int | None = None, ema: bool = False) -> Evaluation:
        """Compute the loss of another dataset, in evaluation mode, over all workers, without touching training.

        Call it on every rank at the same steps, inside the loop or after it. Losses are weighed as in training.

        Args:
            dataset: as for ``Trainer``: ``dataset[i]`` is a dict of tensors of the same shapes.
            examples: how many to evaluate. Default: all of them. Required for a dataset without ``__len__``.
            ema: with averages of the parameters in their place.

        Raises:
            UsageError: nothing has been trained yet, or ``examples`` is out of range.
            ModelError: the model computes differently in evaluation mode, so it cannot be cut at the same places.
            DataError: a sample does not match the samples that the model was captured with.
        """
        self._check_average(ema)
        training = self._begun("evaluate(dataset)")
        with self._handed.unwatched():
            work = self._inference.evaluation(dataset, examples, step=training.session.newest_step, averaged=ema)
            found = training.run_between_steps(partial(evaluate, work=work), f"evaluates {work.examples} examples")
        return evaluation_of(found, work.examples)

    def predict(
        self, dataset: Any, output: OutputsFunction = outputs_of, *, examples: int | None = None, ema: bool = False
    ) -> dict[str, Tensor] | None:
        """Compute the model's outputs for another dataset, in evaluation mode, over all workers.

        Call it on every rank at the same steps, as ``evaluate``.

        Args:
            dataset: as for ``evaluate``, with what ``forward`` needs; targets may be missing.
            output: ``fn(output, batch)`` that returns a tensor, or a dict of tensors, with a row for each example.
                Default: the output's ``logits``, else the tensor that ``forward`` returns.
            examples: as for ``evaluate``.
            ema: as for ``evaluate``.

        Returns:
            Rows by name (``"logits"``, else ``"output"``), in the order of the dataset, in host memory, on every rank.
            None if a worker was lost meanwhile, or a morph was due; the next call predicts again.

        Raises:
            UsageError, ModelError, DataError: as for ``evaluate``.
        """
        self._check_average(ema)
        training = self._begun("predict(dataset)")
        with self._handed.unwatched():
            step = training.session.newest_step
            work = self._inference.prediction(dataset, output, examples, step=step, averaged=ema)
            return training.run_between_steps(partial(predict, work=work), f"predicts {work.examples} examples")

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        eos_token_id: int | None = None,
        ema: bool = False,
    ) -> list[list[int]] | None:
        """Let a language model continue prompts, in evaluation mode, over all workers.

        Call it on every rank at the same steps, as ``evaluate``, with the same prompts. Prompt and new tokens together
        must not be longer than a training sample.

        Args:
            prompts: token ids of each, such as ``tokenizer(["Once upon"])["input_ids"]``.
            max_new_tokens: for each prompt.
            temperature: of the choice of tokens, which depends on the seed and the step; 0: the likeliest each time.
            top_k: choose among this many likeliest tokens only.
            eos_token_id: a text ends with this token.
            ema: as for ``evaluate``.

        Returns:
            Token ids of each text, with its prompt, on every rank. None if a worker was lost meanwhile, or a morph was
            due; the next call generates again.

        Raises:
            UsageError: nothing has been trained yet, a text would be too long, or an argument is out of range.
            ModelError: this is no causal language model, or it cannot be cut as in training.
        """
        self._check_average(ema)
        training = self._begun("generate(prompts, n)")
        with self._handed.unwatched():
            work = self._inference.continuation(
                prompts, max_new_tokens, temperature=temperature, top_k=top_k, end=eos_token_id, averaged=ema
            )
            doing = f"generates {max_new_tokens} tokens for {len(work.texts)} prompts"
            return training.run_between_steps(partial(generate, work=work), doing)

    def export(self, path: str | os.PathLike[str], *, ema: bool = False) -> None:
        """Write the model as safetensors under its own names. Call it on all ranks; the main one writes.

        Of a model of PEFT's only the adapter is written, as ``PeftModel.from_pretrained(base, path)`` reads it.

        Args:
            path: a ``.safetensors`` file, or a folder for ``model.safetensors`` and, if there is one, ``config.json``.
                For an adapter, a folder.
            ema: averages of the parameters in their place.

        Raises:
            UsageError: nothing has been trained yet.
            CheckpointError: the file cannot be written.
        """
        if self._training is None:
            raise UsageError("trainer.export(path) writes what trainer.steps(n) trained: run the loop first")
        self._check_average(ema)
        self._handed.check(sys._getframe(1))
        spec = self._spec

        def write(generation: Generation | None) -> None:
            if spec.built.has_adapters:
                export_adapter(generation, spec, Path(path), average=ema)
            else:
                rest = partial(unused_values, spec)
                export_model(generation, spec.partitioned, Path(path), spec.built.json, average=ema, left_over=rest)

        with self._handed.unwatched():
            self._training.export(write, Path(path))

    @property
    def _session(self) -> Session | None:
        return None if self._training is None else self._training.session

    def _give_back(self) -> None:
        """Give a model that the script has built the trained values, on every worker, after the loop."""
        built, training, model = self._given.built, self._training, self._spec.partitioned
        self._handed.end()
        if built is None or training is None:
            return
        if training.session.current is None:
            built.take_values(None)
            return
        spread = partial(spread_model, model=model, wanted=partial(built.wants, model.changing))
        if (values := training.run_between_steps(spread, "gets the trained model")) is not None:
            built.take_values(values)

    def _check_average(self, ema: bool) -> None:
        if ema and self._spec.ema is None:
            raise UsageError("ema=True needs an average: Trainer(..., ema=0.999)")

    def _whole_steps(self, n: int | None, epochs: float | None) -> int:
        """Return the steps of the whole run."""
        if (n is None) == (epochs is None):
            raise UsageError("say one of the two: trainer.steps(1000) or trainer.steps(epochs=3)")
        if n is not None:
            check_whole(n=n)
            return n
        check_number(epochs=epochs)
        if self._spec.source.size is None:
            raise UsageError(
                f"trainer.steps(epochs={epochs}) needs a dataset with a length. Say how many steps instead."
            )
        assert epochs is not None
        samples = Fraction(epochs) * self._spec.source.size
        ramp = self._spec.ramp
        return math.ceil(samples / self._spec.global_batch) if ramp is None else ramp.steps_for(samples)

    def _told(self, committed: Committed) -> Step:
        spec, step = self._spec, committed.step
        before, after = spec.examples_before(step), spec.examples_before(step + 1)
        epoch = None if spec.source.size is None else after / spec.source.size
        return step_of(committed, after - before, spec.dtype, epoch)

    def _begun(self, method: str) -> Training:
        if self._training is None:
            raise UsageError(f"trainer.{method} works inside the loop over trainer.steps(n), and after it")
        self._handed.check(sys._getframe(2))
        return self._training
