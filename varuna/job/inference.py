"""Requests of a Trainer between two steps: other data, checked, with the graphs in evaluation mode that it needs.

A graph is captured when it is first asked for, and kept.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from varuna.core.errors import ModelError, UsageError
from varuna.engine.inference.evaluate import EvaluationWork
from varuna.engine.inference.generate import Continuation
from varuna.job.arguments import check_whole
from varuna.job.handed_over.code_reads import seen_by
from varuna.job.shared_capture import captured_once
from varuna.job.spec import CAPTURED_SAMPLES, JobSpec
from varuna.job.text import capture_text, check_vocabulary, choice_of, length_for, texts_of, trained_length
from varuna.partition.capture.outputs import OutputsFunction
from varuna.partition.evaluation import for_evaluation, for_prediction
from varuna.partition.initial.constructor import needed_buffers
from varuna.partition.model import PartitionedModel
from varuna.partition.on_device import on_device
from varuna.process.console import warn

_KEPT = 4
"""Graphs for predictions that are kept: one for each ``output`` and form of batch."""


class _Graphs(NamedTuple):
    """A model beside the one that trains, where it computes."""

    model: PartitionedModel
    buffers: dict[str, Tensor]
    """those that only it needs"""


class Inference:
    """Describes each piece of work for the engine."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._evaluating: _Graphs | None = None
        self._predicting: dict[object, _Graphs] = {}
        self._generating: dict[int, tuple[_Graphs, tuple[str, ...]]] = {}  # by length, with the inputs that are tokens
        self._asked = 0

    def prepare(self, called: Collection[str]) -> None:
        """Capture what a script will ask for, by names of methods; warn of what will be refused then.

        Nothing is refused here: a script may name a method that it does not call on this trainer.
        """
        asked: dict[str, Callable[[], object]] = {
            "evaluate": self._for_evaluation,
            "generate": lambda: self._for_text(trained_length(self._spec)),
        }
        for method in called:
            try:
                asked[method]()
            except (UsageError, ModelError) as error:
                warn(f"trainer.{method}(...) will be refused where the script calls it: {error}")

    def evaluation(self, dataset: Any, examples: int | None, *, step: int, averaged: bool) -> EvaluationWork:
        """Describe the work of measuring the loss of another dataset, after ``step``.

        Raises:
            UsageError: ``examples`` is out of range.
            ModelError: the model cannot be cut in evaluation mode as it is in training.
        """
        source = self._spec.reader_of(dataset, step=step)
        count = _count(dataset, examples)
        graphs = self._for_evaluation()
        return EvaluationWork(self._number(), *graphs, source, count, self._spec.loss.weight, averaged)

    def prediction(
        self, dataset: Any, output: OutputsFunction, examples: int | None, *, step: int, averaged: bool
    ) -> EvaluationWork:
        """Describe the work of computing what ``output`` makes of another dataset, after ``step``.

        Raises:
            UsageError, ModelError: as for an evaluation.
            DataError: a sample cannot be read.
        """
        spec, source = self._spec, self._spec.reader_of(dataset, step=step, in_order=True)
        count = _count(dataset, examples)
        batch = source.micro_batch(range(min(CAPTURED_SAMPLES, count))).tensors
        form = tuple((name, value.dtype, value.shape[1:]) for name, value in sorted(batch.items()))
        key = (output, form, seen_by(output))  # what it reads may be other values in every call
        if key not in self._predicting:
            self._predicting = dict(list(self._predicting.items())[1 - _KEPT :])  # ``output`` may be new in every call
            self._predicting[key] = self._beside(for_prediction(spec.partitioned, spec.recipe, batch, output))
        return EvaluationWork(self._number(), *self._predicting[key], source, count, None, averaged)

    def continuation(
        self,
        prompts: Iterable[Iterable[int]],
        new_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        end: int | None,
        averaged: bool,
    ) -> Continuation:
        """Describe the texts that the model continues.

        Raises:
            UsageError: an argument is out of range, or a text would be too long.
            ModelError: this is no causal language model, or it cannot be cut as in training.
        """
        choice = choice_of(temperature, top_k, self._spec.seed)
        check_whole(eos_token_id=end)
        texts = texts_of(prompts, new_tokens)
        length = length_for(self._spec, texts, new_tokens)
        graphs, keys = self._for_text(length)
        check_vocabulary(graphs.model, keys[0], texts)
        return Continuation(self._number(), *graphs, keys, length, texts, new_tokens, choice, end, averaged)

    def _number(self) -> int:
        self._asked += 1
        return self._asked

    def _for_evaluation(self) -> _Graphs:
        spec = self._spec
        if self._evaluating is None:
            batch = spec.captured_batch
            model = captured_once(
                ("evaluation", spec.partitioned, batch),
                lambda: for_evaluation(spec.partitioned, spec.recipe, batch),
                built=spec.built,
                key=lambda: spec.key_of(batch, "evaluation", spec.partitioned.facts.digest),
            )
            self._evaluating = self._beside(model)
        return self._evaluating

    def _for_text(self, length: int) -> tuple[_Graphs, tuple[str, ...]]:
        if length not in self._generating:
            model, keys = capture_text(self._spec, length)
            self._generating[length] = self._beside(model), keys
        return self._generating[length]

    def _beside(self, model: PartitionedModel) -> _Graphs:
        spec = self._spec
        needed = needed_buffers(model) - needed_buffers(spec.partitioned)
        buffers = spec.beginning().buffers(needed) if needed else {}
        return _Graphs(on_device(model, spec.device), spec.cast(buffers))


def _count(dataset: Any, examples: int | None) -> int:
    """Return the number of examples to use of another dataset."""
    size = len(dataset) if hasattr(dataset, "__len__") else None
    count = size if examples is None else examples
    if count is None or count < 1 or (size is not None and count > size):
        raise UsageError(f"examples={examples}: the dataset has {size or 'no length'}. Say how many to use.")
    return count
