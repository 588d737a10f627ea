"""Predictions of the model for another dataset, in the dataset's order: forward only, as an evaluation."""

from contextlib import closing

import torch
from safetensors.torch import load, save
from torch import Tensor

from varuna.engine.inference.evaluate import EvaluationRun, EvaluationWork
from varuna.engine.worker.generation import Generation

_WORD = 8
"""Bytes of an int64."""


def predict(generation: Generation, work: EvaluationWork) -> dict[str, Tensor]:
    """Run every example once; all ranks of the grid call this at the same step, and all get all rows.

    Args:
        generation: the running one.
        work: with a model whose metrics are rows (``partition.evaluation.for_prediction``).

    Returns:
        By name, one row for each example, on the host.

    Raises:
        GenerationEnded: the manager ended the generation.
        LinkError: a link broke, or nothing came within the bound.
        DataError: a sample is not what the model was captured with, or differs between stages.
    """
    with closing(PredictionRun(generation, work)) as prediction:
        return prediction.rows()


class PredictionRun(EvaluationRun):
    """A rank's part of a prediction."""

    def rows(self) -> dict[str, Tensor]:
        """Run all chunks; after each, every rank gets all rows of it."""
        found: dict[str, Tensor] = {}
        for first, chunk in self.chunks():
            parts = [self.named(micro_batch) for micro_batch in chunk]
            for replica, named in enumerate(self._exchange(parts if self.stage.is_last else [])):
                numbers = self.plan.micro_batches_of(replica)[first : first + self.chunk]
                places = torch.tensor([place for number in numbers for place in self.plan.samples_of(number)])
                for name, rows in named.items():
                    if name not in found:
                        found[name] = rows.new_empty((self.plan.global_batch, *rows.shape[1:]))
                    found[name][places] = rows
        return found

    def named(self, micro_batch: int) -> dict[str, Tensor]:
        """Return the rows of a micro-batch, by name; nothing but on the last stage."""
        made, _ = self.forward(micro_batch)
        rows = made[1 : 1 + len(self.work.model.metrics)]  # the first is in the place of the loss
        return {name: value.cpu() for name, value in zip(self.work.model.metrics, rows, strict=False)}

    def _exchange(self, parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Exchange the rows of a chunk, by replica. Each byte has one writer, so that adding words is exact."""
        joined = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        mine = save(joined) if joined else b""
        if self.plan.workers == 1:
            return [joined]
        sizes = torch.zeros(self.plan.replicas, dtype=torch.int64)
        if mine:
            sizes[self.generation.replica] = len(mine)
        self.sum_all("sizes", sizes, "how much the other replicas predicted")
        # Whole words for each replica, so that no word has two writers.
        starts = [0, *(-(-sizes // _WORD) * _WORD).cumsum(0).tolist()]
        table = torch.zeros(starts[-1] // _WORD, dtype=torch.int64)
        held = table.view(torch.uint8)
        if mine:
            held[starts[self.generation.replica] :][: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.sum_all("rows", table, "what the other replicas predicted")
        found = [bytes(held[start:][:size].numpy()) for start, size in zip(starts, sizes.tolist(), strict=False)]
        return [load(part) if part else {} for part in found]
