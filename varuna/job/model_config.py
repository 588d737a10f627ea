"""The configuration that a model carries with it, so that an export can be loaded without the training script."""

import json
from collections.abc import Callable
from typing import Any

from torch import nn

from varuna.partition.originals.with_loss import ModelAndLoss
from varuna.partition.parameter_marks import ParameterMarks, marks_of


class Configured:
    """Builds the model, and remembers the configuration of what was built if it has one as Hugging Face's do."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.__wrapped__ = build  # where ``inspect.unwrap`` looks
        self.json: str | None = None
        """content of a ``config.json``; None before the first model, or if it has no configuration, or adapters"""
        self.has_adapters = False
        """the model is one of PEFT's"""
        self.marks: ParameterMarks = {}
        """attributes of its parameters; empty before the first model"""

    def __call__(self) -> nn.Module:
        """Build the model."""
        built = self.__wrapped__()
        if isinstance(built, nn.Module):
            self.marks.update(marks_of(built))
        module = built.model_itself if isinstance(built, ModelAndLoss) else built
        self.has_adapters = hasattr(module, "peft_config") and hasattr(module, "active_adapter")
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_json_string") and not self.has_adapters:  # that would be the base's
            found = {"architectures": [type(module).__name__], **json.loads(config.to_json_string())}
            found["architectures"] = found["architectures"] or [type(module).__name__]
            self.json = json.dumps(found, indent=2, sort_keys=True) + "\n"
        return built
