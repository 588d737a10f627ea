"""The model as ``model.eval()`` makes it, cut at the places where the training graph is cut.

Dropout is gone and batch normalisation uses its running statistics: another graph, but over the same parameters, and
each section must need no others than the stage that holds it has.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from varuna.core.errors import ModelError
from varuna.partition.capture.capture import Recipe
from varuna.partition.cut.match_cuts import same_places
from varuna.partition.lengths import resized
from varuna.partition.model import PartitionedModel, partition


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


def _one(model: PartitionedModel, recipe: Recipe, batch: Mapping[str, Tensor]) -> PartitionedModel:
    shaped = {
        key: resized(value, model.inputs[key].shape[0]) if key in model.length_keys else value
        for key, value in batch.items()
    }
    found = partition(
        replace(recipe, training=False, eager=tuple(model.eager)),
        shaped,
        count_targets=model.counts_targets or model.whole is not None,
        choose=same_places(model.operations, model.cuts, nearest=True),
    )
    for one, two in zip(model.sections, found.sections, strict=True):
        more = set(two.parameters) - set(one.parameters)
        if more:
            raise ModelError(
                f"in evaluation mode section {one.index} ({one.label}) needs parameters that it does not train with: "
                f"{', '.join(sorted(more)[:5])}. Evaluate this model from trainer.export(path) in plain PyTorch."
            )
    apart = (found.whole is None) != (model.whole is None)
    if apart or found.metrics != model.metrics or found.counts_targets != model.counts_targets:
        raise ModelError(
            "in evaluation mode the model computes its loss differently, so it cannot be weighed as in training. "
            "Evaluate this model from trainer.export(path) in plain PyTorch."
        )
    return found
