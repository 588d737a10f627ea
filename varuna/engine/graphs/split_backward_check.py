"""Sections that can run B in two halves: found out on the job's own data, once.

The two halves compute the products that autograd would, so they should give its bits. A section where they do not,
whatever the reason (a stride, a kernel, an operation that draws without a seed), is never split: splitting may
change when gradients are computed, never what they are.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from torch.fx import GraphModule

from varuna.data.digests import tensors_digest
from varuna.engine.graphs.run_once import Run, SectionOutcome, Seeded, kind_of, outcome
from varuna.partition.cut.same_graph import code_of
from varuna.partition.cut.split import SectionGraph
from varuna.partition.cut.split_backward import PendingWeights, retarget
from varuna.partition.model import PartitionedModel


@dataclass
class Halves:
    """Retargeted sections of one model and what the check said, kept over generations."""

    _retargeted: dict[GraphModule, GraphModule | None] = field(default_factory=dict)
    _exact: dict[Hashable, bool] = field(default_factory=dict)

    def of(
        self,
        model: PartitionedModel,
        section: SectionGraph,
        arguments: Sequence[Any],
        seeded: Seeded,
    ) -> Run | None:
        """Return the section's graph with ``PendingWeights`` as a further first argument; None if it must run whole.

        The first micro-batch of a shape costs two runs more. Sections with equal code and shapes share a verdict.

        Args:
            model: for names and shapes of parameters; one declared length of it.
            section: one of the model's.
            arguments: of the section's own graph.
            seeded: in force while the section runs.
        """
        if section.module not in self._retargeted:
            self._retargeted[section.module] = retarget(section, model.trainable, model.shapes)
        module = self._retargeted[section.module]
        if module is None:
            return None
        key = (code_of(section.module), *(kind_of(argument) for argument in arguments))
        if key not in self._exact:
            self._exact[key] = _agree(section.module.forward, module.forward, arguments, seeded)
        return module.forward if self._exact[key] else None


def _agree(whole: Run, halves: Run, arguments: Sequence[Any], seeded: Seeded) -> bool:
    """Return whether both give the same results, and the same gradients of all arguments, bit for bit.

    Only digests outlive a run, so that no more gradients are in memory than in any B.
    """
    expected = _digest(outcome(whole, arguments, seeded))
    pending = PendingWeights()
    try:
        found = outcome(partial(halves, pending), arguments, seeded, finish=pending.flush)
    except RuntimeError:  # such as an operation that refuses the output of a custom function
        return False
    return _digest(found) == expected


def _digest(run: SectionOutcome) -> int:
    return tensors_digest({str(place): value for place, value in enumerate(chain(*run)) if value is not None})
