"""TRL's SFTTrainer: rows of one length, and the likelihood of their targets."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import trl
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from varuna.integrations.transformers.trainer import OverVaruna
from varuna.integrations.trl.base import OfTrl, rounded_up

IGNORED = -100
_USED = """chat_template_path dataset_text_field dataset_kwargs eos_token shuffle_dataset packing packing_strategy
    eval_packing completion_only_loss assistant_only_loss loss_type"""


@dataclass(frozen=True)
class Rows:
    """Joins samples that TRL has prepared to rows of one length. Packed ones have positions in place of a mask."""

    length: int
    padding: int

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a micro-batch."""
        labels = [each.get("labels", each["input_ids"]) for each in samples]
        found = {
            "input_ids": self._rows([each["input_ids"] for each in samples], self.padding),
            "labels": self._rows(labels, IGNORED),
        }
        if "seq_lengths" not in samples[0]:
            return found | {"attention_mask": self._rows([[1] * len(each["input_ids"]) for each in samples], 0)}
        places = [[place for size in each["seq_lengths"] for place in range(size)] for each in samples]
        found["position_ids"] = self._rows(places, 0)
        found["labels"][found["position_ids"] == 0] = IGNORED  # no document predicts the next one
        return found

    def _rows(self, rows: list[list[int]], rest: int) -> Tensor:
        return torch.stack([pad(torch.tensor(row), (0, self.length - len(row)), value=rest) for row in rows])


_Theirs: Any = trl.SFTTrainer


class SFTTrainer(OfTrl, OverVaruna, _Theirs):
    """TRL's SFTTrainer, training on one device or on any number of workers that come and go."""

    used = frozenset(_USED.split())
    known: ClassVar[Mapping[str, Set[object]]] = {"loss_type": {"nll", "dft"}}

    def _collator(self) -> Rows:
        longest = max(len(each) for each in self.train_dataset["input_ids"])
        return Rows(rounded_up(longest, self.args.pad_to_multiple_of), self._tokenizer.pad_token_id)

    def _loss(self, module: nn.Module, inputs: dict[str, Any]) -> Tensor:
        counted = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        labels = inputs["labels"]
        output = module(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
        found: Tensor
        if self.compute_loss_func is not None:
            found = self.compute_loss_func(output, labels, num_items_in_batch=counted)
        elif self.label_smoother is not None and self.args.loss_type == "nll":
            found = self.label_smoother(output, labels, shift_labels=True, num_items_in_batch=counted)
        else:
            losses = cross_entropy(output.logits[:, :-1].float().mT, labels[:, 1:], reduction="none")
            if self.args.loss_type == "dft":
                losses = losses * (-losses).exp().detach()
            found = losses.sum() / counted
        return found
