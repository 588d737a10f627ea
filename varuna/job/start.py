"""From a job's spec to a worker's life: what the engine, the planner and the manager are told of it.

The values that describe one job, and who gets them::

    JobSpec --job_facts---> JobFacts         manager, planner, other ranks: all must agree on it
       |    --engine_job--> Job              engine: model on the device, optimizer, buffers, dtype
       |                     |
       |                     v
       +---> samples, --> WorkerContext      what every generation of this worker is made from
             first values    |
                             v
                          Session            generation after generation, until the last step

``begin`` refuses in the order of what that costs: options; files and processes; then what the captured model shows.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna.checkpoint.io.export import ModelForm
from varuna.checkpoint.io.frozen import FrozenParameters
from varuna.checkpoint.published import PublishedFolder
from varuna.checks.mixing import check_mixing
from varuna.checks.remembering import check_repeats
from varuna.core.errors import UsageError
from varuna.core.membership import Membership
from varuna.core.model import JobFacts
from varuna.core.saved import ALONE_EVERY_S
from varuna.data.digests import sample_digest
from varuna.engine.base.compute_process import configure_process
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.wait_bounds import Patience
from varuna.engine.device.capacity import device_class
from varuna.engine.links.traffic import traffic_of
from varuna.engine.stage.job import Job
from varuna.engine.stage.optimizer import OptimizerFactory
from varuna.engine.stage.precision import unit_near
from varuna.engine.worker.forming import WorkerContext
from varuna.engine.worker.loop_state import LoopState, LoopStep
from varuna.engine.worker.publisher import Publisher
from varuna.engine.worker.session import Session
from varuna.engine.worker.snapshotter import Snapshotter, check_writable
from varuna.job.adapter_export import AdapterForm
from varuna.job.built import GivenModel, WithLoss
from varuna.job.first_calibration import first_calibration
from varuna.job.given_optimizer import OptimizerLike
from varuna.job.options import CHECKPOINTED_EVERY, Publish
from varuna.job.spec import CAPTURED_SAMPLES, JobSpec
from varuna.membership.launched import at_end
from varuna.partition.batch_weight import weight_of
from varuna.partition.initial.constructor import needed_buffers
from varuna.partition.initial.initial_values import InitialParameters
from varuna.partition.model import PartitionedModel
from varuna.partition.on_device import on_device
from varuna.store.opening import location, open_store

_HOW = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options that say how the same numbers are computed: devices may differ in them."""


def optimizer_options(build: OptimizerFactory, model: PartitionedModel) -> str:
    """Options of all groups as JSON, as far as they are numbers or texts; empty where no optimizer can be built alone.

    Args:
        build: the script's, for parameters with their names.
        model: whose parameters it trains.
    """
    named = [
        (name, nn.Parameter(torch.empty(shape, device="meta")))
        for name, shape in model.shapes.items()
        if name in model.trainable
    ]
    try:
        built: Any = build(named)
        groups = [group for each in (built if isinstance(built, Sequence) else [built]) for group in each.param_groups]
    except Exception:  # noqa: BLE001 - code that needs values, or a device: a step will say what is wrong with it
        return ""
    return json.dumps([_plain(group) for group in groups])


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        known = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
        if key not in _HOW and _is_plain(known):
            found[key] = known
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


RESCUE_VARIABLE = "VARUNA_RESCUE"
"""Folder of ``varuna run`` for the state of a script that gives no ``checkpoints=``."""
_RESCUED_S = 2.0
"""Least time between checkpoints of a script without ``checkpoints=``, while every section is held once."""
_RESCUED_BYTES, _DISK_SHARE = 4 * 2**30, 8
"""Of state that is kept for a script that did not ask for it, and the share of the free disk that it may take."""


class Behind(NamedTuple):
    """A worker's view of a training that is over, and of which it has no part: alone, from its last checkpoint."""

    place: str
    """of its checkpoints"""
    last: LoopStep | None = None
    """step whose turn the loop has not had"""
    is_main: bool = False
    """this worker was rank 0"""
    has_loop: bool = True
    """its loop continues from what ``state=`` names in the checkpoint; else it has had all of its turns"""


