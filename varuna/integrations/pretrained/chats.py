"""Chats and pairs of answers as samples of a causal language model: the loss counts what the assistant says."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna.core.errors import UsageError
from varuna.integrations.pretrained.folder import first_line, records
from varuna.process.console import say_once

IGNORED = -100
Message = dict[str, Any]


class Tokens(NamedTuple):
    """A chat in tokens."""

    ids: list[int]
    labels: list[int]
    """the same, and ``IGNORED`` where the assistant does not speak"""

    @property
    def has_targets(self) -> bool:
        """Return whether the loss counts any of it; the first token is never predicted."""
        return any(label != IGNORED for label in self.labels[1:])


class Chats:
    """Rows of chats, as a model of transformers takes them: several chats in a row, of which none sees another.

    Positions begin again with each chat, and there is no mask: transformers then lets each token see its own chat only,
    if ``config.use_cache`` is off.
    """

    def __init__(self, file: str | Path, tokenizer: Any, length: int) -> None:
        """Read and pack the chats.

        Args:
            file: with ``{"messages": [{"role": ..., "content": ...}, ...]}`` on each line.
            tokenizer: with a chat template.
            length: tokens of a row. Longer chats are cut.

        Raises:
            UsageError: the file is of another form, the template fails, or no chat has anything to learn.
        """
        lines = records(file, "messages")
        chats = [_tokens(tokenizer, line["messages"], length, f"{file}, chat {at}") for at, line in enumerate(lines, 1)]
        kept = _with_targets([(each,) for each in chats], f"chats of {file}", length)
        self.rows = packed([each for (each,) in kept], length)
        self._length, self._padding = length, tokenizer.eos_token_id or 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        rest = self._length - sum(len(each.ids) for each in row)
        chats = [*row, Tokens([self._padding] * rest, [IGNORED] * rest)]
        return {
            "input_ids": torch.tensor([token for each in chats for token in each.ids]),
            "position_ids": torch.cat([torch.arange(len(each.ids)) for each in chats]),
            # the first token of a chat would be predicted from the chat before it in the row
            "labels": torch.tensor([label for each in chats for label in (IGNORED, *each.labels[1:])[: len(each.ids)]]),
        }


class Pairs:
    """Pairs of a better and a worse answer, as rows of one length: ``input_ids``, ``attention_mask``, ``labels``."""

    def __init__(self, file: str | Path, tokenizer: Any, length: int) -> None:
        """Read them.

        Args:
            file: with lists of messages, or texts, called ``prompt``, ``chosen`` and ``rejected`` on each line.
            tokenizer: with a chat template.
            length: tokens of a row. Longer ones are cut.

        Raises:
            UsageError: as for ``Chats``.
        """
        lines = records(file, "prompt", "chosen", "rejected")
        pairs = [
            tuple(
                _tokens(tokenizer, [*_said("user", line["prompt"]), *_said("assistant", line[name])], length, where)
                for name in ("chosen", "rejected")
            )
            for line, where in ((line, f"{file}, pair {at}") for at, line in enumerate(lines, 1))
        ]
        self.pairs = _with_targets(pairs, f"pairs of {file}", length)
        self._length, self._padding = length, tokenizer.eos_token_id or 0

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pair = self.pairs[index]
        return {
            "input_ids": torch.tensor([self._row(each.ids, self._padding) for each in pair]),
            "attention_mask": torch.tensor([self._row([1] * len(each.ids), 0) for each in pair]),
            "labels": torch.tensor([self._row(each.labels, IGNORED) for each in pair]),
        }

    def _row(self, values: Sequence[int], rest: int) -> list[int]:
        return [*values, *[rest] * (self._length - len(values))]


def packed(chats: Sequence[Tokens], length: int) -> list[list[Tokens]]:
    """Pack chats into rows of at most ``length`` tokens: the longest first, each where the least room is left over."""
    rows: list[list[Tokens]] = []
    rooms: list[tuple[int, int]] = []  # and whose; ascending
    for chat in sorted(chats, key=lambda each: len(each.ids), reverse=True):
        # the first room that is large enough is the smallest such one: rooms ascend
        at = bisect_left(rooms, (len(chat.ids), 0))
        room, row = rooms.pop(at) if at < len(rooms) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(chat)
        insort(rooms, (room - len(chat.ids), row))
    return rows


def _with_targets(samples: Sequence[tuple[Tokens, ...]], of_what: str, length: int) -> list[tuple[Tokens, ...]]:
    """Keep the samples whose chats all have something to learn."""
    kept = [sample for sample in samples if all(each.has_targets for each in sample)]
    if not kept:
        raise UsageError(
            f"all labels of the {of_what} are masked: no assistant speaks within the first {length} tokens. Look at "
            "the roles of the messages and at the chat template, or take longer rows."
        )
    if len(kept) < len(samples):
        say_once(f"{len(samples) - len(kept)} of {len(samples)} {of_what} have nothing to learn: left out")
    return kept


def _tokens(tokenizer: Any, messages: Sequence[Message], length: int, where: str) -> Tokens:
    """Return a chat in tokens; the assistant's words begin where the chat before, with the template's prompt, ends."""
    if not isinstance(messages, list) or any(not isinstance(each, dict) or "role" not in each for each in messages):
        raise UsageError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}; found {messages!r:.80}')
    whole = _written(tokenizer, messages, where, False)
    labels = [IGNORED] * len(whole)
    for at, message in enumerate(messages):
        if message.get("role") == "assistant":
            # templates may write differently at the end of a chat: only what both writings share is sure
            begin = _common(_written(tokenizer, messages[:at], where, True), whole)
            end = _common(_written(tokenizer, messages[: at + 1], where, False), whole)
            labels[begin:end] = whole[begin:end]
    return Tokens(whole[:length], labels[:length])


def _written(tokenizer: Any, messages: Sequence[Message], where: str, invited: bool) -> list[int]:
    from jinja2 import TemplateError

    try:
        found = tokenizer.apply_chat_template(list(messages), add_generation_prompt=invited, return_dict=False)
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{where}: the chat template of {tokenizer.name_or_path or 'the tokenizer'} fails on it: "
            f'{first_line(error)}. Messages are {{"role": ..., "content": ...}} in an order that the template knows.'
        ) from error
    return list(found)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the first tokens that are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _said(role: str, given: Any) -> list[Message]:
    return given if isinstance(given, list) else [{"role": role, "content": given}]
