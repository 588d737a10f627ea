"""The public face: a script for one GPU, run on whatever there is."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varuna.core.errors import UsageError, VarunaError
from varuna.core.membership import Membership
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.data.collate import Collate
from varuna.data.samples import SampleSource
from varuna.engine.connect import open_store, solo_from_environment
from varuna.engine.export import export_model
from varuna.engine.optimizer import NamedParameters, OptimizerFactory, SchedulerFactory
from varuna.engine.saving import Saver, check_writable
from varuna.engine.session import Committed, Session
from varuna.engine.stage import Job
from varuna.intercept import offer
from varuna.partition.beginning import Beginning, Init, begin_with, check_beginning
from varuna.partition.capture import LossFunction, MetricsFunction, Recipe
from varuna.partition.initialise import Initial, needed_buffers
from varuna.partition.model import PartitionedModel, partition
from varuna.partition.modules import chooser
from varuna.partition.weighing import WeightFunction, check_weighing

if TYPE_CHECKING:
    from varuna.fleet.member import Member

_CAPTURED_SAMPLES = 2
_DEFAULT_EVERY = timedelta(minutes=10)


@dataclass(frozen=True)
class Step:
    """A committed step, the same on every rank."""

    index: int
    """from 0"""
    loss: float
    """of the global batch: weighted mean over its targets (or examples)"""
    examples: int
    """in the global batch"""
    grad_norm: float
    """global L2 norm before clipping"""
    lr: float
    """of the first parameter group, as used in this step"""
    metrics: Mapping[str, float]
    """sums over the global batch"""
    generation: int
    """a redone step comes again with a higher one"""
    plan: Plan
    is_main: bool
    """true on one rank"""


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
        cut_points: int | None = None,
        cut_at: Sequence[str] | None = None,
        before_step: Callable[[NamedParameters], None] | None = None,
        metrics: MetricsFunction | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | timedelta | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        """Describe the job; nothing is built before ``steps``.

        Args:
            model: builds the unmodified module. ``forward(**sample)`` returns a scalar loss or an object with
                ``.loss``, unless ``loss`` is given.
            dataset: map-style; ``dataset[i]`` is a dict of tensors. Without ``__len__`` it is read in order.
            optimizer: builds a torch optimizer from a list of (name, parameter), the names being the model's own;
                called on each worker with the parameters of its stage.
            global_batch: examples per optimizer step, whatever the workers.
            loss: ``fn(output, batch)``, a scalar mean.
            weight: ``fn(batch)``: how much a micro-batch counts. Default: the targets that the model's cross-entropy
                averages over, else examples.
            collate: list of samples -> dict of tensors whose first dimension is the batch. Default: stack.
            seed: of initialisation, sample order and dropout.
            weights: safetensors file or folder (as of ``save_pretrained``) to start from; each worker reads what its
                stage needs.
            init: without ``weights``: ``"constructor"`` builds the model once per worker, in turn; ``"per_parameter"``
                draws every parameter by itself, so that no worker ever holds the whole model.
            lr_scheduler: builds a torch scheduler from the optimizer; steps once per committed step.
            clip_grad_norm: largest global L2 norm of the gradients.
            micro_batch: examples that flow through the pipeline at a time. Default: chosen once for the run.
            cut_points: wished number of places where the model may be cut. Default: wherever little crosses.
            cut_at: names of modules, as in ``named_modules()``: cut where each is entered, and nowhere else.
            before_step: sees the (name, parameter) list with reduced, clipped gradients before the optimizer.
            metrics: ``fn(output, batch)`` -> named scalar sums, added up over the global batch.
            checkpoint_dir: folder for checkpoints. Given: the same command resumes.
            checkpoint_every: steps (int) or time between checkpoints. Default: 10 minutes.
            device: default: this worker's GPU if there is one, else the CPU.

        Raises:
            UsageError: an argument is out of range.
            DataError: the dataset cannot be read by index.
        """
        _watch_exceptions()
        _check(global_batch, micro_batch, clip_grad_norm, cut_points, checkpoint_dir, checkpoint_every)
        check_beginning(init, weights)
        self.recipe = Recipe(model, loss, metrics)
        self._init, self._weights = init, None if weights is None else Path(weights).absolute()
        self._source = SampleSource(dataset, seed=seed, collate=collate)
        self._optimizer, self._scheduler, self._weight = optimizer, lr_scheduler, weight
        self._global_batch, self._micro_batch, self._cut_points = global_batch, micro_batch, cut_points
        self._choose = chooser(cut_at, cut_points)
        self._seed, self._clip, self._before_step = seed, clip_grad_norm, before_step
        self._directory = None if checkpoint_dir is None else Path(checkpoint_dir).absolute()
        self._every = checkpoint_every if checkpoint_every is not None else _DEFAULT_EVERY
        self._device = torch.device(device) if device is not None else _default_device()
        self._session: Session | None = None
        self._model: PartitionedModel | None = None

    def steps(self, n: int) -> Iterator[Step]:
        """Train until the run is ``n`` steps long; a resumed run yields what is left of it.

        Leaving the loop early on any rank ends it on all of them, behind the next step.

        Raises:
            ModelError: the model cannot be captured or weighed.
            NoPlanError: no plan fits.
            CheckpointError: the directory cannot be used, or no checkpoint in it can be trusted.
            FleetError: the manager refused this worker or ended the run.
            LinkError: a peer is gone and nobody replaces it (torchrun).
        """
        if n < 0 or self._session is not None:
            raise UsageError("trainer.steps(n) takes the whole length of the run, n >= 0, and can be called once")
        offer(self, n)
        membership = _manager() or solo_from_environment()
        session = self._start(n, membership)
        committed = session.steps()
        try:
            for step in committed:
                yield self._step(step)
        except GeneratorExit:
            if not sys.is_finalizing() and not _failed.is_set():
                session.stop()
                for _ in committed:  # the stop flag travels with the next step's vote
                    pass
            raise

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model as safetensors under its own names; call it on all ranks, the main one writes.

        Args:
            path: a ``.safetensors`` file, or a folder that gets ``model.safetensors``.

        Raises:
            UsageError: nothing has been trained yet.
            CheckpointError: the file cannot be written.
        """
        if self._session is None or self._model is None:
            raise UsageError("trainer.export(path) writes what trainer.steps(n) trained: run the loop first")
        export_model(self._session.current, self._model, Path(path))

    # -- for tools that look at a job -----------------------------------------------------------------------

    def partition(self) -> PartitionedModel:
        """Capture the model and cut it into sections, as ``steps`` does.

        Raises:
            ModelError: the model cannot be captured, or not be cut where ``cut_at`` says.
        """
        self._model = partition(
            self.recipe,
            self.batch(_CAPTURED_SAMPLES),
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
        return self._begin(self._model or self.partition()).whole()

    def job(self, model: PartitionedModel, buffers: Mapping[str, Tensor]) -> Job:
        """What the engine needs to know."""
        return Job(
            model=model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            seed=self._seed,
            clip_grad_norm=self._clip,
            before_step=self._before_step,
            buffers={name: value.to(self._device) for name, value in buffers.items()},
            device=self._device,
        )

    # -- inside ---------------------------------------------------------------------------------------------

    def _start(self, n: int, membership: Membership) -> Session:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        if self._directory is not None:
            check_writable(self._directory)
        model = self.partition()
        beginning = self._begin(model)
        facts = JobFacts(
            model=model.facts,
            global_batch=self._global_batch,
            micro_batch=self._micro_batch,
            seed=self._seed,
            initialisation=beginning.name,
            steps=n,
            metrics=model.metrics,
            checkpoint_dir=None if self._directory is None else str(self._directory),
            threads=torch.get_num_threads(),
        )
        buffers = beginning.buffers(needed) if (needed := needed_buffers(model)) else {}
        job = self.job(model, buffers)
        saver = None if self._directory is None else Saver(self._directory, self._every, membership.saved)
        self._session = Session(
            job,
            facts,
            membership,
            self._source,
            weight=self._weight,
            saver=saver,
            initial=lambda names, checks: beginning.parameters(names, self._check_weighing if checks else None),
            connect=lambda assignment: open_store(membership, assignment),
            interface_host="127.0.0.1",
        )
        atexit.register(self._session.close)
        return self._session

    def _begin(self, model: PartitionedModel) -> Beginning:
        return begin_with(
            self.recipe,
            model.shapes,
            seed=self._seed,
            init=self._init,
            weights=self._weights,
            digest=model.facts.digest,
        )

    def _check_weighing(self, initial: Initial) -> None:
        assert self._model is not None
        check_weighing(self._model, self.recipe, initial, self._source, self._weight)

    def _step(self, committed: Committed) -> Step:
        totals = committed.totals
        return Step(
            index=committed.step,
            loss=totals.loss,
            examples=self._global_batch,
            grad_norm=totals.grad_norm,
            lr=totals.lr,
            metrics=totals.metrics,
            generation=committed.generation,
            plan=committed.plan,
            is_main=committed.is_main,
        )


def _check(
    global_batch: int,
    micro_batch: int | None,
    clip_grad_norm: float | None,
    cut_points: int | None,
    checkpoint_dir: object,
    checkpoint_every: int | timedelta | None,
) -> None:
    """Refuse arguments that can be seen to be wrong before anything is built."""
    if global_batch < 1:
        raise UsageError(f"global_batch={global_batch}: it is the number of examples per step, at least 1")
    if micro_batch is not None and not 1 <= micro_batch <= global_batch:
        raise UsageError(
            f"micro_batch={micro_batch} must lie between 1 and global_batch={global_batch}. Lower it, or leave it out."
        )
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UsageError(f"clip_grad_norm={clip_grad_norm} must be above 0; leave it out for no clipping")
    if cut_points is not None and cut_points < 1:
        raise UsageError(f"cut_points={cut_points} must be at least 1; leave it out for all good places")
    if checkpoint_every is not None and checkpoint_dir is None:
        raise UsageError("checkpoint_every= needs checkpoint_dir=, the folder to save to")
    every = checkpoint_every.total_seconds() if isinstance(checkpoint_every, timedelta) else checkpoint_every
    if every is not None and every <= 0:
        raise UsageError(f"checkpoint_every={checkpoint_every} must be above 0: steps (int) or a timedelta")


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


_failed = threading.Event()


@cache
def _manager() -> "Member | None":
    """The manager's client under ``varuna run`` or an agent; None under torchrun and alone."""
    if "VARUNA_MANAGER" not in os.environ:
        return None
    from varuna.fleet.member import from_environment

    return from_environment()


@cache
def _watch_exceptions() -> None:
    """Tell the manager of an exception that ends this script, before Python prints it."""
    previous, manager = sys.excepthook, _manager()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _failed.set()
        if manager is not None:
            expected = isinstance(error, VarunaError)
            summary = str(error) if expected else f"{kind.__name__}: {error}"
            text = "" if expected else "".join(traceback.format_exception(kind, error, trace))
            manager.failed(summary, text, error.exit_code if isinstance(error, VarunaError) else 1)
        previous(kind, error, trace)

    sys.excepthook = hook