def begin(spec: JobSpec, n: int, membership: Membership, *, number: int = 0) -> Session:
    """Prepare a worker's session, to be run; refuse before the capture what needs no captured model.

    Args:
        spec: the job.
        n: steps.
        membership: decides on generations.
        number: of this training among those of the script.

    Raises:
        UsageError: links between GPUs without one, or batch normalisation without ``micro_batch``.
        ModelError: the model cannot be captured, or its loss not be computed over micro-batches.
        CheckpointError: the directory cannot be written.
        UsageError: the update keeps what cannot be moved or saved.
    """
    _check_links(spec)
    configure_process(spec.device)
    if spec.checkpoints is not None and "://" not in (place := location(spec.checkpoints.place)):
        check_writable(open_store(place))  # a folder needs no threads, unlike a bucket, which comes after processes
    # Now: processes that are forked later keep copies of state, and share files that were opened
    spec.training_source.prepare()
    if spec.device.type == "cuda":
        torch.cuda.set_device(spec.device)  # checks compute there; an error is told with its name
    saver = None
    if spec.checkpoints is not None:
        store = open_store(spec.checkpoints.place, upload_bytes_per_s=spec.checkpoints.upload_bytes_per_s)
        check_writable(store)
        left_out = None if spec.checkpoints.frozen else FrozenParameters(spec.partitioned.changing)
        every = spec.checkpoints.every
        # a time that the user has chosen holds, even where every section is held only once
        alone_s = ALONE_EVERY_S if every == CHECKPOINTED_EVERY else None
        saver = Snapshotter(store, every, membership.saved, membership.unsaved, alone_s=alone_s, left_out=left_out)
    # first, since it may ask for more than the next
    check_mixing(
        spec.partitioned,
        spec.fixed_micro_batch,
        accepted=spec.loss.per_micro_batch,
        weighed=spec.loss.weight is not None,
    )
    _check_normalisation(spec)
    _check_ramp(spec)
    rescue = _rescue_place(spec, number) if spec.checkpoints is None else ""
    if rescue:
        saver = Snapshotter(open_store(rescue), None, membership.saved, membership.unsaved, alone_s=_RESCUED_S)
    publisher = None if spec.publish is None else _publisher(spec, spec.publish)
    spec.update_check.of_names()
    spec.update_check.of_zero_grad()
    if saver is not None or membership.survives:
        spec.update_check.of_moves()
    session = open_session(
        spec, n, membership, saver=saver, publisher=publisher, rescue=rescue, measures=membership.measures
    )
    at_end(session.leave)
    return session


