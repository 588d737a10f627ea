"""A watched dry run of a training step finds hidden dependencies (paper §"Tracking cross-partition dependencies").

All sections run in turn in one process, then the user's ``before_step``, optimizer and scheduler, as a stage
applies a step. Every tensor is tagged with the sections that its value depends on (``tags``). Numbers that leave
the tensors cannot be tagged: the code that takes them out is read (``user_lines``), and as a backstop the update is
tried with the gradients of one section changed (``UpdateCheck.reached``): nothing may change in the others.
"""

import linecache
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from varuna.checks.dependencies.tags import SuspectedDependency, Tag, TagLedger, TagMode
from varuna.checks.update import UpdateCheck
from varuna.core.errors import VarunaError, WorkerError
from varuna.core.plan import Pipeline, Plan
from varuna.data.randomness import generator_lock
from varuna.data.sizes import rows_in
from varuna.engine.links.traffic import traffic_of
from varuna.engine.stage.job import Job
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.tape import Tape, backward
from varuna.engine.worker.stored import initial_states
from varuna.partition.batch_weight import completed
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.partition.optimizers import NamedParameters, build_optimizer
from varuna.partition.watching.user_lines import UserLine, place_of

_STEPS = 2
_SHOWN = 5

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Dependency:
    """Something that a pipeline would compute differently from one process."""

    kind: str
    """``mixed``: an operation over several sections; ``number``: numbers of several sections, added up in Python;
    ``untagged``: a tensor from outside the step; ``shared weight``; ``effect``: seen, but not where it comes from"""
    sections: tuple[int, ...]
    names: tuple[str, ...]
    """parameters whose values, gradients or states are involved"""
    where: str
    """file:line, outside torch and Varuna"""
    operation: str
    remedy: str


def find_dependencies(job: Job, recipe: Recipe, initial: Initial, batch: Mapping[str, Tensor]) -> list[Dependency]:
    """Run two training steps on a small batch and report what crosses sections without the framework's knowledge.

    Args:
        job: the captured job with the user's factories.
        recipe: the model, for the place where it is built.
        initial: the materialised model; it stays as it is.
        batch: a collated batch.

    Raises:
        WorkerError: the user's code raised an exception.
    """
    cpu = torch.device("cpu")
    buffers = {name: value.to(cpu) for name, value in job.buffers.items()}
    job = replace(job, device=cpu, traffic=traffic_of(cpu), buffers=buffers)
    ledger = TagLedger()
    try:
        with generator_lock, torch.random.fork_rng(devices=[]):
            _watch_steps(job, initial, batch, ledger)
    except VarunaError:
        raise
    except Exception as error:
        own = "".join(traceback.format_exception(error)[-3:])
        raise WorkerError(
            f"the dry run of a step failed in before_step, the optimizer or the scheduler:\n{own}"
        ) from error
    found = [*_shared_weights(job.model, recipe, initial), *_findings(job, ledger)]
    if not any(each.kind in ("mixed", "number") for each in found):
        update = UpdateCheck(job.model, job.optimizer, job.scheduler, job.before_step, job.marks, frozen=job.frozen)
        found += _effects(job, ledger, *update.reached)
    return found


# -- the watched step ----------------------------------------------------------------------------------------


def _watch_steps(job: Job, initial: Initial, batch: Mapping[str, Tensor], ledger: TagLedger) -> None:
    """Forward, backward and the applied steps under the tagging mode."""
    size = rows_in(batch)
    with _whole_stage(job, initial, size, ledger) as stage:
        for section, bucket in stage.buckets.items():
            ledger.tag(bucket.flat, Tag(frozenset({section}), bucket.names))
        ledger.cross((*batch.values(), *job.buffers.values(), *job.model.constants.values()))
        variant = variant_of(job.model, batch, ())
        with ledger.paused():
            given = completed(job.model.graphs[variant], batch, job.buffers)
        _forward_and_backward(stage, Examples(given, size, variant), ledger)
        with ledger.paused():
            gradients = _gradients(stage)
        for step in range(_STEPS):
            with ledger.paused():
                fresh = _load(stage, gradients)
            for name, value in fresh.items():
                ledger.tag(value, _home(job, name), home=True)
            stage.apply(step, 1.0, ledger)


@contextmanager
def _whole_stage(job: Job, initial: Initial, size: int, ledger: TagLedger) -> Iterator[Stage]:
    """All sections in one stage, its optimizer built by the user's factory under the mode."""
    names = dict.fromkeys(name for section in job.model.sections for name in section.parameters)
    sections = len(job.model.sections)
    plan = Plan(micro_batch=size, global_batch=size, pipelines=(Pipeline(bounds=(0, sections), stash_limits=(1,)),))
    states = initial_states(
        job.model,
        range(sections),
        lambda names: {name: initial.parameters[name].clone() for name in names},
        job.buffers,
    )

    def optimizer(named: NamedParameters) -> torch.optim.Optimizer:
        for name, parameter in named:
            ledger.tag(parameter, _home(job, name), home=True)
        ledger.otherwise = place_of(job.optimizer)
        return build_optimizer(job.optimizer, named)

    with TagMode(ledger):
        torch.manual_seed(job.seed)
        stage = Stage(replace(job, optimizer=optimizer), plan, 0, states, 0)
        for name in names:
            ledger.tag(stage.parameters[name], _home(job, name), home=True)
        yield stage


def _home(job: Job, name: str) -> Tag:
    return Tag(frozenset({job.model.owner_of(name)}), (name,))


