"""Do the examples of a batch get into each other's losses? Then micro-batches would train another model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varuna.checks.causes import without_autocast
from varuna.checks.draws import NoDraws
from varuna.checks.experiment import Experiment
from varuna.checks.outcome import controlled
from varuna.core.errors import ModelError
from varuna.data.sizes import rows_in
from varuna.partition.batch_weight import completed
from varuna.partition.initial.constructor import Initial
from varuna.partition.loss.mixing import PLACES, UNKNOWN
from varuna.partition.loss.terms import Mixing
from varuna.partition.loss.unknown_operations import Trial, TrialValues
from varuna.partition.model import PartitionedModel
from varuna.process.console import warn

_NAMED = 3
_EXAMPLES = 4
_TOLERANCES = {torch.float32: 3e-5, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Relative; operations over another number of rows differ by about 1e-6 in fp32."""


def check_mixing(model: PartitionedModel, micro_batch: int | None, *, accepted: bool, weighed: bool = False) -> None:
    """Refuse a loss that mixes the examples of a batch, unless the user wants it within micro-batches of one size.

    Args:
        model: as captured.
        micro_batch: the size, if the user fixed it.
        accepted: the user wants it within each.
        weighed: the user says what the loss averages over: samples decide about operations that are not known.

    Raises:
        ModelError: it is neither free of such operations nor accepted; names them.
    """
    found = (each for graph in model.graphs for each in graph.mixing if each.certain)
    found = (each for each in found if not (weighed and each.what == UNKNOWN))
    _refuse(list(dict.fromkeys(found)), micro_batch, accepted=accepted)


def _refuse(mixing: Sequence[Mixing], micro_batch: int | None, *, accepted: bool) -> None:
    if not mixing or (accepted and micro_batch is not None):
        return
    places = [f"it {each.what}{f' at {each.where}' if each.where else ''}" for each in mixing]
    places = list(dict.fromkeys(places))  # several operations of one line
    more = f", and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    missing = [] if micro_batch is not None else ["micro_batch= (how many examples it is computed over)"]
    missing += [] if accepted else ["loss=varuna.Loss(..., per_micro_batch=True)"]
    raise ModelError(
        f"the loss of a batch is not composed of the losses of its examples: {'; '.join(places[:_NAMED])}{more}. "
        "Computed over micro-batches it would be another loss, which depends on their size. If that is what you "
        f"want, as in plain PyTorch with gradient accumulation, pass {' and '.join(missing)}; then no plan changes "
        f"it. Otherwise remove that part from the loss.{_hint(mixing)} See docs/losses.md."
    )


def _hint(mixing: Sequence[Mixing]) -> str:
    operations = {each.operation for each in mixing}
    if "aten::nanmean" in operations:
        return (
            " Where targets are NaN: torch.nanmean leaves NaN out of the mean, but not out of the gradient, in plain "
            "PyTorch as well. Choose first, there = ~torch.isnan(target), and take the mean of "
            "loss(output[there], target[there])."
        )
    if advice := without_autocast(operations):
        return f" {advice.rstrip()}"
    if all(each.what == UNKNOWN for each in mixing):
        return (
            " If it is a mean that Varuna cannot see into (an autograd Function, a custom operator): return one loss "
            "for each example from it and take the mean outside, or pass loss=varuna.Loss(..., weight=fn), where "
            "fn(batch) returns the number of what it averages over; samples then show whether that is so."
        )
    if "aten::randperm" in operations:
        return (
            " Mixup and cutmix: let dataset[i] draw the number of the other example (torch.randint), and mix the two "
            "there."
        )
    if {each.what for each in mixing} == {PLACES}:
        return (
            " To compute with two kinds of examples (chosen and rejected), keep them under two keys of a sample, and "
            "call the model once for each, or once for torch.cat([chosen, rejected]) and .chunk(2) of the result."
        )
    return ""


def try_mixing(experiment: Experiment, micro_batch: int | None, *, accepted: bool) -> None:
    """Run the operations that may mix examples: with another last example, the values of the others must stay.

    Args:
        experiment: of the job.
        micro_batch: examples, if the user fixed it.
        accepted: ``per_micro_batch=True`` was passed.

    Raises:
        ModelError: they do not.
    """
    model, source = experiment.model, experiment.source
    model_count = source.size if source.size is not None else _EXAMPLES + 1
    if model.trial is None or (accepted and micro_batch is not None):
        return
    doubts = [each for each in model.mixing if not each.certain]
    positions = [position % model_count for position in range(_EXAMPLES + 1)]
    first = source.micro_batch(positions[:-1])
    graph = experiment.graph_of(first)
    other = source.micro_batch([*positions[: _EXAMPLES - 1], positions[-1]]).tensors
    alone = [source.micro_batch([position]).tensors for position in positions[:2]]
    shapes = {key: value.shape for key, value in first.tensors.items()}
    if graph.trial is None or model_count < 2 or any(shapes[key] != value.shape for key, value in other.items()):
        return
    fewer = {key: value[: _EXAMPLES - 1] for key, value in first.tensors.items()}
    try:
        with experiment.running() as own, controlled(NoDraws), torch.no_grad():
            results = [_run(graph, graph.trial, own.initial, batch) for batch in (first.tensors, other, fewer, *alone)]
    except Exception as error:  # noqa: BLE001 - a graph that cannot run will say so in training
        warn(f"that {_told(doubts)} could not be checked ({type(error).__name__}); training does not rely on it")
        return
    count = len(graph.trial.values)
    mixed = any(
        _differ(each, graph.trial.values[i], results[0][i], results[1][i]) for i, each in enumerate(results[2][:count])
    )
    divided = any(_far(one, two) for one, two in zip(results[3][count:], results[4][count:], strict=True))
    if mixed or divided:
        _refuse([each for each in doubts if divided or "divides" not in each.what], micro_batch, accepted=accepted)


def _told(doubts: Sequence[Mixing]) -> str:
    return f"the loss keeps examples apart, though it {doubts[0].what}" if doubts else "the loss keeps examples apart"


def _run(model: PartitionedModel, trial: Trial, initial: Initial, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    graph, given = trial.graph, completed(model, batch, initial.buffers)
    sizes = [rows_in(batch)] if graph.needs_batch_size else []
    state = [initial.parameters[name] for name in graph.parameters]
    state += [initial.buffers[name] for name in graph.buffers] + [model.constants[name] for name in graph.constants]
    found = graph.module(*[given[key] for key in graph.inputs], *sizes, *state)
    return tuple(value.clone() for value in found)


def _differ(fewer: Tensor, kind: TrialValues, one: Tensor, two: Tensor) -> bool:
    """Return whether elements of the first examples change when the last example does."""
    dim = kind.dim
    if kind.picked:
        kept = torch.arange(fewer.shape[dim])
        return min(one.shape[dim], two.shape[dim]) < len(kept) or _apart(one, two, kept, dim)
    count = one.shape[dim]
    owners = torch.arange(count) // kind.inner % _EXAMPLES
    return _apart(one, two, (owners < _EXAMPLES - 1).nonzero().flatten(), dim)


def _apart(one: Tensor, two: Tensor, kept: Tensor, dim: int) -> bool:
    return _far(one.index_select(dim, kept), two.index_select(dim, kept))


def _far(one: Tensor, two: Tensor) -> bool:
    tolerance = _TOLERANCES.get(one.dtype, 0.0)
    one, two = torch.nan_to_num(one.double()), torch.nan_to_num(two.double())
    scale = max(float(one.abs().max()) if one.numel() else 0.0, 1e-30)
    return one.shape != two.shape or bool(((one - two).abs() > tolerance * scale).any())
