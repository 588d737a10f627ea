"""Predictions of a model: tensors with a row for each example."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from varuna.core.errors import ModelError
from varuna.partition.watching.explaining import in_plain_words

OutputsFunction = Callable[[Any, Mapping[str, Tensor]], Tensor | Mapping[str, Tensor]]
_OF_TEXT = 3
"""Dimensions of the logits of texts."""
OUTPUT = "output"
"""Name of the rows of a prediction that has no names of its own."""


def outputs_of(output: Any, _: Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """Return a model's predictions, if nothing else is said: its ``logits``, else the tensor that it returns."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if logits is None else {"logits": logits}


def logits_of(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The logits of a language model, (examples, tokens, words): of a tuple its first tensor of three dimensions.

    Raises:
        ModelError: there are none for each token.
    """
    length = next(iter(batch.values())).shape[1]
    said = outputs_of(output, batch)
    parts = said.values() if isinstance(said, Mapping) else said if isinstance(said, list | tuple) else [said]
    found = next((part for part in parts if isinstance(part, Tensor) and part.dim() == _OF_TEXT), None)
    if found is None or found.shape[1] != length:
        raise ModelError(
            "trainer.generate needs a model that returns logits of the shape (examples, tokens, words), or an object, "
            f"dict or tuple that contains them, for {length} tokens here, but got {_described(output)}"
        )
    return found


def rows_of(found: object, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows by name, without a graph.

    Args:
        found: what the user's function, or the model, returned.
        batch: for how many examples.

    Raises:
        ModelError: these are no tensors with a row for each example.
    """
    named = {OUTPUT: found} if isinstance(found, Tensor) else found
    examples = next(iter(batch.values())).shape[0]
    if isinstance(named, Mapping) and named and all(_has_rows(value, examples) for value in named.values()):
        return {str(name): value.detach() for name, value in named.items()}
    raise ModelError(
        "trainer.predict needs a tensor, or a dict of tensors, with a row for each example, but got "
        f"{_described(found)}. Pass output=fn, such as output=lambda output, batch: output.logits"
    )


def _has_rows(value: object, examples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and bool(value.shape[0] == examples)


def _described(found: object) -> str:
    if isinstance(found, Mapping):
        return ", ".join(f"{name}: {_described(value)}" for name, value in found.items()) or "an empty dict"
    if isinstance(found, Tensor):
        return f"a tensor of shape {in_plain_words(str(tuple(found.shape)))}"
    return f"a {type(found).__name__}"
