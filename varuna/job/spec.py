"""A job: everything that a script says to its Trainer, checked, and what tools learn from it."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from varuna.checks.selfcheck import OTHER_DRAWS, SelfCheck
from varuna.checks.update import UpdateCheck
from varuna.core.errors import ModelError, UsageError
from varuna.core.model import Memory, Network
from varuna.core.precision import PRECISIONS, Precision
from varuna.data.columns import STEP
from varuna.data.ramp import Ramp, RampFunction
from varuna.data.samples import LOOKED_AT, SampleSource
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.stage.job import Frozen
from varuna.engine.stage.optimizer import BeforeStep, OptimizerFactory, SchedulerFactory
from varuna.engine.stage.precision import DTYPES, cast
from varuna.engine.worker.loop_state import Kept, Stateful
from varuna.job.arguments import check_function, check_kind, check_number, check_whole, choose_device, described
from varuna.job.built import GivenModel, SchedulerLike, WithLoss, loss_of
from varuna.job.charts import Tracker
from varuna.job.given_optimizer import OptimizerLike
from varuna.job.handed_over.code_reads import ReadPlace, Reads
from varuna.job.handed_over.schedules import steering_of_loop
from varuna.job.model_config import Configured
from varuna.job.options import Checkpoints, Collate, EmaFrom, Loss, OnNan, Publish, Weights
from varuna.job.shared_capture import captured_once
from varuna.partition.after_step import AfterStep
from varuna.partition.capture.capture import MetricsFunction, Recipe
from varuna.partition.capture.signature import input_names
from varuna.partition.cut_at import chooser
from varuna.partition.initial.constructor import Initial
from varuna.partition.initial.initial_values import Init, InitialParameters, begin_with, check_beginning
from varuna.partition.lengths import check_lengths, partition_lengths
from varuna.partition.model import PartitionedModel
from varuna.partition.optimizers import AveragingFactory
from varuna.partition.parameter_marks import Marked
from varuna.partition.written.key import capture_key, recipe_digest
from varuna.process.garbage import old_left_out
from varuna.store.opening import location

CAPTURED_SAMPLES = 2


@dataclass(frozen=True, eq=False)
class JobSpec:
    """A job: a Trainer's arguments (see there), each in its full form.

    Raises:
        UsageError: one of them is out of range, or two of them exclude each other.
        DataError: the dataset cannot be read by index.
    """

    model: Callable[[], nn.Module]
    dataset: Any
    optimizer: OptimizerFactory
    global_batch: int
    _: KW_ONLY
    batch_ramp: RampFunction | None = None
    loss: Loss = field(default_factory=Loss)
    metrics: MetricsFunction | None = None
    collate: Collate = field(default_factory=Collate)
    num_workers: int | None = None
    micro_batch: int | None = None
    seed: int = 0
    weights: Weights | None = None
    init: Init = "constructor"
    lr_scheduler: SchedulerFactory | None = None
    clip_grad_norm: float | None = None
    ema: float | None = None
    ema_from: EmaFrom = "start"
    on_nan: OnNan = "stop"
    frozen: Frozen | None = None
    before_step: BeforeStep | None = None
    after_step: AfterStep | None = None
    cut: int | Sequence[str] | None = None
    checkpoints: Checkpoints | None = None
    publish: Publish | None = None
    state: Mapping[str, Kept] | None = None
    loggers: Sequence[str | Tracker] = ()
    device: torch.device = field(default_factory=choose_device)
    precision: Precision = "fp32"
    compiler: Compiler | None = None
    memory: Memory = field(default_factory=Memory)
    network: Network = field(default_factory=Network)
    trains_nothing_else: bool = False
    """no parameter beside the model's is trained: the script's optimizer is built"""

    def __post_init__(self) -> None:
        for name in (
            "model",
            "optimizer",
            "lr_scheduler",
            "metrics",
            "batch_ramp",
            "frozen",
            "before_step",
            "after_step",
        ):
            check_function(name, getattr(self, name))
        self._check_numbers()
        self._check_cut()
        check_kind("memory", Memory, self.memory)
        check_kind("network", Network, self.network)
        self._check_publish()
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if self.on_nan not in get_args(OnNan):
            raise UsageError(f"on_nan={self.on_nan!r} must be one of {', '.join(get_args(OnNan))}")
        if self.ema_from not in get_args(EmaFrom):
            raise UsageError(f"ema_from={self.ema_from!r} must be one of {', '.join(get_args(EmaFrom))}")
        self._check_before_step()
        self._check_after_step()
        self._check_state()
        if self.precision != "fp32" and isinstance(self.model, GivenModel) and self.model.is_quantized:
            raise UsageError(
                f"precision={self.precision!r} would round the scales of a quantized base. Leave it out, and load the "
                "base in the dtype that it shall compute in, such as dtype=torch.bfloat16; adapters train in float32."
            )
        weights = self.weights
        check_beginning(self.init, None if weights is None else weights.path, may_miss=self._may_miss)
        _ = self.source

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of computation, and of what crosses links."""
        return DTYPES[self.precision]

    @property
    def samples(self) -> int:
        """Number of samples on which the order depends; 0: none, since the dataset has no length."""
        return self.source.order_length or 0

    @property
    def memory_apart(self) -> bool:
        """Whether the device has memory of its own, beside the host's."""
        return self.device.type != "cpu"

    @property
    def compiled(self) -> str | None:
        """The backend of ``torch.compile`` that sections go through."""
        return None if self.compiler is None else str(self.compiler.backend)

    @property
    def is_steered(self) -> bool:
        """Whether the training loop may write options of the optimizer's groups: it has the optimizer."""
        return isinstance(self.optimizer, OptimizerLike)

    @cached_property
    def built(self) -> Configured:
        """Builds the model; knows the configuration of what it has built."""
        return Configured(self.model)

    @cached_property
    def recipe(self) -> Recipe:
        """The model with its loss, as it is captured."""
        return replace(self._recipe, sizes=self.source.sizes(self.micro_batch))

    @cached_property
    def _recipe(self) -> Recipe:
        """The same, as far as no sample has to be read for it."""
        own = self.model.own if isinstance(self.model, GivenModel) else None
        if isinstance(self.model, WithLoss):
            own = self.model.loss
        loss, closed = loss_of(self.loss.function), self.trains_nothing_else
        return Recipe(self.built, loss, self.metrics, self.dtype, own=own, trains_nothing_else=closed)

    @cached_property
    def fixed_micro_batch(self) -> int | None:
        """Examples of every micro-batch: what the user said, or 1 where batches are lists of samples.

        Raises:
            UsageError: a global batch does not consist of such lists.
        """
        samples = None if self.recipe.sizes is None else self.recipe.sizes.samples
        if samples is not None and self.global_batch % samples:
            raise UsageError(
                f"collate= makes lists with an entry for each sample, and micro_batch={samples} of them does not "
                f"divide global_batch={self.global_batch}. Pass one that does, or leave it out for lists of one."
            )
        return self.micro_batch if samples is None else samples

    @cached_property
    def update(self) -> OptimizerFactory:
        """Builds the optimizer, with averages if they are wanted."""
        marked = Marked(self.optimizer, self.built.marks)
        return marked if self.ema is None else AveragingFactory(marked, self.ema, self.ema_from == "start")

    @cached_property
    def source(self) -> SampleSource:
        """Reads the samples."""
        return self._reader_of(self.dataset, lambda position: position // self.global_batch)

    @cached_property
    def ramp(self) -> Ramp | None:
        """Numbers of samples of the steps, where they differ."""
        return None if self.batch_ramp is None else Ramp(self.batch_ramp, self.global_batch)

    @cached_property
    def training_source(self) -> SampleSource:
        """Reads the samples of steps: fewer than positions, where the batch ramps."""
        if self.ramp is None:
            return self.source
        return self._reader_of(self.dataset, lambda position: position // self.global_batch, ramp=self.ramp)

    def examples_before(self, step: int) -> int:
        """Return the examples of all steps before one."""
        return step * self.global_batch if self.ramp is None else self.ramp.before(step)

    @cached_property
    def checks(self) -> SelfCheck:
        """The checks of the job before step 0."""
        # One step for all samples of the check, which is of one micro-batch: the newest that any of them belongs to.
        step = (LOOKED_AT - 1) // self.global_batch
        return SelfCheck(
            self.recipe,
            self.reader_of(self.dataset, step=step),
            self.loss.weight,
            self.fixed_micro_batch,
            self.loss.per_micro_batch,
            self.device.type,
            lambda: _numbers({"dataset": self.dataset, "collate=": self.collate.function}),
            lambda: _numbers({"model": self._script_model, "loss=": self.loss.function, "metrics=": self.metrics}),
            self._notes,
        )

    def _notes(self) -> Iterator[str]:
        """Say what trains in another way than in some plain loops."""
        if self.update_check.draws:
            yield f"before_step= or the optimizer draws random numbers, {OTHER_DRAWS}"
        if self.ema is not None and self.ema_from == "start":
            yield (
                f"ema={self.ema} begins with the parameters before the first step, as a copy of the model does (timm); "
                'with ema_from="first step", with those after it, as torch\'s AveragedModel does'
            )

    @property
    def _script_model(self) -> nn.Module | None:
        return self.model.module if isinstance(self.model, GivenModel) else None

    @cached_property
    def kept(self) -> Mapping[str, Kept]:
        """Objects of the script that hold state of the run: those of ``state=``, and what steers its loop's rates."""
        named = dict(self.state or {})
        if not (isinstance(self.optimizer, OptimizerLike) and self.optimizer.in_loop):
            return named
        passed = [self.lr_scheduler.whole] if isinstance(self.lr_scheduler, SchedulerLike) else []
        return {**steering_of_loop(self.optimizer.whole, [*named.values(), *passed]), **named}

    @cached_property
    def update_check(self) -> UpdateCheck:
        """The checks of the update before it is made."""
        return UpdateCheck(
            self.partitioned,
            self.update,
            self.lr_scheduler,
            self.before_step,
            self.built.marks,
            self.seed,
            self.device,
            self.frozen,
            self.after_step,
            list((self.state or {}).values()),
        )

    @cached_property
    def partitioned(self) -> PartitionedModel:
        """The model, captured and cut into sections.

        Raises:
            ModelError: it cannot be captured, or not be cut where ``cut`` says.
        """
        batch = self.captured_batch
        given = (
            *(self.model, self.loss.function, self.metrics, self.dtype, batch, self.collate.lengths),
            *(self.optimizer, self.ema, self.after_step, self.cut, self.loss.weight is None, self.memory_apart),
            None if self.recipe.sizes is None else astuple(self.recipe.sizes),
        )
        return captured_once(given, lambda: self._partition(batch), built=self.built, key=lambda: self.key_of(batch))

    def key_of(self, batch: Mapping[str, Tensor], *more: object) -> str | None:
        """Return the key by which other workers know a capture of this job's model; ``more`` also decides on it."""
        options = self.collate.lengths, self.cut, self.ema is None, self.loss.weight is None, self.memory_apart, more
        return None if self._recipe_digest is None else capture_key(self._recipe_digest, batch, options)

    @cached_property
    def _recipe_digest(self) -> str | None:
        return recipe_digest(self.recipe, self.optimizer, self.loss.weight, self.after_step)

    def _partition(self, batch: dict[str, Tensor]) -> PartitionedModel:
        with old_left_out():
            return partition_lengths(
                self.recipe,
                batch,
                check_lengths(self.collate.lengths),
                optimizer=self.update,
                cut_points=None if self.cut is None or isinstance(self.cut, Sequence) else self.cut,
                count_targets=self.loss.weight is None,
                on_cpu=not self.memory_apart,
                choose=chooser(self.cut) if isinstance(self.cut, Sequence) else None,
                after_step=self.after_step,
            )

    @cached_property
    def _wants_step(self) -> bool:
        """Whether forward() requires a parameter ``step``, or a function of the user's names such a key."""
        found = Reads()
        for function in (self.loss.function, self.metrics, self.loss.weight):
            if function is not None:
                found.follow_reads(function, "")
        if STEP in found.texts:
            return True
        try:
            return STEP in input_names(self._recipe, is_weighed=self.loss.weight is not None).required
        except ModelError:  # its capture will say more
            return False

    def reader_of(self, dataset: Any, *, step: int, in_order: bool = False) -> SampleSource:
        """Return a source that reads another dataset as the job's own is read.

        Args:
            dataset: not the job's own.
            step: of all its samples.
            in_order: without shuffling.

        Raises:
            DataError: it cannot be read by index.
        """
        return self._reader_of(dataset, lambda _: step, in_order=in_order)

    def _reader_of(
        self, dataset: Any, step_at: Callable[[int], int], *, in_order: bool = False, ramp: Ramp | None = None
    ) -> SampleSource:
        return SampleSource(
            dataset,
            seed=self.seed,
            collate=self.collate.function,
            names=lambda: input_names(self._recipe, is_weighed=self.loss.weight is not None),
            processes=self.num_workers,
            shuffles=not in_order,
            step_at=step_at,
            wants_step=lambda: self._wants_step,
            ramp=ramp,
        )

    def batch(self, examples: int) -> dict[str, Tensor]:
        """Return the first ``examples`` samples of the run, collated."""
        return self.source.micro_batch(range(examples)).tensors

    @cached_property
    def captured_batch(self) -> dict[str, Tensor]:
        """The samples with which the model is captured."""
        sizes = self.recipe.sizes
        if sizes is not None:
            return self.source.telling(sizes)
        # A loss within micro-batches may need as many, such as the largest k of them.
        least = self.micro_batch if self.loss.per_micro_batch else None
        return self.batch(max(CAPTURED_SAMPLES, least or 0))

    def cast(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return buffers as sections compute with them, on the device."""
        return {name: cast(value.to(self.device), self.dtype) for name, value in buffers.items()}

    def beginning(self) -> InitialParameters:
        """Return the source of the parameters' first values."""
        model = self.partitioned
        return begin_with(
            self.recipe,
            model.shapes,
            seed=self.seed,
            init=self.init,
            weights=None if self.weights is None else Path(self.weights.path).absolute(),
            digest=model.facts.digest,
            may_miss=self._may_miss,
            held=dict(self.model.pattern.named_parameters()) if isinstance(self.model, GivenModel) else None,
        )

    def initial(self) -> Initial:
        """Return the whole model as it is before step 0."""
        initial = self.beginning().whole_model()
        return initial if self.precision == "fp32" else initial.to(self.dtype)

    @property
    def _may_miss(self) -> bool:
        return self.weights is not None and self.weights.missing == "initialise"

    # -- what is refused ------------------------------------------------------------------------------------

    def _check_numbers(self) -> None:
        if callable(self.global_batch):
            raise UsageError(
                "global_batch= is a function. Pass the largest number of examples of a step, and the function of the "
                "step as batch_ramp=."
            )
        check_whole(global_batch=self.global_batch, micro_batch=self.micro_batch, seed=self.seed)
        check_whole(num_workers=self.num_workers)
        if self.num_workers is not None and self.num_workers < 0:
            raise UsageError(f"num_workers={self.num_workers} must be 0 or more processes that read samples")
        check_number(clip_grad_norm=self.clip_grad_norm, ema=self.ema)
        if self.ema is not None and not 0 <= self.ema < 1:
            raise UsageError(
                f"ema={self.ema} must be at least 0 and below 1, such as 0.999; leave it out for no average"
            )
        if self.ema is not None and self.memory.shard_optimizer:
            raise UsageError(
                "ema= keeps averages with the optimizer's state, which shard_optimizer=True divides: leave one out"
            )
        if self.global_batch < 1:
            raise UsageError(f"global_batch={self.global_batch}: the number of examples per step must be at least 1")
        if self.micro_batch is not None and not 1 <= self.micro_batch <= self.global_batch:
            raise UsageError(
                f"micro_batch={self.micro_batch} must be between 1 and global_batch={self.global_batch}. Lower it, or "
                "leave it out."
            )
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise UsageError(f"clip_grad_norm={self.clip_grad_norm} must be above 0; leave it out for no clipping")

    def _check_publish(self) -> None:
        if self.publish is None:
            return
        check_kind("publish", Publish, self.publish)
        if self.checkpoints is not None and location(self.publish.folder) == self.checkpoints.place:
            raise UsageError(f"publish= and checkpoints= both name {self.publish.folder}. Give each its own folder.")

    def _check_cut(self) -> None:
        cut: Any = self.cut
        if cut is None:
            return
        if hasattr(cut, "__index__"):
            if cut < 1:
                raise UsageError(f"cut={cut} must be at least 1 cut-point; leave it out to cut at every good place")
        elif isinstance(cut, str) or not isinstance(cut, Sequence) or not all(isinstance(path, str) for path in cut):
            raise UsageError(
                f"cut={cut!r} must be a number of cut-points or a list of names of modules, such as ['transformer.h.3']"
            )
        elif not cut:
            raise UsageError(f"cut={cut!r} names no modules; leave it out to cut at every good place")

    def _check_state(self) -> None:
        state: Any = self.state
        if state is None:
            return
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise UsageError(f'state={state!r} must name what is saved, such as state={{"best": best}}')
        for name, each in state.items():
            if not isinstance(each, Stateful | MutableMapping):
                raise UsageError(
                    f"state={{{name!r}: ...}} is {described(each)}, which cannot be given back in place. Use a "
                    "dict, or an object with state_dict() and load_state_dict(state)."
                )

    def _check_after_step(self) -> None:
        """Refuse what would leave a stage's parameters in two memories, or updated on one replica only."""
        if self.after_step is None:
            return
        if self.memory.shard_optimizer:
            raise UsageError(
                "after_step= cannot be given with shard_optimizer=True: replicas update different parameters, and it "
                "computes with all of a stage. Leave one of them out."
            )
        if self.memory.offload_optimizer and self.precision != "fp32":
            raise UsageError(
                f"after_step= cannot be given with offload_optimizer=True and precision={self.precision!r}: trained "
                "parameters are then in host memory and buffers on the device. Leave out one of the three."
            )

    def _check_before_step(self) -> None:
        """Refuse what would put parameters and gradients into two memories, or fp32 parameters on other replicas."""
        if self.precision == "fp32" or self.before_step is None:
            return
        if self.memory.shard_optimizer:
            raise UsageError(
                f"before_step= cannot be given with shard_optimizer=True and precision={self.precision!r}: most fp32 "
                "parameters are then on other replicas. Leave out one of the three."
            )
        if self.memory.offload_optimizer:
            raise UsageError(
                f"before_step= cannot be given with offload_optimizer=True and precision={self.precision!r}: "
                "parameters are then in host memory and their gradients on the device. Leave out one of the three."
            )


def _numbers(functions: Mapping[str, Any]) -> list[ReadPlace]:
    """Places of numbers that functions of the user's may count with."""
    found = Reads()
    for name, function in functions.items():
        if function is not None:
            found.follow_reads(function, name)
    return found.numbers()
