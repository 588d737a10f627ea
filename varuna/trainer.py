"""The public interface: ``Trainer`` runs a script for one GPU on whatever devices there are."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varuna.checks.mixing import check_mixing
from varuna.checks.selfcheck import SelfCheck
from varuna.core.errors import UsageError
from varuna.core.membership import Membership
from varuna.core.model import JobFacts, Links, Offload
from varuna.core.precision import Precision, Reduction
from varuna.data.collate import Collate
from varuna.data.samples import SampleSource
from varuna.engine.base.compute_process import settle
from varuna.engine.graphs.compiled import compiler_of
from varuna.engine.links.traffic import traffic_of
from varuna.engine.stage.job import Job
from varuna.engine.stage.optimizer import NamedParameters, OptimizerFactory, SchedulerFactory
from varuna.engine.stage.precision import DTYPES, cast, unit_near
from varuna.engine.worker.evaluate import EvaluationWork
from varuna.engine.worker.export import export_model
from varuna.engine.worker.session import Session
from varuna.engine.worker.snapshotter import Snapshotter, check_writable
from varuna.job import arguments as given
from varuna.job.model_config import Configured
from varuna.job.script_runner import offer
from varuna.membership.detect import solo_from_environment
from varuna.membership.launched import at_end, failed, manager, watch_exceptions
from varuna.partition.batch_weight import WeightFunction, weight_of
from varuna.partition.capture.capture import LossFunction, MetricsFunction, Recipe
from varuna.partition.cut_at import chooser
from varuna.partition.evaluation import for_evaluation
from varuna.partition.initial.constructor import Initial, needed_buffers
from varuna.partition.initial.initial_values import Init, InitialParameters, begin_with, check_beginning
from varuna.partition.lengths import check_lengths, partition_lengths
from varuna.partition.model import PartitionedModel
from varuna.partition.on_device import on_device
from varuna.results import Evaluation, Step, evaluation_of, step_of
from varuna.store import opening

_CAPTURED_SAMPLES = 2
_DEFAULT_EVERY = timedelta(minutes=10)


class Trainer:
    """Trains an unmodified model on one device, or on any number of workers that come and go."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        dataset: Any,
        optimizer: OptimizerFactory,
        global_batch: int,
        *,
        loss: LossFunction | None = None,
        weight: WeightFunction | None = None,
        collate: Collate | None = None,
        seed: int = 0,
        weights: str | os.PathLike[str] | None = None,
        init: Init = "constructor",
        lr_scheduler: SchedulerFactory | None = None,
        clip_grad_norm: float | None = None,
        micro_batch: int | None = None,
        per_micro_batch: bool = False,
        cut_points: int | None = None,
        cut_at: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        before_step: Callable[[NamedParameters], None] | None = None,
        metrics: MetricsFunction | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | timedelta | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        upload_bytes_per_s: float | None = None,
        device: str | torch.device | None = None,
        links: Links = "host",
        precision: Precision = "fp32",
        reduction: Reduction = "fp32",
        compile: bool | str = False,
        offload_optimizer: bool = False,
        shard_optimizer: bool = False,
    ) -> None:
        """Describe the job. Nothing is built before ``steps`` is called.

        Args:
            model: builds the unmodified module. ``forward(**sample)`` returns a scalar loss or an object
                with ``.loss``, unless ``loss`` is given.
            dataset: map-style; ``dataset[i]`` is a dict of tensors. Without ``__len__`` it is read in order.
            optimizer: builds a torch optimizer from a list of (name, parameter), with the model's own names; each
                worker calls it with the parameters of its stage.
            global_batch: examples per optimizer step, whatever the number of workers.
            loss: ``fn(output, batch)`` that returns a scalar mean.
            weight: ``fn(batch)``: how much a micro-batch counts. Default: what its loss averages over, term by term.
            collate: from a list of samples to a dict of tensors whose first dimension is the batch. Default: stack.
            seed: seed of initialisation, sample order and dropout.
            weights: safetensors file, or folder written by ``save_pretrained``, to start from; each worker reads what
                its stage needs.
            init: without ``weights``: ``"constructor"`` builds the model once per worker, in turn; ``"per_parameter"``
                draws every parameter separately, so that no worker ever holds the whole model.
            lr_scheduler: builds a torch scheduler from the optimizer; it advances once per committed step.
            clip_grad_norm: largest global L2 norm of the gradients.
            micro_batch: examples per micro-batch, m. Default: chosen once for the run. Batch normalisation needs it.
            per_micro_batch: with ``micro_batch``: compute a loss that mixes examples within each micro-batch.
            cut_points: number of places where the model may be cut. Default: every place where few bytes cross.
            cut_at: names of modules, as in ``named_modules()``: cut where each is entered, and nowhere else.
            lengths: sizes that dimension 1 of the collated tensors may have, one for all of a micro-batch. Default: the
                first samples' only.
            before_step: receives the (name, parameter) list with reduced, clipped gradients before the optimizer.
            metrics: ``fn(output, batch)`` that returns named scalar sums; they are added up over the global batch.
            checkpoint_dir: folder or URL (``s3://``, ``gs://``, ``az://``). The same command then resumes from it.
            checkpoint_every: steps (int) or time between checkpoints. Default: 10 minutes.
            keep_last: number of newest checkpoints to keep.
            keep_every: also keep, for good, the checkpoints whose step is a multiple of this.
            upload_bytes_per_s: limit on what a worker sends to a bucket, to leave some of the network to training.
            device: where to compute. Default: this worker's GPU if there is one, else the CPU.
            links: ``"nccl"`` sends from GPU to GPU where each has one worker. Default: through host memory.
            precision: ``"bf16"`` or ``"fp16"``: compute and send in it, as ``model.to(dtype)`` does, over parameters,
                optimizer state and sums of gradients in fp32; fp16 scales the loss dynamically.
            reduction: ``"bf16"`` sends gradients between replicas, summed in fp32, as bf16, which halves the bytes.
                Losses then depend on the number of replicas by that rounding.
            compile: compile every section once per process with inductor, or with another backend of ``torch.compile``,
                by its name. Backwards are then never split.
            offload_optimizer: keep optimizer state, and with half precision the fp32 parameters, in host memory; at the
                end of a step they pass through the device section by section. Same numbers.
            shard_optimizer: distribute the optimizer's state, and with half precision the fp32 parameters, over the
                replicas of a stage. Two replicas hold every part, so that a lost VM costs no step. Same numbers.

        Raises:
            UsageError: an argument is out of range, or inductor lacks a compiler on this machine.
            DataError: the dataset cannot be read by index.
        """
        watch_exceptions()
        given.check_functions(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, loss=loss)
        given.check_arguments(global_batch, micro_batch, clip_grad_norm, cut_points, precision, reduction, links)
        given.check_state(offload_optimizer, shard_optimizer, precision, sees_gradients=before_step is not None)
        given.check_checkpoint_arguments(checkpoint_dir, checkpoint_every, keep_last, keep_every, upload_bytes_per_s)
        check_beginning(init, weights)
        self._precision, self.reduction, self._offloads = precision, reduction, offload_optimizer
        self.shares_state = shard_optimizer
        self._device, self._links = given.choose_device(device), links
        self._compiler, self._build = compiler_of(compile, self._device), Configured(model)
        self.recipe = Recipe(self._build, loss, metrics, DTYPES[precision])
        self._init, self._weights = init, None if weights is None else Path(weights).absolute()
        self._source, self._collate = SampleSource(dataset, seed=seed, collate=collate), collate
        self._optimizer, self._scheduler, self._weight = optimizer, lr_scheduler, weight
        self.checks = SelfCheck(self.recipe, self._source, weight, micro_batch, per_micro_batch, self._device.type)
        self._global_batch, self._micro_batch, self._cut_points = global_batch, micro_batch, cut_points
        self._choose, self._lengths = chooser(cut_at, cut_points), check_lengths(lengths)
        self._seed, self._clip, self.before_step = seed, clip_grad_norm, before_step
        self._directory = None if checkpoint_dir is None else opening.location(checkpoint_dir)
        self._keep_last, self._keep_every, self._upload_bytes_per_s = keep_last, keep_every, upload_bytes_per_s
        self._every = checkpoint_every if checkpoint_every is not None else _DEFAULT_EVERY
        self._session: Session | None = None
        self._model: PartitionedModel | None = None
        self._evaluated: tuple[PartitionedModel, dict[str, Tensor]] | None = None  # in evaluation mode; its own buffers
        self._evaluations = 0

    def steps(self, n: int) -> Iterator[Step]:
        """Train until the whole run has ``n`` steps, and yield each; a resumed run yields the steps that are left.

        Any rank may break out of the loop; all ranks then stop together after the next step.

        Raises:
            ModelError: the model cannot be captured or weighed.
            NoPlanError: no plan fits.
            CheckpointError: the directory cannot be used, or no checkpoint in it can be trusted.
            FleetError: the manager refused this worker or ended the run.
            LinkError: a peer is gone and nothing replaces it (torchrun).
        """
        given.check_steps(n, started=self._session is not None)
        offer(self, n)
        membership = manager() or solo_from_environment()
        session = self._start(n, membership)
        committed = session.steps()
        try:
            for step in committed:
                yield step_of(step, self._global_batch, self.recipe.dtype)
        except GeneratorExit:
            if not sys.is_finalizing() and not failed.is_set():
                session.stop()
                for _ in committed:  # the stop flag travels with the next step's vote
                    pass
            raise

    def evaluate(self, dataset: Any, *, examples: int | None = None) -> Evaluation:
        """Compute the loss of another dataset, in evaluation mode, over all workers, without touching training.

        Call it on every rank at the same steps, inside the loop or after it. Losses are weighed as in training.

        Args:
            dataset: as for ``Trainer``: ``dataset[i]`` is a dict of tensors of the same shapes.
            examples: how many to evaluate. Default: all of them. Required for a dataset without ``__len__``.

        Raises:
            UsageError: nothing has been trained yet, or ``examples`` is out of range.
            ModelError: the model computes differently in evaluation mode, so it cannot be cut at the same places.
            DataError: a sample does not match the samples that the model was captured with.
        """
        if self._session is None or self._model is None:
            raise UsageError("trainer.evaluate(dataset) works inside the loop over trainer.steps(n), and after it")
        source = SampleSource(dataset, seed=self._seed, collate=self._collate)
        count = given.check_examples(examples, source.size)
        if self._evaluated is None:
            model = for_evaluation(self._model, self.recipe, self.batch(_CAPTURED_SAMPLES))
            needed = needed_buffers(model) - needed_buffers(self._model)
            buffers = self.beginning(self._model).buffers(needed) if needed else {}
            self._evaluated = on_device(model, self._device), self._cast(buffers)
        self._evaluations += 1
        found = self._session.evaluate(EvaluationWork(self._evaluations, *self._evaluated, source, count, self._weight))
        return evaluation_of(found, count)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model as safetensors under its own names. Call it on all ranks; the main one writes.

        Args:
            path: a ``.safetensors`` file, or a folder for ``model.safetensors`` and, if there is one, ``config.json``.

        Raises:
            UsageError: nothing has been trained yet.
            CheckpointError: the file cannot be written.
        """
        if self._session is None or self._model is None:
            raise UsageError("trainer.export(path) writes what trainer.steps(n) trained: run the loop first")
        export_model(self._session.current, self._model, Path(path), self._build.json)

    # -- for tools that look at a job -----------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return self._device

    @property
    def offload(self) -> Offload:
        """Where the optimizer's state lives."""
        apart: Offload = "host" if self.memory_apart else "same memory"
        return apart if self._offloads else "none"

    @property
    def memory_apart(self) -> bool:
        """Whether the device has memory of its own, beside the host's."""
        return self._device.type != "cpu"

    @property
    def global_batch(self) -> int:
        """Examples per step, M."""
        return self._global_batch

    @property
    def micro_batch(self) -> int | None:
        """m, if the user fixed it."""
        return self._micro_batch

    @property
    def compiled(self) -> str | None:
        """The backend of ``torch.compile`` that sections go through."""
        return None if self._compiler is None else str(self._compiler.backend)

    def partition(self) -> PartitionedModel:
        """Capture the model and cut it into sections, as ``steps`` does.

        Raises:
            ModelError: the model cannot be captured, or not be cut where ``cut_at`` says.
        """
        self._model = partition_lengths(
            self.recipe,
            self.batch(_CAPTURED_SAMPLES),
            self._lengths,
            optimizer=self._optimizer,
            cut_points=self._cut_points,
            count_targets=self._weight is None,
            on_cpu=self._device.type == "cpu",
            choose=self._choose,
        )
        return self._model

    def batch(self, examples: int) -> dict[str, Tensor]:
        """The first ``examples`` samples of the run, collated."""
        return self._source.micro_batch(range(examples)).tensors

    def initial(self) -> Initial:
        """The whole model as it is before step 0."""
        initial = self.beginning(self._model or self.partition()).whole()
        return initial if self._precision == "fp32" else initial.to(self.recipe.dtype)

    def beginning(self, model: PartitionedModel) -> InitialParameters:
        """Where first values come from."""
        return begin_with(
            self.recipe,
            model.shapes,
            seed=self._seed,
            init=self._init,
            weights=self._weights,
            digest=model.facts.digest,
        )

    def job(self, model: PartitionedModel, buffers: Mapping[str, Tensor]) -> Job:
        """What the engine needs to know."""
        return Job(
            model=model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            seed=self._seed,
            clip_grad_norm=self._clip,
            before_step=self.before_step,
            buffers=self._cast(buffers),
            device=self._device,
            dtype=self.recipe.dtype,
            unit=self._unit(model, buffers) if self._precision == "fp16" else 1.0,
            rounds=self.reduction == "bf16",
            compiler=self._compiler,
            offload=self._offloads,
            traffic=traffic_of(self._device, self._links),
            share=self.shares_state,
        )

    def session(
        self,
        n: int,
        membership: Membership,
        model: PartitionedModel,
        beginning: InitialParameters,
        *,
        saver: Snapshotter | None = None,
        global_batch: int | None = None,
    ) -> Session:
        """A worker's life, to be run: of this job, or of a rehearsal with another batch and beginning.

        Without ``saver`` no checkpoint is read or written.
        """
        facts = JobFacts(
            model=model.facts,
            global_batch=global_batch or self._global_batch,
            micro_batch=self._micro_batch,
            seed=self._seed,
            initialisation=beginning.name,
            steps=n,
            metrics=model.metrics,
            checkpoint_dir=None if saver is None else self._directory,
            config=self._build.json,
            keep_last=self._keep_last,
            keep_every=self._keep_every,
            threads=torch.get_num_threads(),
            precision=self._precision,
            reduction=self.reduction,
            compiled=self.compiled,
            offload_optimizer=self.offload,
            combines=model.facts.combines or self.before_step is not None,
            links=self._links,
            memory_apart=self.memory_apart,
            shard_optimizer=self.shares_state,
        )
        buffers = beginning.buffers(needed) if (needed := needed_buffers(model)) else {}
        return Session(
            self.job(on_device(model, self._device), buffers),
            facts,
            membership,
            self._source,
            weight=self._weight,
            saver=saver,
            initial=lambda names, checks: beginning.parameters(
                names, partial(self.checks.run, model) if checks else None
            ),
            connect=lambda assignment: membership.store(assignment.generation),
            interface_host=os.environ.get("VARUNA_INTERFACE", "127.0.0.1"),
            patience=given.patience(),
        )

    # -- inside ---------------------------------------------------------------------------------------------

    def _start(self, n: int, membership: Membership) -> Session:
        given.check_links(self._links, self._device)
        settle(self._device)
        saver = None
        if self._directory is not None:
            store = opening.open_store(self._directory, upload_bytes_per_s=self._upload_bytes_per_s)
            check_writable(store)
            saver = Snapshotter(store, self._every, membership.saved, membership.unsaved)
        given.check_normalisation(self._micro_batch, batch_dependent=(model := self.partition()).facts.batch_dependent)
        check_mixing(model, self._micro_batch, accepted=self.checks.per_micro_batch)
        self._session = self.session(n, membership, model, self.beginning(model), saver=saver)
        at_end(self._session.leave, self._session.close)
        return self._session

    def _cast(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: cast(value.to(self._device), self.recipe.dtype) for name, value in buffers.items()}

    def _unit(self, model: PartitionedModel, buffers: Mapping[str, Tensor]) -> float:
        """A power of two near the weight of a global batch: seeds of B are then those of a mean, not of a sum."""
        counted = weight_of(model, self._weight, self.batch(_CAPTURED_SAMPLES), buffers) or _CAPTURED_SAMPLES
        return unit_near(counted * self._global_batch / _CAPTURED_SAMPLES)
