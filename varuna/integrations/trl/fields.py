"""Fields that TRL's configurations add: those that can hold here, and a refusal of all others by name."""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from varuna.core.errors import UsageError

_BOTH = """model_init_kwargs trust_remote_code dataset_num_proc max_length truncation_mode padding_free
    pad_to_multiple_of pad_token router_aux_loss_coef"""
PREPARING = frozenset(_BOTH.split())
"""Fields of both that TRL's own code uses before training, or that leave the loss as it is."""


def check_fields(config: Any, used: Set[str], known: Mapping[str, Set[object]]) -> None:
    """Refuse, by name, every field of TRL's own that is set and cannot be honoured.

    Args:
        config: an ``SFTConfig`` or a ``DPOConfig``.
        used: the names of those that are.
        known: of some of them, which values are.

    Raises:
        UsageError: there is one.
    """
    library = next(kind for kind in type(config).__mro__ if kind.__module__.startswith("trl."))
    inherited = {each.name for each in dataclasses.fields(library.__mro__[1])}
    own = [each for each in dataclasses.fields(library) if each.name not in inherited]
    refused = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in own
        if field.name not in used | PREPARING and getattr(config, field.name) != _default(field)
    ]
    for name, values in known.items():
        found = getattr(config, name)
        if not set(found if isinstance(found, list) else [found]) <= values:
            refused.append(f"{name}={found!r} (known: {', '.join(map(repr, sorted(values, key=str)))})")
    if refused:
        raise UsageError(
            f"varuna.integrations.trl cannot do what {', '.join(refused)} asks for. Leave it out, or train with "
            "varuna.Trainer itself: docs/recipes.md has the same as scripts."
        )


def _default(field: Any) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default
