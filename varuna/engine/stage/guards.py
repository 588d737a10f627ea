"""Truths: whether branches of ``forward`` on activations went, for a micro-batch, as the model was captured."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.core.plan import Plan
from varuna.data.samples import SampleSource
from varuna.partition.cut.split import SectionGraph


class BranchResults:
    """Truths of the micro-batches that ran since they were last looked at, for one rank's sections.

    They stay tensors until then: to look at one would wait for a GPU.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[tuple[str, ...], Tensor]] = {}

    def keep_results(self, section: SectionGraph, micro_batch: int, truths: Sequence[Tensor]) -> None:
        """Keep what a section returned for a micro-batch; a recompute says the same again."""
        flat = torch.stack([truth.detach().reshape(()).to(torch.bool) for truth in truths])
        self._found[micro_batch, section.index] = section.truths, flat

    def clear(self) -> None:
        """Forget all truths: the step begins again."""
        self._found = {}

    def take_false(self) -> tuple[int, str] | None:
        """Look at all and forget them; return micro-batch and place of the first branch that goes the other way."""
        found, self._found = sorted(self._found.items()), {}
        if not found:
            return None
        truths = torch.cat([truths for _, (_, truths) in found]).tolist()  # one transfer from a GPU
        places = ((micro_batch, place) for (micro_batch, _), (places, _) in found for place in places)
        return next((at for at, truth in zip(places, truths, strict=True) if not truth), None)

    def check(self, source: SampleSource, plan: Plan, step: int) -> None:
        """Look at all of them. Before the vote: a step with a false one is not committed.

        Args:
            source: where the samples come from, for the message.
            plan: of the micro-batches.
            step: of the samples.

        Raises:
            DataError: a branch goes the other way.
        """
        odd = self.take_false()
        if odd is not None:
            base = step * plan.global_batch
            indices = source.indices([base + offset for offset in plan.samples_of(odd[0])])
            raise DataError(f"{another_way(odd[1], indices)} Step {step} is not applied.")


def another_way(place: str, indices: Sequence[int]) -> str:
    """Return the message about a branch at ``place`` that goes another way for samples than it was captured."""
    return (
        f"forward() branches on a computed value at {place}, and the batch of dataset indices {list(indices)} "
        "takes another branch than the one that was captured (that of the first samples with the constructor's "
        "parameters). Look at these samples, or write the branch as tensor operations (torch.where)."
    )
