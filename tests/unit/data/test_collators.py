"""Collators of Hugging Face, as they are; what they draw belongs to samples."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import default_collate
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from varuna.checks.samples import check_mixed_samples, read_twice
from varuna.core.errors import DataError
from varuna.data.columns import InputNames
from varuna.data.samples import SampleSource
from varuna.data.sizes import SAMPLES, OpenSizes

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "it"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[MASK]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
    fast: Any = PreTrainedTokenizerFast
    tokens: PreTrainedTokenizerFast = fast(
        tokenizer_object=made, **{f"{key}_token": value for key, value in special.items()}
    )
    return tokens


def rows(tokenizer: PreTrainedTokenizerFast, *lengths: int) -> list[dict[str, Any]]:
    return [dict(tokenizer(" ".join(WORDS[:length]))) | {"label": length % 2} for length in lengths]


def test_a_padding_collator_pads_as_it_does_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    data, collate = rows(tokenizer, 3, 7, 5), DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    source = SampleSource(data, seed=0, collate=collate)
    batch = source.micro_batch([0, 1, 2])
    expected = collate([dict(data[index]) for index in batch.indices])
    assert {*batch.tensors} == {*expected} >= {"labels", "attention_mask"}
    assert all(torch.equal(batch.tensors[key], expected[key]) for key in expected)
    assert batch.tensors["input_ids"].shape == (3, 8)
    assert data[0].keys() >= {"label"}, "the dataset keeps what the collator pops"


def test_a_collator_that_pops_labels_leaves_the_dataset_as_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    data = [{"input_ids": [5, 6], "labels": [0, 1]}, {"input_ids": [7], "labels": [1]}]
    source = SampleSource(data, seed=0, collate=DataCollatorForTokenClassification(tokenizer))
    first, second = (source.micro_batch([0, 1]).tensors["labels"] for _ in range(2))
    assert torch.equal(first, second)
    assert -100 in first


def test_masked_words_of_a_sample_do_not_depend_on_its_micro_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    data = [{"input_ids": each["input_ids"]} for each in rows(tokenizer, *[12] * 6)]
    source = SampleSource(data, seed=3, collate=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4))
    whole = source.micro_batch(range(6))
    halves = [source.micro_batch(range(3)), source.micro_batch(range(3, 6))]
    for key, value in whole.tensors.items():
        assert torch.equal(value, torch.cat([half.tensors[key] for half in halves]))
    assert whole.digests == halves[0].digests + halves[1].digests
    labels = whole.tensors["labels"]
    assert 0 < int((labels != -100).sum()) < labels.numel()
    assert len({tuple(row.tolist()) for row in labels}) > 1
    read_twice(source, range(3))
    check_mixed_samples(source)


def test_masking_that_pads_to_the_longest_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    data = [{"input_ids": each["input_ids"]} for each in rows(tokenizer, 4, 9, 6)]
    source = SampleSource(data, seed=0, collate=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4))
    check_mixed_samples(source)  # it only pads
    with pytest.raises(DataError, match=r"collate= draws.*one by one.*different shapes.*max_length.*dataset\[i\]"):
        source.micro_batch([0, 1, 2])


def test_a_collator_with_a_generator_of_its_own_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    data = [{"input_ids": each["input_ids"]} for each in rows(tokenizer, 12, 12)]
    own = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=7)
    with pytest.raises(DataError, match=r"collate= is random.*seed= of a collator"):
        read_twice(SampleSource(data, seed=0, collate=own), [0, 1])


def test_a_random_dataset_is_not_blamed_on_its_collate() -> None:
    own = np.random.default_rng()

    class Random:
        def __getitem__(self, index: int) -> list[float]:
            return [own.random()]

    with pytest.raises(DataError, match=r"the dataset is random: reading dataset\[0\] twice"):
        read_twice(SampleSource(Random(), seed=0, collate=lambda all_: {"x": torch.tensor(all_)}), [0, 1])


@pytest.mark.parametrize("of_numpy", [False, True])
def test_a_collator_may_fill_the_same_memory_again(of_numpy: bool) -> None:
    memory = np.zeros((8, 3), dtype=np.float32)
    known = torch.from_numpy(memory) if of_numpy else torch.zeros(8, 3)

    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        for number, sample in enumerate(samples):
            known[number] = sample
        return {"x": known[: len(samples)], "fresh": torch.stack(samples)}

    source = SampleSource([torch.rand(3) for _ in range(40)], seed=0, collate=collate)
    batches = [source.micro_batch(range(first, first + 4)).tensors for first in range(0, 40, 4)]
    assert all(torch.equal(batch["x"], batch["fresh"]) for batch in batches)


def mixup(samples: list[Tensor]) -> dict[str, Tensor]:
    batch, share = torch.stack(samples), random.random()
    return {"x": share * batch + (1 - share) * batch[torch.randperm(len(batch))]}


def test_samples_that_are_mixed_at_random_are_refused() -> None:
    source = SampleSource([torch.rand(3) for _ in range(4)], seed=0, collate=mixup)
    with pytest.raises(DataError, match=r"collate= draws random numbers.*mixup.*let dataset\[i\] draw"):
        check_mixed_samples(source)


def test_any_samples_may_be_collated_by_forwards_order() -> None:
    names = InputNames("Net", ("image", "labels"), frozenset({"image", "labels"}))
    texts = [("a", 1), ("bb", 2)]
    source = SampleSource(
        texts,
        seed=0,
        collate=lambda all_: default_collate([(torch.ones(3) * len(t), y) for t, y in all_]),
        names=lambda: names,
    )
    assert {*source.micro_batch([0, 1]).tensors} == {"image", "labels"}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)], ids=["equal", "unequal"])
def test_a_list_of_tensors_stays_one_whatever_their_shapes_are(sizes: tuple[int, int]) -> None:
    source = SampleSource(
        [torch.ones(size) for size in sizes],
        seed=0,
        collate=lambda samples: {"x": samples, "lengths": [len(sample) for sample in samples]},
    )
    assert {*source.micro_batch([0, 1]).tensors} == {"x[0]", "x[1]", "lengths"} | ({SAMPLES} if 4 in sizes else set())


def test_lists_that_nobody_takes_leave_the_samples_rows() -> None:
    source = SampleSource(
        [torch.rand(3) for _ in range(16)],
        seed=0,
        collate=lambda samples: {"x": torch.stack(samples), "before": samples},
        names=lambda: InputNames("Net", ("x",), frozenset({"x"})),
    )
    assert {*source.micro_batch([0, 1]).tensors} == {"x"}
    assert source.sizes() is None


def test_a_list_is_known_also_where_its_tensors_have_as_many_rows_as_there_are_samples() -> None:
    source = SampleSource([torch.rand(3, 8) for _ in range(16)], seed=0, collate=lambda samples: {"x": samples})
    assert source.sizes(2) == OpenSizes((), (), samples=2)


def test_a_collator_that_fails_on_text_is_told_which_columns_are(tokenizer: PreTrainedTokenizerFast) -> None:
    data = [{"input_ids": [5], "text": "the"}, {"input_ids": [6], "text": "fox jumps"}]
    with pytest.raises(ValueError, match="nable to create tensor") as caught:
        SampleSource(data, seed=0, collate=DataCollatorWithPadding(tokenizer)).micro_batch([0, 1])
    assert any("'text'" in note and "remove_columns" in note for note in caught.value.__notes__)