def _forward_and_backward(stage: Stage, examples: Examples, ledger: TagLedger) -> None:
    values: dict[str, Tensor] = {}
    tapes: list[Tape] = []
    for runner in stage.variants[examples.variant]:
        section = runner.section
        with ledger.inside(section.index, section.parameters):
            tape = runner.record(values, examples, 0, 0)
            values.update(zip(section.makes, (made.detach().contiguous() for made in tape.made), strict=True))
        ledger.cross(values.values())
        tapes.append(tape)
    gradients = {tapes[-1].section.makes[0]: torch.ones(())}
    for tape in reversed(tapes):
        with ledger.inside(tape.section.index, tape.section.parameters):
            backward([tape], gradients)
        ledger.cross(gradients.values())


def _gradients(stage: Stage) -> dict[str, Tensor]:
    """Gradients that the engine gives to a step, by parameter; a tied one's are summed over its sections."""
    found: dict[str, Tensor] = {}
    for bucket in stage.buckets.values():
        for name, view in bucket.views.items():
            found[name] = found[name] + view if name in found else view.clone()
    return found


def _load(stage: Stage, gradients: Gradients) -> dict[str, Tensor]:
    """Put fresh copies of the gradients where a step expects them."""
    fresh: dict[str, Tensor] = {}
    for name, value in gradients.items():
        if name in stage.totals.views:
            fresh[name] = stage.totals.views[name].copy_(value)
        else:
            fresh[name] = stage.parameters[name].grad = value.clone()
    return fresh


# -- findings ------------------------------------------------------------------------------------------------


def _shared_weights(model: PartitionedModel, recipe: Recipe, initial: Initial) -> list[Dependency]:
    """Parameters that are different objects in the same memory: one process trains one weight, stages two."""
    where = str(place_of(recipe.build))
    used = dict.fromkeys(name for section in model.sections for name in section.parameters)
    return [
        Dependency(
            "shared weight",
            tuple(sorted({model.owner_of(one), model.owner_of(other)})),
            (one, other),
            where,
            "two parameters in the same memory",
            "Varuna ties parameters that are one object. Assign the parameter, not its data (head.weight = "
            "embed.weight), or clone it (head.weight.data = embed.weight.data.clone()) if they should differ.",
        )
        for one, other in _overlapping({name: initial.parameters[name] for name in used})
        if not model.trainable.isdisjoint((one, other))
    ]


def _overlapping(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs that share memory, in the order of addresses."""
    extents = sorted((*_extent(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    for i, (_, end, one) in enumerate(extents):
        for start, _, other in extents[i + 1 :]:
            if start >= end:
                break
            yield one, other


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses from the first byte to just past the last one."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _findings(job: Job, ledger: TagLedger) -> list[Dependency]:
    order = {name: i for i, name in enumerate(n for section in job.model.sections for n in section.parameters)}
    found = []
    for each in ledger.suspicions.values():
        is_open = each.used or not each.reduced
        if each.kind == "untagged" or (is_open and each.kind in ("mixed", "number") and len(each.sections) > 1):
            names = tuple(sorted(each.names, key=lambda name: order.get(name, 0)))
            sections = tuple(sorted(each.sections))
            found.append(
                Dependency(each.kind, sections, names, str(each.place), each.operation, _remedy(each, job.model))
            )
    return found


def _effects(job: Job, ledger: TagLedger, own: Sequence[str], reached: Sequence[str]) -> list[Dependency]:
    """The backstop's findings, at the lines that took numbers out of several sections' tensors."""
    if not reached:
        return []
    candidates = [each for each in ledger.suspicions.values() if each.kind == "candidate" and len(each.sections) > 1]
    places = [each.place for each in candidates][:_SHOWN] or [place_of(job.before_step or job.optimizer)]
    section = job.model.owner_of(own[0])
    names = [name for name in job.model.shapes if name in reached]
    sections = tuple(sorted({section, *(job.model.owner_of(name) for name in names)}))
    return [
        Dependency(
            "effect",
            sections,
            tuple(names),
            str(place),
            f"other gradients in section {section} change what these parameters become",
            "Some value leaves the tensors here (float(), bool(), .numpy()) and reaches other sections. "
            + _USE_SHARED.format(op="sum"),
        )
        for place in places
    ]


_USE_SHARED = (
    "Compute it as a tensor over the parameters that you are given (in a sum: those with varuna.owned(p)), and use "
    'what varuna.all_reduce_shared(value, op="{op}") returns.'
)


def _remedy(each: SuspectedDependency, model: PartitionedModel) -> str:
    if each.kind == "untagged":
        return (
            "The tensor was created outside the step. If it is equal on all stages, nothing is wrong. If it "
            "belongs to one parameter, keep it in the optimizer's state of that parameter; if it is computed from "
            "several, pass it through varuna.all_reduce_shared."
        )
    if "clip_grad_norm" in _source(each.place):
        return "Each stage would clip by its own norm. Remove the call and pass clip_grad_norm= to varuna.Trainer."
    if "non_finite" in each.operation:
        return (
            "One stage may overflow and skip the step while others apply it. Pass the flag that says so through "
            'varuna.all_reduce_shared(found_inf, op="max") before it is used.'
        )
    op = "max" if each.operation.startswith(("max", "amax", "any", "logical_or")) else "sum"
    return f"A stage sees only its own part of the {len(model.sections)} sections. " + _USE_SHARED.format(op=op)


def _source(place: UserLine) -> str:
    return linecache.getline(place.file, place.line)
