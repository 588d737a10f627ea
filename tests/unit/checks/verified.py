"""Does the split model compute what the whole one does, on one batch? Sections in turn against plain eager.

Both run in training mode, dropout and all: every operation that draws random numbers draws the same ones in both.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from varuna.checks.compare import errors
from varuna.checks.outcome import Part, in_turn, plainly
from varuna.partition.batch_weight import numbers_of
from varuna.partition.capture.capture import LossModule, Recipe
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel


@dataclass(frozen=True)
class Verification:
    """Largest relative differences between split and unsplit."""

    loss_error: float
    gradient_error: float
    """relative to the largest gradient of the model"""
    parameter: str
    """the parameter whose gradient differs most"""


def verify(model: PartitionedModel, recipe: Recipe, initial: Initial, batch: Mapping[str, Tensor]) -> Verification:
    """Run one batch through both; no gradient (an expert without tokens) is one of zeros."""
    graph = model.graphs[variant_of(model, batch, ())]
    (numbers,) = numbers_of(graph, [batch], initial.buffers)
    whole = [Part(batch, (), 1.0, numbers)]
    expected = plainly(LossModule(initial.module.train(), recipe), whole)
    found = errors(in_turn(model, initial, whole), expected)
    return Verification(found.loss, found.gradient, found.parameter)
