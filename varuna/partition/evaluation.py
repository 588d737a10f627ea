"""The model as ``model.eval()`` makes it, cut at the places where the training graph is cut.

Dropout is gone and batch normalisation uses its running statistics: another graph, but over the same parameters, and
each section must need no others than the stage that holds it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from varuna.core.errors import ModelError
from varuna.partition.capture.capture import Recipe
from varuna.partition.capture.outputs import OutputsFunction, logits_of
from varuna.partition.cut.match_cuts import UnlikeGraphsError, same_sections
from varuna.partition.lengths import resized
from varuna.partition.model import PartitionedModel, partition

_TEXTS = 2
"""In the batch that is captured."""
_INSTEAD = "Evaluate this model from trainer.export(path) in plain PyTorch."


def for_evaluation(model: PartitionedModel, recipe: Recipe, batch: Mapping[str, Tensor]) -> PartitionedModel:
    """Capture every graph of ``model`` (one for each declared length) once more, in evaluation mode.

    Args:
        model: as it trains.
        recipe: from which ``model`` was captured.
        batch: a collated batch of samples; their values matter only where ``forward`` branches on them.

    Raises:
        ModelError: the model computes something else in evaluation, so that it cannot be cut at the same places.
    """
    keyed = [replace(graph, length_keys=model.length_keys) for graph in model.graphs]
    graphs = [_one(graph, recipe, batch) for graph in keyed]
    return replace(graphs[0], variants=tuple(graphs) if model.variants else (), length_keys=model.length_keys)


def for_prediction(
    model: PartitionedModel, recipe: Recipe, batch: Mapping[str, Tensor], outputs: OutputsFunction
) -> PartitionedModel:
    """Capture every graph in evaluation mode, with what ``outputs`` returns in place of metrics, and no loss.

    Args:
        model: as it trains.
        recipe: from which ``model`` was captured.
        batch: a collated batch of samples, with or without targets.
        outputs: makes rows of the model's output.

    Raises:
        ModelError: as for ``for_evaluation``, or ``outputs`` returns no rows.
    """
    if recipe.sizes is not None:
        raise ModelError(
            "predictions are rows, one for each sample, and collate= joins samples otherwise (rows of packed tokens, "
            f"nodes of graphs, boxes), so nothing tells which rows of an output are whose. {_INSTEAD}"
        )
    keyed = [replace(graph, length_keys=model.length_keys) for graph in model.graphs]
    graphs = [_captured(graph, replace(recipe, outputs=outputs), batch, count_targets=False) for graph in keyed]
    return replace(graphs[0], variants=tuple(graphs) if model.variants else (), length_keys=model.length_keys)


def for_generation(model: PartitionedModel, recipe: Recipe, keys: Sequence[str], length: int) -> PartitionedModel:
    """Capture the model in evaluation mode with logits for every token, at one length, whatever training has.

    Args:
        model: as it trains.
        recipe: from which ``model`` was captured.
        keys: inputs that are the tokens; nothing else is passed.
        length: of texts, in tokens.

    Raises:
        ModelError: as for ``for_evaluation``, or the model returns no logits.
    """
    tokens = torch.zeros(_TEXTS, length, dtype=torch.int64)
    single = replace(model, variants=(), length_keys=())
    wanted = replace(recipe, outputs=logits_of, sizes=None)
    return _captured(single, wanted, dict.fromkeys(keys, tokens), count_targets=False)


def _one(model: PartitionedModel, recipe: Recipe, batch: Mapping[str, Tensor]) -> PartitionedModel:
    found = _captured(model, recipe, batch, count_targets=model.counts_targets or model.whole is not None)
    apart = (found.whole is None) != (model.whole is None)
    if apart or found.metrics != model.metrics or found.counts_targets != model.counts_targets:
        raise ModelError(
            "in evaluation mode the model computes its loss differently, so it cannot be weighed as in training. "
            + _INSTEAD
        )
    return found


def _captured(
    model: PartitionedModel, recipe: Recipe, batch: Mapping[str, Tensor], *, count_targets: bool
) -> PartitionedModel:
    shaped = {
        key: resized(value, model.inputs[key].shape[0]) if key in model.length_keys else value
        for key, value in batch.items()
    }
    try:
        return partition(
            replace(recipe, training=False, eager=tuple(model.eager)),
            shaped,
            count_targets=count_targets,
            choose=same_sections(model.operations, model.cuts, [section.parameters for section in model.sections]),
        )
    except UnlikeGraphsError as error:
        raise ModelError(
            f"in evaluation mode the model cannot be cut where it is cut in training: {error}. {_INSTEAD}"
        ) from error
