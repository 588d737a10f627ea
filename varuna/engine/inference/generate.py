"""Texts that a language model continues, a token at a time: forward only, over the stages and replicas of a generation.

All texts are rows of one length. What is behind a text's last token cannot change what the model says of that token, if
each place sees the places before it only; a model where it does is noticed, and refused.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.core.errors import DivergedError, ModelError, UsageError
from varuna.data.randomness import derive_key
from varuna.data.samples import SampleSource
from varuna.engine.inference.evaluate import EvaluationWork
from varuna.engine.inference.predict import PredictionRun
from varuna.engine.worker.generation import Generation
from varuna.partition.model import PartitionedModel

_LEAST_TURNS = 2
"""The second one shows whether the model looks ahead."""
_LOOKS_AHEAD = (
    "trainer.generate needs a model in which no token sees the ones after it, as in GPT-2 or Llama. Here the logits of "
    "a token changed when another one was appended. If that is a matter of a mask, let forward() make a causal one."
)
_SAME = {torch.float32: 1e-4}
_SAME_IN_HALVES = 1e-2
"""Largest difference of two runs of one graph on the same values, relative to the largest logit."""
_NO_TOKEN = -1
"""In place of one, where the logits are no numbers to choose by."""


class Choice(NamedTuple):
    """The rule by which the next token is chosen."""

    temperature: float = 0.0
    """0: the likeliest"""
    top_k: int | None = None
    """most words, the likeliest, of which one is chosen"""
    seed: int = 0

    def of(self, logits: Tensor, *keys: int) -> int:
        """Choose the next token.

        Args:
            logits: one for each word, float32, on the host.
            keys: tell this choice from others: the same keys choose the same.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        scaled = (logits.double() - logits.max()) / self.temperature  # else a low temperature would overflow
        if self.top_k is not None and self.top_k < len(scaled):
            scaled[scaled < scaled.topk(self.top_k).values[-1]] = -torch.inf
        # By keys, not by what was drawn before: the same token in any plan, and 63 bits, which a seed may have.
        draws = torch.Generator().manual_seed(derive_key(self.seed, "generate", *keys) >> 1)
        return int(torch.multinomial(scaled.softmax(0), 1, generator=draws))


class LastLogits(NamedTuple):
    """The model's logits for the last token of a text."""

    place: int
    """of the token"""
    logits: Tensor
    """float32, on the host"""

    def differs(self, row: Tensor) -> bool:
        """Return whether the logits of a longer text, (length, words), are others at this place."""
        said = self.logits.isfinite()  # a model may exclude words
        before, now = self.logits[said], row[self.place].float().cpu()[said]
        return bool((now - before).abs().max() > _SAME.get(row.dtype, _SAME_IN_HALVES) * before.abs().max())


class Continuation(NamedTuple):
    """Texts to continue, and how to do it."""

    number: int
    """as that of an evaluation"""
    model: PartitionedModel
    """in evaluation mode, for the job's device; its first rows are logits of (length, words)"""
    buffers: Mapping[str, Tensor]
    """those that training does not have"""
    keys: Sequence[str]
    """of the batch: inputs that are the tokens"""
    length: int
    """of rows, in tokens"""
    texts: Sequence[Sequence[int]]
    new_tokens: int
    choice: Choice
    end: int | None
    """the token after which a text is complete"""
    averaged: bool = False


class _Rows:
    """Texts as a dataset: rows of one length. Zeros fill them up."""

    def __init__(self, keys: Sequence[str], length: int, texts: Sequence[Sequence[int]]) -> None:
        self._keys, self._length, self._texts = keys, length, texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.zeros(self._length, dtype=torch.int64)
        row[: len(self._texts[index])] = torch.tensor(self._texts[index])
        return dict.fromkeys(self._keys, row)


def generate(generation: Generation, work: Continuation) -> list[list[int]]:
    """Continue the texts; all ranks of the grid call this at the same step, and all get all texts.

    Only the last stage chooses, and tells the others: machines need not agree on the last bit of a probability.

    Raises:
        UsageError: the ranks were asked for different things.
        ModelError: the model looks ahead.
        DivergedError: logits are not finite.
        GenerationEnded: the manager ended the generation.
        LinkError: a link broke, or nothing came within the bound.
    """
    _compare(generation, work)
    texts, complete, said = [list(text) for text in work.texts], set[int](), dict[int, LastLogits]()
    for turn in range(max(work.new_tokens, _LEAST_TURNS)):
        with generation.span("generate", turn), closing(_Turn(generation, work, texts, said)) as one:
            found, said = one.rows(), one.said
        if found["looks_ahead"].any():
            raise ModelError(_LOOKS_AHEAD)
        if (found["token"] == _NO_TOKEN).any():
            raise DivergedError(
                "trainer.generate got logits that are not finite (NaN or infinity), so no token can be chosen. Train "
                "in bf16 or fp32, or with a lower learning rate, and look at the losses of the steps before."
            )
        for place, token in enumerate(found["token"].tolist()):
            if place not in complete and turn < work.new_tokens:
                texts[place].append(token)
                if token == work.end:
                    complete.add(place)
        if len(complete) == len(texts) and turn + 1 >= _LEAST_TURNS:
            break
    return texts


def _compare(generation: Generation, work: Continuation) -> None:
    """Compare what the ranks were asked for, before a link waits for messages that another rank does not send.

    Raises:
        UsageError: not all were asked for the same.
    """
    workers = generation.plan.workers
    if workers == 1:
        return
    words = [number for text in work.texts for number in (len(text), *text)]
    options = (work.new_tokens, work.choice, work.end, work.averaged, work.length)
    # 63 bits, so that it fits into int64.
    mine = derive_key(*words, str(options)) >> 1
    table = torch.zeros(workers, dtype=torch.int64)
    table[generation.assignment.rank] = mine
    what = "what the other ranks were asked to generate"
    generation.reducer.sum_over_grid(("generation's words", work.number), table, what)
    if (table != mine).any():
        raise UsageError(
            "trainer.generate was called with different prompts or options on different workers: give all of them the "
            "same, after the same step."
        )


class _Turn(PredictionRun):
    """A rank's part of one more token for every text."""

    def __init__(
        self,
        generation: Generation,
        work: Continuation,
        texts: Sequence[Sequence[int]],
        before: Mapping[int, LastLogits],
    ) -> None:
        source = SampleSource(_Rows(work.keys, work.length, texts), seed=0, shuffles=False)
        asked = (work.number, work.model, work.buffers, source, len(texts), None, work.averaged)
        super().__init__(generation, EvaluationWork(*asked))
        self._choice, self._texts, self._before = work.choice, texts, before
        self.said: dict[int, LastLogits] = {}
        """of each text, where that is computed"""

    def named(self, micro_batch: int) -> dict[str, Tensor]:
        """Return the next token of each text of a micro-batch, chosen by the last stage."""
        made, _ = self.forward(micro_batch)
        if not self.stage.is_last:
            return {}
        logits, choice, step = made[1], self._choice, self.stage.next_step
        tokens, ahead = list[int](), list[bool]()
        for row, place in enumerate(self.plan.samples_of(micro_batch)):
            newest = len(self._texts[place]) - 1
            self.said[place] = LastLogits(newest, logits[row, newest].float().cpu())
            said = self.said[place].logits
            tokens.append(choice.of(said, step, place, newest) if said.max().isfinite() else _NO_TOKEN)
            before = self._before.get(place)
            ahead.append(before is not None and before.differs(logits[row]))
        return {"token": torch.tensor(tokens), "looks_ahead": torch.tensor(ahead)}
