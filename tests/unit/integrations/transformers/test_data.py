from typing import Any

from torch.utils.data import SequentialSampler
from transformers import DataCollatorWithPadding

from varuna.integrations.transformers.data import Ordered, one_length


def test_every_epoch_has_whole_steps_in_the_samplers_order() -> None:
    data = [10, 11, 12, 13, 14]
    ordered = Ordered(data, SequentialSampler(data), seed=0, kept=5, per_epoch=6)
    assert [ordered[position] for position in range(12)] == [10, 11, 12, 13, 14, 10] * 2
    dropped = Ordered(data, SequentialSampler(data), seed=0, kept=4, per_epoch=4)
    assert [dropped[position] for position in range(8)] == [10, 11, 12, 13] * 2


def test_a_collator_pads_to_the_longest_of_the_dataset() -> None:
    none: Any = None
    samples = [{"input_ids": [1] * length} for length in (3, 9, 5)]
    padded = one_length(DataCollatorWithPadding(tokenizer=none, pad_to_multiple_of=4), samples)
    assert isinstance(padded, DataCollatorWithPadding)
    assert (padded.padding, padded.max_length) == ("max_length", 12)
    equal = DataCollatorWithPadding(tokenizer=none)
    assert one_length(equal, samples[:1] * 2) is equal
    assert one_length(list, samples) is list
