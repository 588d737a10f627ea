"""Arguments of ``Trainer.generate``, checked, and the graph that it needs."""

import operator
from collections.abc import Iterable, Iterator, Sequence

import torch

from varuna.core.errors import ModelError, UsageError
from varuna.engine.inference.generate import Choice
from varuna.job.arguments import check_number, check_whole, described
from varuna.job.shared_capture import captured_once
from varuna.job.spec import JobSpec
from varuna.partition.capture.signature import input_names
from varuna.partition.evaluation import for_generation
from varuna.partition.model import PartitionedModel

_TOKENS = "input_ids"
_NO_TARGETS = ("mask", "position", "type", "segment")
"""In names of inputs."""
_SAME_TOKENS = (torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten.to.dtype)
"""Operations that leave tokens what they are."""
_SHORTEST = 16
"""Lengths of graphs are powers of two from here on: few prompts need another graph than those before."""


def choice_of(temperature: float, top_k: int | None, seed: int) -> Choice:
    """Return the rule by which tokens are chosen.

    Raises:
        UsageError: a number is out of range.
    """
    check_number(temperature=temperature)
    check_whole(top_k=top_k)
    if not temperature >= 0:
        raise UsageError(f"temperature={temperature} must be above 0, or 0 to take the likeliest token each time")
    if top_k is not None and (top_k < 1 or temperature == 0):
        raise UsageError(f"top_k={top_k} must be at least 1, and needs temperature= above 0, such as 0.8")
    return Choice(float(temperature), top_k, seed)


def texts_of(prompts: Iterable[Iterable[int]], new_tokens: int) -> list[list[int]]:
    """Return prompts as lists of tokens, given as lists, tensors, or a tensor with a row for each.

    Raises:
        UsageError: they are something else, one of them is empty, or nothing is to be added.
    """
    check_whole(max_new_tokens=new_tokens)
    if new_tokens < 1:
        raise UsageError(f"max_new_tokens={new_tokens} must be at least 1")
    wanted = "a list of prompts, each a list of token ids, such as tokenizer(['Once upon'])['input_ids']"
    if isinstance(prompts, str) or any(isinstance(each, str) for each in prompts):
        raise UsageError(f"trainer.generate continues token ids, not text: pass {wanted}")
    try:
        texts = [[operator.index(token) for token in each] for each in prompts]
    except TypeError:
        raise UsageError(f"prompts= must be {wanted}; it is {described(prompts)}") from None
    if not texts or not all(texts):
        raise UsageError(
            "prompts= must have at least one prompt, and each at least one token, such as the first word's"
        )
    return texts


def length_for(spec: JobSpec, texts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Return the length that the rows of a graph must have.

    Raises:
        UsageError: longer than what the model is trained on, where it may have no positions.
    """
    needed, most = max(map(len, texts)) + new_tokens, trained_length(spec)
    if needed > most:
        raise UsageError(
            f"trainer.generate: the longest prompt and max_new_tokens={new_tokens} make {needed} tokens, but the model "
            f"is trained on {most}. Shorten one of them."
        )
    # the next power of two: each length is a graph of its own
    return min(most, max(_SHORTEST, 1 << (needed - 1).bit_length()))


def trained_length(spec: JobSpec) -> int:
    """Return the tokens of a training sample, of the longest if several lengths are declared."""
    shape = spec.partitioned.inputs[_token_keys(spec)[0]].shape
    if not shape:
        raise UsageError("trainer.generate needs a language model, whose samples are rows of tokens")
    return shape[0]


def capture_text(spec: JobSpec, length: int) -> tuple[PartitionedModel, tuple[str, ...]]:
    """Capture the model with logits for rows of ``length`` tokens; return it and the inputs that are the tokens.

    Some models return logits of all tokens only if they get targets as well: then these are the tokens too.

    Raises:
        ModelError: it cannot be captured, or returns no logits.
    """
    keys = _token_keys(spec)
    try:
        return _captured(spec, keys[:1], length), keys[:1]
    except ModelError:
        if len(keys) == 1:
            raise
        return _captured(spec, keys, length), keys


def _captured(spec: JobSpec, keys: tuple[str, ...], length: int) -> PartitionedModel:
    tokens = {key: torch.zeros(1, length, dtype=torch.int64) for key in keys}
    return captured_once(
        ("text", spec.partitioned, keys, length),
        lambda: for_generation(spec.partitioned, spec.recipe, keys, length),
        built=spec.built,
        key=lambda: spec.key_of(tokens, "text", spec.partitioned.facts.digest),
    )


def check_vocabulary(model: PartitionedModel, key: str, texts: Sequence[Sequence[int]]) -> None:
    """Refuse tokens for which the model has no row.

    On every rank: only the first stage would find that its table lacks one, and the others would wait for it.

    Args:
        model: as captured for texts.
        key: the input that is the tokens.
        texts: token ids.

    Raises:
        UsageError: a token is in no vocabulary, or not in the model's.
    """
    words = min(_rows_of_tables(model, key), default=1 << 63)
    for number, text in enumerate(texts):
        for token in text:
            if not 0 <= token < words:
                raise UsageError(
                    f"prompts[{number}] has the token {token}, but token ids of this model are from 0 to {words - 1}. "
                    "Use the tokenizer that the model was made for."
                )


def _rows_of_tables(model: PartitionedModel, key: str) -> Iterator[int]:
    """Yield the rows of each embedding in which tokens are looked up as they come, not changed before."""
    for section in model.sections:
        graph = section.module.graph
        size = ("",) if section.needs_batch_size else ()
        names = (*section.takes, *section.inputs, *size, *section.parameters, *section.buffers, *section.constants)
        given = dict(zip(graph.find_nodes(op="placeholder"), names, strict=True))
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
            table, tokens = node.args[:2]
            while tokens.target in _SAME_TOKENS:
                tokens = tokens.args[0]
            if given.get(tokens) == key and given.get(table) in model.shapes:
                yield model.shapes[given[table]][0]


def _token_keys(spec: JobSpec) -> tuple[str, ...]:
    """The input that is the tokens, and those that may be targets: of the same form, and no masks or positions."""
    inputs = spec.partitioned.inputs
    names = input_names(spec.recipe, is_weighed=spec.loss.weight is not None)
    first = _TOKENS if _TOKENS in inputs else next((name for name in names.order if name in inputs), None)
    if first is None or inputs[first].dtype.is_floating_point:
        raise UsageError(
            "trainer.generate needs a language model: its first input must be tokens, whole numbers. Here inputs are "
            + ", ".join(inputs)
        )
    alike = [key for key, each in inputs.items() if each == inputs[first] and not any(map(key.count, _NO_TARGETS))]
    return (first, *(key for key in alike if key != first))
