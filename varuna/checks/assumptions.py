"""Checks the assumptions of a capture before a run begins."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from varuna.checks.compare import Tolerance, differences
from varuna.checks.draws import SameDraws
from varuna.checks.experiment import Experiment
from varuna.checks.outcome import Part, run_sections
from varuna.core.errors import DataError, ModelError
from varuna.data.samples import LOOKED_AT
from varuna.engine.stage.guards import BranchResults, another_way
from varuna.partition.capture.loops import MaskLoopUnroller
from varuna.partition.graph.ranges import check_ranges
from varuna.partition.graph.sample_guards import check_conditions
from varuna.process.console import say, warn

_TOKENS = 3
"""Samples are cut to this many tokens, so that some experts get none."""
_TOLERANCE = Tolerance(loss=1e-4, own=1e-4, beside_all=0.0)


def check_assumptions(experiment: Experiment, micro_batch: int = 1) -> None:
    """Check the first samples against branches that capture took, and its loops against those of the model.

    Args:
        experiment: of the job.
        micro_batch: examples, if the user fixed it: a branch may go the same way for each so many, but not for one.

    Raises:
        DataError: a branch of forward() goes two ways for the first samples already, or not as it was captured; or a
            sample has a whole number that an embedding or a loss cannot take.
        ModelError: a loop over the places where a mask is true does something for other places as well.
    """
    model, source = experiment.model, experiment.source
    count = LOOKED_AT if source.size is None else min(LOOKED_AT, source.size)
    groups = [range(first, first + micro_batch) for first in range(0, max(count - micro_batch, 0) + 1, micro_batch)]
    if any(graph.conditions or graph.ranges for graph in model.graphs):
        for positions in groups:
            batch = source.micro_batch(positions)
            graph = experiment.graph_of(batch)
            check_ranges(graph.ranges, batch.tensors, batch.indices)
            check_conditions(graph.conditions, batch.tensors, batch.indices, experiment.initial.buffers)
    if model.visits_all:
        with experiment.running(torch.float32) as own:
            _check_loops(own, count)
    places = dict.fromkeys(place for graph in model.graphs for section in graph.sections for place in section.truths)
    if places:
        say(
            f"forward() branches on computed values ({', '.join(places)}): captured with the branches of the first "
            "samples; a step that takes another branch is refused"
        )
        with experiment.running() as own:
            for part in map(own.part, groups):
                _check_truths(own, part)


def _check_truths(own: Experiment, part: Part) -> None:
    """Run the sections one after another, and see whether branches on activations go as they were captured."""
    truths = BranchResults()
    run_sections(own.graph_of(part), own.initial, own.initial.buffers, part, 0.0, {}, truths.keep_results)
    if (odd := truths.take_false()) is not None:
        raise DataError(f"{another_way(odd[1], part.indices)} The run does not start.")


def _check_loops(own: Experiment, count: int) -> None:
    """Run the plain model with its loops as written, and with loops that visit every place, until that differs."""
    for position in range(count):
        whole = own.source.micro_batch([position]).tensors
        for batch in ({key: _cut(value) for key, value in whole.items()}, whole):
            places, part = MaskLoopUnroller(), [Part(batch, (), 1.0)]
            try:
                written, visiting = own.plainly(part), own.plainly(part, draws=partial(_visiting, places))
            except Exception:  # noqa: BLE001 - not every model takes a few tokens
                continue
            if differences(written, visiting, _TOLERANCE):
                raise ModelError(
                    "forward() loops over the places where a mask is true (for i in mask.nonzero()), and does "
                    "something at the other places too when it visits them, so it cannot be captured. Two ways "
                    "out: make the loop do nothing there (like an expert without tokens), or wrap the loop into "
                    "one operator with torch.library.custom_op. See docs/partitioning.md, section Refusals."
                )
            if places.added:
                return
    warn(
        "forward() loops over the places where a mask is true; Varuna visits all of them. "
        "Whether this gives the same result could not be checked, because the first samples leave no place out."
    )


@contextmanager
def _visiting(places: MaskLoopUnroller) -> Iterator[None]:
    with SameDraws(), places:  # type: ignore[no-untyped-call]
        yield


def _cut(value: Tensor) -> Tensor:
    return value[:, :_TOKENS] if value.dim() > 1 else value
