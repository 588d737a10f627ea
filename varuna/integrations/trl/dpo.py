"""TRL's DPOTrainer: the reference is the model without its adapters, in the same forward, or computed before."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import trl
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from varuna.core.errors import UsageError
from varuna.integrations.pretrained.adapters import doubled, off_in_second_half
from varuna.integrations.transformers.trainer import OverVaruna
from varuna.integrations.trl.base import OfTrl, rounded_up

_USED = """disable_dropout precompute_ref_log_probs precompute_ref_batch_size loss_type loss_weights label_smoothing
    beta"""
_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")


@dataclass(frozen=True)
class _Scores:
    """Inputs of a loss of pairs: how much likelier than for the reference each answer is, in logarithms."""

    better: Tensor
    worse: Tensor
    better_length: Tensor
    worse_length: Tensor
    beta: float
    smoothing: float

    @property
    def margin(self) -> Tensor:
        return self.beta * (self.better - self.worse)


def _ipo(of: _Scores) -> Tensor:
    return (of.better / of.better_length - of.worse / of.worse_length - 1 / (2 * of.beta)).square()


def _robust(of: _Scores) -> Tensor:
    clean, flipped = logsigmoid(of.margin), logsigmoid(-of.margin)
    return (of.smoothing * flipped - (1 - of.smoothing) * clean) / (1 - 2 * of.smoothing)


LOSSES: dict[str, Callable[[_Scores], Tensor]] = {
    "sigmoid": lambda of: -logsigmoid(of.margin),
    "hinge": lambda of: torch.relu(1 - of.margin),
    "ipo": _ipo,
    "robust": _robust,
    "apo_zero": lambda of: 1 - torch.sigmoid(of.beta * of.better) + torch.sigmoid(of.beta * of.worse),
    "apo_down": lambda of: torch.sigmoid(of.beta * of.better) + 1 - torch.sigmoid(of.margin),
}
"""TRL's names of losses of pairs, which are means over pairs."""


class Pairs:
    """Joins pairs that TRL has prepared: rows of one length, the better answer before the worse one in each example."""

    def __init__(self, collator: Any, dataset: Any) -> None:
        """Take TRL's collator, and the length of the longest row of its dataset."""
        self._collator = collator
        columns = (dataset[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
        longest = max(len(prompt) + max(len(one), len(other)) for prompt, one, other in zip(*columns, strict=True))
        self._length = rounded_up(min(longest, collator.max_length or longest), collator.pad_to_multiple_of)

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a micro-batch."""
        found = self._collator(samples)
        rows = {name: self._rows(value, name) for name, value in found.items() if name not in _REFERENCES}
        return rows | {name: found[name] for name in _REFERENCES if name in found}

    def _rows(self, value: Tensor, name: str) -> Tensor:
        rest = self._collator.pad_token_id if name == "input_ids" else 0
        padded = nn.functional.pad(value, (0, max(0, self._length - value.shape[1])), value=rest)
        # TRL's collator puts all better answers before all worse ones; here each example has its pair
        better, worse = padded.chunk(2)
        return torch.stack([better, worse], 1)


_Theirs: Any = trl.DPOTrainer


class DPOTrainer(OfTrl, OverVaruna, _Theirs):
    """TRL's DPOTrainer, training on one device or on any number of workers that come and go."""

    used = frozenset(_USED.split())
    known: ClassVar[Mapping[str, Set[object]]] = {"loss_type": LOSSES.keys()}

    def _check_made(self) -> None:
        super()._check_made()
        if not self.precompute_ref_logps and self.ref_model is not None:
            raise UsageError(
                "the reference is a model of its own, which would be a second model in every stage. Set "
                "precompute_ref_log_probs=True in the DPOConfig, or train adapters (peft_config=LoraConfig(...))."
            )
        if "ref" in getattr(self.model, "peft_config", {}):
            raise UsageError(
                "the model has trained adapters already, of which the reference would be a copy. Merge them into the "
                "model before (merge_and_unload()), and train new ones (peft_config=LoraConfig(...))."
            )

    def _precompute_ref_logps(self, *given: Any, **named: Any) -> Any:
        """Move the model to the device meanwhile: TRL's batches are there, and the model rests in host memory."""
        model: Any = self.ref_model or self.model
        place = next(model.parameters()).device
        model.to(self.args.device)
        try:
            return super()._precompute_ref_logps(*given, **named)
        finally:
            model.to(place)

    def _collator(self) -> Pairs:
        return Pairs(self.data_collator, self.train_dataset)

    def _loss(self, module: nn.Module, inputs: dict[str, Any]) -> Tensor:
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        rows = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if self.precompute_ref_logps:
            rows = {name: value.flatten(0, 1) for name, value in rows.items()}
            odds = _odds(module(**rows, use_cache=False), labels.flatten(0, 1)).unflatten(0, (-1, 2))
            reference = torch.stack([inputs[name] for name in _REFERENCES], 1)
        else:
            hooks = off_in_second_half(module, 2)
            try:
                output = module(**{name: doubled(value) for name, value in rows.items()}, use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
            # [examples, with and without adapters, better and worse]
            odds, reference = _odds(output, doubled(labels)).unflatten(0, (-1, 2, 2)).unbind(1)
        better, worse = (odds - reference).unbind(1)
        better_length, worse_length = inputs["completion_mask"].sum(-1).clamp(min=1).unbind(1)
        scores = _Scores(better, worse, better_length, worse_length, self.beta, self.label_smoothing)
        terms = [
            weight * LOSSES[name](scores).mean()
            for name, weight in zip(self.loss_types, self.loss_weights, strict=True)
        ]
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def _odds(output: Any, labels: Tensor) -> Tensor:
    """Return the log-likelihood of each row's targets, [rows]."""
    # the logits of token t predict token t + 1
    return -cross_entropy(output.logits[:, :-1].float().mT, labels[:, 1:], reduction="none").sum(1)