def _publisher(spec: JobSpec, publish: Publish) -> Publisher:
    """Make the publisher of the model, or of the adapter.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = PublishedFolder(publish.folder, publish.keep)
    folder.prepare()
    model = spec.partitioned  # which tells what it is
    form = AdapterForm(spec) if spec.built.has_adapters else ModelForm(spec.built.json, model.aliases)
    return Publisher(folder, publish.every, form)


def _rescue_place(spec: JobSpec, number: int) -> str:
    """Return the folder of ``varuna run`` for the state of a run without checkpoints; empty: none, or too much state.

    Each of the script's trainings has a folder of its own.
    """
    place = os.environ.get(RESCUE_VARIABLE, "")
    if not place:
        return ""
    state_bytes = sum(each.parameter_bytes + each.optimizer_bytes for each in spec.partitioned.facts.sections)
    free_bytes = shutil.disk_usage(Path(place).parent).free
    return f"{place}/{number}" if state_bytes <= min(_RESCUED_BYTES, free_bytes // _DISK_SHARE) else ""


def open_session(
    spec: JobSpec,
    n: int,
    membership: Membership,
    *,
    beginning: InitialParameters | None = None,
    saver: Snapshotter | None = None,
    publisher: Publisher | None = None,
    rescue: str = "",
    global_batch: int | None = None,
    measures: bool = False,
    behind: Behind | None = None,
) -> Session:
    """Prepare a worker's session, to be run: of this job, or of a rehearsal with another batch and beginning.

    Args:
        spec: the job.
        n: steps.
        membership: decides on generations.
        beginning: first values. Default: the job's own.
        saver: writes checkpoints; without it none is read or written.
        publisher: publishes the model while it trains, if it is to be published.
        rescue: where it writes them if the job says nothing.
        global_batch: other than the job's.
        measures: offer the membership what the planner should know of this hardware.
        behind: the training is over, and is looked at.
    """
    model, first = spec.partitioned, beginning or spec.beginning()
    # part of the facts on which ranks must agree: each may have built its model with other values
    values = f":{spec.model.digest()}" if isinstance(spec.model, GivenModel | WithLoss) else ""
    facts = job_facts(spec, n, initialisation=first.name + values, saves=saver is not None, rescue=rescue)
    facts = facts.model_copy(update={"first_samples": f"{sample_digest(spec.captured_batch):x}"})
    if global_batch is not None:
        facts = facts.model_copy(update={"global_batch": global_batch})
    if behind is not None:
        facts = facts.model_copy(update={"checkpoint_dir": behind.place})
    buffers = first.buffers(needed) if (needed := needed_buffers(model)) else {}
    job = engine_job(spec, on_device(model, spec.device), buffers)
    if measures and (known := first_calibration(spec, facts, job, first)) is not None:
        membership.offer_calibrations(known.model_dump_json())
    context = WorkerContext(
        job,
        spec.training_source,
        spec.loss.weight,
        facts.steps,
        initial=lambda names, checks: first.parameters(names, partial(spec.checks.run, model) if checks else None),
        connect=lambda assignment: membership.store(assignment.generation),
        endpoint=Endpoint(os.environ.get("VARUNA_INTERFACE", "127.0.0.1"), os.environ.get("VARUNA_MACHINE_PORT", "")),
        loop=LoopState(
            spec.kept if behind is None or behind.has_loop else None,
            writes=isinstance(spec.optimizer, OptimizerLike) and spec.optimizer.in_loop,
        ),
        left_out=_in_files(model, first),
    )
    return Session(
        context,
        facts,
        membership,
        saver=saver,
        publisher=publisher,
        patience=_patience(),
        device_class=device_class(spec.device),
        cut_check=spec.update_check.of_stages,
        last=None if behind is None else behind.last,
        is_main=behind is None or behind.is_main,
    )


def _in_files(model: PartitionedModel, first: InitialParameters) -> FrozenParameters | None:
    """Return a filter that leaves out frozen parameters which every worker can read; None: there are none."""
    frozen = first.stored - model.changing
    return FrozenParameters(model.shapes.keys() - frozen) if frozen else None


def job_facts(
    spec: JobSpec, n: int, *, initialisation: str = "constructor", saves: bool = False, rescue: str = ""
) -> JobFacts:
    """Describe the job for the planner, the manager and the other workers."""
    model, kept = spec.partitioned, {}
    if saves and spec.checkpoints is None:
        kept = {"checkpoint_dir": rescue, "keep_last": 1, "rescues": True}
    elif saves and spec.checkpoints is not None:
        checkpoints = spec.checkpoints
        kept = {
            "checkpoint_dir": checkpoints.place,
            "keep_last": checkpoints.keep_last,
            "keep_every": checkpoints.keep_every,
            "takes_other_data": checkpoints.other_data,
        }
    return JobFacts(
        model=model.facts,
        global_batch=spec.global_batch,
        micro_batch=spec.fixed_micro_batch,
        seed=spec.seed,
        initialisation=initialisation,
        steps=n,
        metrics=model.metrics,
        samples=spec.samples,
        torch=torch.__version__.partition("+")[0],
        config=spec.built.json,
        threads=torch.get_num_threads(),
        precision=spec.precision,
        compiled=spec.compiled,
        memory=spec.memory,
        network=spec.network,
        combines=model.facts.combines or spec.before_step is not None,
        optimizer=optimizer_options(spec.update, model),
        memory_apart=spec.memory_apart,
        **kept,
    )


def engine_job(spec: JobSpec, model: PartitionedModel, buffers: Mapping[str, Tensor]) -> Job:
    """Describe the job for the engine.

    Args:
        spec: the job.
        model: its partitioned model, for the device that computes.
        buffers: values of those that the model needs.
    """
    return Job(
        model=model,
        optimizer=spec.update,
        scheduler=spec.lr_scheduler,
        seed=spec.seed,
        clip_grad_norm=spec.clip_grad_norm,
        stops_at_nan=spec.on_nan == "stop",
        frozen=spec.frozen,
        before_step=spec.before_step,
        marks=spec.built.marks,
        after_step=spec.after_step,
        buffers=spec.cast(buffers),
        device=spec.device,
        dtype=spec.dtype,
        unit=_unit(spec, model, buffers) if spec.precision == "fp16" else 1.0,
        bf16_reduction=spec.network.reduction == "bf16",
        compiler=spec.compiler,
        memory=spec.memory,
        traffic=traffic_of(spec.device, spec.network.links, compresses=spec.network.compress),
        is_steered=spec.is_steered,
    )


def _unit(spec: JobSpec, model: PartitionedModel, buffers: Mapping[str, Tensor]) -> float:
    """A power of two near the weight of a global batch: seeds of B are then those of a mean, not of a sum."""
    batch = spec.captured_batch
    samples = model.samples_in(batch) or CAPTURED_SAMPLES
    counted = weight_of(model, spec.loss.weight, batch, buffers) or samples
    return unit_near(counted * spec.global_batch / samples)


def _patience() -> Patience:
    """Bounds of waits for other ranks; ``VARUNA_PATIENCE`` is how many seconds one piece of a rank's own work may take.

    Raises:
        UsageError: it is not a number above 0.
    """
    text = os.environ.get("VARUNA_PATIENCE")
    if text is None:
        return Patience()
    try:
        busy_s = float(text)
    except ValueError:
        busy_s = 0.0
    if not busy_s > 0:
        raise UsageError(f"VARUNA_PATIENCE={text!r} must be a number of seconds above 0, such as 7200")
    return Patience(busy_s=busy_s)


def _check_links(spec: JobSpec) -> None:
    """Refuse to train with links between GPUs on something else; looking at such a job needs none."""
    if spec.network.links == "nccl" and "VARUNA_MACHINE_PORT" in os.environ:
        raise UsageError(
            'links="nccl" takes free ports of each machine, and this one has one port for all of its workers. Leave '
            "links= out, or start the agents without --port and --announce."
        )
    if spec.network.links == "nccl" and spec.device.type != "cuda":
        raise UsageError(
            f'links="nccl" connects GPUs, and this worker computes on {spec.device}. Leave links= out, or start it '
            "where torch sees a GPU (torch.cuda.is_available())."
        )


def _check_ramp(spec: JobSpec) -> None:
    """Refuse steps of different sizes where a sample that stands in for none would count.

    Raises:
        UsageError: the model updates buffers from the batch, or batches have a list with an entry for each sample.
    """
    if spec.ramp is None:
        return
    assert spec.batch_ramp is not None
    check_repeats("batch_ramp=", spec.batch_ramp)
    spec.ramp.size(0)
    buffers = [name for section in spec.partitioned.sections for name in section.updated]
    listed = spec.recipe.sizes is not None and spec.recipe.sizes.samples is not None
    if buffers or listed:
        why = f"the model updates {buffers[0]} from the batch" if buffers else "collate= makes lists of samples"
        raise UsageError(
            f"batch_ramp= cannot be given where {why}: a micro-batch without samples would count there. Leave it out, "
            "or train in runs of different global_batch=, with weights= from the run before."
        )


def _check_normalisation(spec: JobSpec) -> None:
    """Refuse batch normalisation without a micro-batch size of the user's."""
    model = spec.partitioned
    if model.facts.batch_dependent and spec.fixed_micro_batch is None:
        updates = (update for section in model.sections for update in section.updates if update.kinds is None)
        buffer = next((name for update in updates for name in update.buffers), None)
        does = "normalises over" if model.normalisations or buffer is None else f"updates the buffer {buffer} from"
        raise UsageError(
            f"the model {does} the examples of a micro-batch, so training depends on how many there are. "
            "Pass micro_batch= (the batch size per device that you would use in plain PyTorch); no plan changes "
            "it."
        )
