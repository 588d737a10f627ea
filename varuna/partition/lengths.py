"""Several declared lengths: one graph for each, over the same parameters and cut at the same places.

The state of a run belongs to sections, so a section must be the same part of the model at every length. The longest
graph is cut as usual (it needs the most memory, and is what plans are made for); the others are cut after the same
operations. Where a length changes the operations themselves, they are aligned; where that leaves a section with
other parameters, the length is refused.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from varuna.core.errors import DataError, ModelError, UsageError
from varuna.partition.after_step import AfterStep
from varuna.partition.capture.capture import Batch, Recipe
from varuna.partition.cut.match_cuts import UnlikeGraphsError, same_places
from varuna.partition.cut.same_graph import code_of
from varuna.partition.model import CutChooser, PartitionedModel, partition
from varuna.partition.optimizers import OptimizerFactory

_DIMENSION = 1
"""The dimension of a collated tensor that has the declared lengths: the first one of a sample."""


def check_lengths(lengths: Sequence[int] | None) -> tuple[int, ...]:
    """The declared lengths, ascending; empty for a single one that the first samples fix.

    Raises:
        UsageError: they are not a list of different positive numbers.
    """
    if lengths is None:
        return ()
    if isinstance(lengths, str) or not all(isinstance(each, int) and each > 0 for each in lengths) or not lengths:
        raise UsageError(f"lengths={lengths!r} must list the lengths that samples may have, such as [128, 256]")
    if len(set(lengths)) < len(lengths):
        raise UsageError(f"lengths={lengths!r} contains a length twice")
    return tuple(sorted(lengths))


def partition_lengths(
    recipe: Recipe,
    batch: Batch,
    lengths: Sequence[int],
    *,
    optimizer: OptimizerFactory | None = None,
    cut_points: int | None = None,
    count_targets: bool = True,
    on_cpu: bool = True,
    choose: CutChooser | None = None,
    after_step: AfterStep | None = None,
) -> PartitionedModel:
    """Capture a model at every length; what comes back is the longest, with all of them as ``variants``.

    Without lengths this is ``partition``.

    Args:
        recipe: the model and its loss.
        batch: a collated batch of one of the lengths: dimension 1 of some of its tensors.
        lengths: ascending.
        optimizer: as for ``partition``.
        cut_points: as for ``partition``.
        count_targets: as for ``partition``.
        on_cpu: as for ``partition``.
        choose: places the cuts of the longest.
        after_step: as for ``partition``.

    Raises:
        ModelError: as for ``partition``, or a length changes what belongs to a section.
        UsageError: the batch has none of the lengths, or several.
    """
    if not lengths:
        return partition(
            recipe,
            batch,
            optimizer=optimizer,
            cut_points=cut_points,
            count_targets=count_targets,
            on_cpu=on_cpu,
            choose=choose,
            after_step=after_step,
        )
    keys = _length_keys(batch, lengths)
    captured: list[PartitionedModel] = []
    for length in reversed(lengths):
        shaped = {key: resized(value, length) if key in keys else value for key, value in batch.items()}
        first = not captured
        try:
            captured.append(
                partition(
                    recipe,
                    shaped,
                    optimizer=optimizer,
                    cut_points=cut_points if first else None,
                    count_targets=count_targets,
                    on_cpu=on_cpu,
                    choose=choose if first else same_places(captured[0].operations, captured[0].cuts),
                    after_step=after_step,
                )
            )
        except UnlikeGraphsError as error:
            raise ModelError(_DIFFERENT) from error
    for length, each in zip(reversed(lengths), captured, strict=True):
        _check_same(captured[0], lengths[-1], each, length)
    digest = hashlib.sha256("".join(each.facts.digest for each in captured).encode()).hexdigest()
    code = hashlib.sha256("".join(each.facts.code_digest for each in captured).encode()).hexdigest()
    return replace(
        captured[0],
        facts=captured[0].facts.model_copy(update={"digest": digest, "code_digest": code}),
        variants=tuple(captured),
        length_keys=tuple(key for key in keys if key in captured[0].inputs),
    )


def _length_keys(batch: Batch, lengths: Sequence[int]) -> tuple[str, ...]:
    sizes = {key: value.shape[_DIMENSION] for key, value in batch.items() if value.dim() > _DIMENSION}
    found = {key: size for key, size in sizes.items() if size in lengths}
    if len(set(found.values())) != 1:
        seen = ", ".join(f"{key}: {size}" for key, size in sizes.items())
        raise UsageError(
            f"lengths={list(lengths)}: the first samples must have one of these lengths, the same in all tensors that "
            f"have one; found {seen or 'no tensor with a length'}. Pad them in the dataset or in collate=."
        )
    return tuple(found)


def resized(value: Tensor, length: int) -> Tensor:
    """Cut or repeat a tensor to a length; values matter only where ``forward`` branches on them."""
    return value[:, torch.arange(length, device=value.device) % value.shape[_DIMENSION]]


_DIFFERENT = (
    "the model cannot be cut at the same places for all lengths=, because its operations differ between them. "
    "Declare only lengths for which they are the same, or pad all samples to one length and leave lengths= out."
)


def _check_same(longest: PartitionedModel, its: int, other: PartitionedModel, length: int) -> None:
    """Check that sections hold the same state at both lengths, and update their buffers in the same way."""
    for one, two in zip(longest.sections, other.sections, strict=True):
        same_state = set(one.parameters) == set(two.parameters) and one.updated == two.updated
        updates = [(u.buffers, u.statistics, code_of(u.module)) for u in one.updates]
        same_updates = updates == [(u.buffers, u.statistics, code_of(u.module)) for u in two.updates]
        if not same_state or not same_updates or one.statistics != two.statistics:
            raise ModelError(
                f"section {one.index} ({one.label}) differs between lengths {its} and {length}: {_DIFFERENT}"
            )
    unlike = _counted(longest) != _counted(other)
    if unlike or longest.counts_targets != other.counts_targets or longest.facts.tied != other.facts.tied:
        raise ModelError(f"the model differs between lengths {its} and {length}: {_DIFFERENT}")


def _counted(model: PartitionedModel) -> object:
    """Names of what is added up over micro-batches of all lengths."""
    return (
        None if model.whole is None else (model.whole.keys, [(leaf.shape, leaf.dtype) for leaf in model.whole.leaves])
    )


def at_longest(model: PartitionedModel, batch: Batch) -> dict[str, Tensor]:
    """A batch that the longest graph takes, for measurements."""
    return {
        key: resized(value, model.inputs[key].shape[0]) if key in model.length_keys else value
        for key, value in batch.items()
    }


def variant_of(model: PartitionedModel, batch: Mapping[str, Tensor], indices: Sequence[int]) -> int:
    """Return the number of the model's graph that a batch is for.

    Args:
        model: with or without declared lengths.
        batch: collated samples, with at least one of ``model.length_keys``.
        indices: of the samples in the dataset, for the message.

    Raises:
        DataError: its length was not declared, or nothing tells it.
    """
    if not model.variants:
        return 0
    key = next((key for key in model.length_keys if key in batch), None)
    if key is None:
        raise DataError(
            f"the batch of dataset indices {list(indices)} must have one of {', '.join(map(repr, model.length_keys))}, "
            f"whose length says which of lengths= it is, but has only {', '.join(map(repr, batch)) or 'nothing'}."
        )
    lengths = [variant.inputs[key].shape[0] for variant in model.variants]
    found = batch[key].shape[_DIMENSION] if batch[key].dim() > _DIMENSION else None
    if found not in lengths:
        raise DataError(
            f"{key!r} has length {found} in the batch of dataset indices {list(indices)}, but "
            f"lengths={sorted(lengths)} were declared. Pad its samples to the next of these in collate=, or "
            "declare this length too."
        )
    return lengths.index(found)
