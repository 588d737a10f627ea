"""The configuration that a model carries with it, so that an export can be loaded without the training script."""

import json
from collections.abc import Callable
from typing import Any

from torch import nn


class Configured:
    """Builds the model, and remembers the configuration of what was built if it has one as Hugging Face's do."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.__wrapped__ = build  # where ``inspect.unwrap`` looks
        self.json: str | None = None
        """content of a ``config.json``; None before the first model, or if it has no configuration"""

    def __call__(self) -> nn.Module:
        """Build the model."""
        module = self.__wrapped__()
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_json_string"):
            found = {"architectures": [type(module).__name__], **json.loads(config.to_json_string())}
            found["architectures"] = found["architectures"] or [type(module).__name__]
            self.json = json.dumps(found, indent=2, sort_keys=True) + "\n"
        return module
