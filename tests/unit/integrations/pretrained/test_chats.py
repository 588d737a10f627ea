"""Chats as rows: what the loss counts, how chats share rows, and what is refused."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.errors import UsageError
from varuna.integrations.pretrained import Chats, Pairs
from varuna.integrations.pretrained.chats import Tokens, packed

TINY = importlib.import_module("examples.recipes.tiny")
WORDS = TINY.tokenizer()


def chat(*said: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def written(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def counted(row: dict[str, Any]) -> str:
    """Return the part of a row that the loss counts."""
    text: str = WORDS.decode(row["labels"][row["labels"] != -100])
    return text


def test_the_loss_counts_each_answer_with_its_end_and_nothing_else(tmp_path: Path) -> None:
    talk = chat(("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"))
    row = Chats(written(tmp_path / "c.jsonl", [talk]), WORDS, 80)[0]
    assert counted(row) == "1<|end|>2<|end|>"
    assert WORDS.decode(row["input_ids"]).startswith("<|system|>be brief<|end|><|user|>one<|end|><|assistant|>1<|end|>")


def test_chats_share_a_row_and_their_positions_begin_anew(tmp_path: Path) -> None:
    talks = [chat(("user", str(at)), ("assistant", "yes" * at)) for at in (1, 2)]
    rows = Chats(written(tmp_path / "c.jsonl", talks), WORDS, 40)
    assert len(rows) == 1
    starts = (rows[0]["position_ids"] == 0).nonzero().flatten()
    assert [WORDS.decode(rows[0]["input_ids"][at : at + 2]) for at in starts[:2]] == ["<|user|>2", "<|user|>1"]
    assert counted(rows[0]) == "yesyes<|end|>yes<|end|>"
    assert all(label == -100 for label in rows[0]["labels"][starts]), "no chat predicts the next one's first token"
    assert all(len(value) == 40 for value in rows[0].values())


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing_keeps_each_chat_once_in_rows_that_hold_it(lengths: list[int]) -> None:
    chats = [Tokens([at] * length, [at] * length) for at, length in enumerate(lengths)]
    rows = packed(chats, 20)
    assert sorted(each.ids[0] for row in rows for each in row) == list(range(len(chats)))
    assert all(sum(len(each.ids) for each in row) <= 20 for row in rows)
    assert sum(lengths) >= 20 * (len(rows) // 2), "two rows that fit into one are one row"


def test_a_template_that_fails_is_refused_with_the_chat_and_its_reason(tmp_path: Path) -> None:
    talks = [chat(("user", "a"), ("assistant", "b")), chat(("judge", "a"), ("assistant", "b"))]
    with pytest.raises(
        UsageError, match=r"c\.jsonl, chat 2: the chat template of .* fails on it: there is no role judge"
    ):
        Chats(written(tmp_path / "c.jsonl", talks), WORDS, 40)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    bare = TINY.tokenizer()
    bare.chat_template = None
    with pytest.raises(UsageError, match=r"c\.jsonl, chat 1: the chat template of .* fails on it: .*chat_template"):
        Chats(written(tmp_path / "c.jsonl", [chat(("user", "a"), ("assistant", "b"))]), bare, 40)


@pytest.mark.parametrize("messages", ["a text", [{"content": "a"}], [1], {"role": "user", "content": "a"}])
def test_messages_of_another_form_are_refused(tmp_path: Path, messages: object) -> None:
    with pytest.raises(UsageError, match=r"c\.jsonl, chat 1"):
        Chats(written(tmp_path / "c.jsonl", [{"messages": messages}]), WORDS, 40)


def test_chats_with_nothing_to_learn_are_refused_if_they_are_all_and_told_if_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, spoken = chat(("user", "a" * 50), ("assistant", "b")), chat(("user", "a"), ("assistant", "b"))
    with pytest.raises(UsageError, match=r"all labels of .* are masked: .* within the first 40 tokens"):
        Chats(written(tmp_path / "c.jsonl", [silent]), WORDS, 40)
    assert len(Chats(written(tmp_path / "d.jsonl", [silent, spoken]), WORDS, 40)) == 1
    assert "1 of 2 chats" in capsys.readouterr().err


def test_pairs_are_rows_of_prompt_and_answer_whose_prompt_is_masked(tmp_path: Path) -> None:
    texts = {"prompt": "who", "chosen": "me", "rejected": "nobody"}
    lists = {
        name: [{"role": role, "content": texts[name]}]
        for name, role in zip(texts, ("user", "assistant", "assistant"), strict=True)
    }
    pairs = Pairs(written(tmp_path / "p.jsonl", [texts, lists]), WORDS, 20)
    for row in (pairs[0], pairs[1]):
        assert [counted({"labels": labels}) for labels in row["labels"]] == ["me<|end|>", "nobody<|end|>"]
        assert row["attention_mask"].sum(1).tolist() == [9, 13]
        assert {value.shape for value in row.values()} == {torch.Size([2, 20])}


def test_pairs_with_nothing_to_learn_are_refused_or_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent, spoken = ({"prompt": "a" * size, "chosen": "b", "rejected": "c"} for size in (50, 1))
    with pytest.raises(UsageError, match=r"all labels of .* are masked"):
        Pairs(written(tmp_path / "p.jsonl", [silent]), WORDS, 20)
    assert len(Pairs(written(tmp_path / "q.jsonl", [silent, spoken]), WORDS, 20)) == 1
    assert "1 of 2 pairs" in capsys.readouterr().err
