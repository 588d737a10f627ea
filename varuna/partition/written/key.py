"""The key by which a worker asks for a captured model: a hash of all that its own capture would begin with."""

import hashlib
from typing import Any

from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.partition.capture.building import build_without_data
from varuna.partition.capture.capture import Batch, Recipe
from varuna.partition.watching.fake_mode import FakeMode
from varuna.partition.watching.sources import loaded_digest, source_digest


def recipe_digest(recipe: Recipe, *functions: object) -> str | None:
    """Digest what the keys of all captures of a model share; None if it cannot be built: its capture will say more.

    Args:
        recipe: the model and its loss.
        functions: of the user's, whose code counts.
    """
    try:
        mode = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        model = build_without_data(recipe.build, mode).module
        sources = source_digest(model, recipe.build, recipe.loss, recipe.metrics, recipe.outputs, *functions)
        structure = _structure(model)
    except Exception:  # noqa: BLE001 - whatever the user's constructor raises
        return None
    told = (*(recipe.dtype, recipe.training, recipe.eager, recipe.metrics is None, recipe.loss is None), recipe.sizes)
    return hashlib.sha256(f"{sources} {loaded_digest()} {structure} {told}".encode()).hexdigest()


def capture_key(recipe: str, batch: Batch, options: object) -> str:
    """Return the hash. Within one run, workers that have the same agree on the graph.

    It is no proof that two runs would: forward() may read files and the environment.

    Args:
        recipe: its digest.
        batch: a collated batch; shapes and dtypes of its samples count.
        options: all else that decides on the graph, with a ``repr`` that tells it.
    """
    samples = [(name, value.dtype, tuple(value.shape[1:])) for name, value in batch.items()]
    return hashlib.sha256(f"{recipe} {samples} {options}".encode()).hexdigest()


def _structure(model: nn.Module) -> str:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    tensors = [
        (name, first.setdefault(id(value), name), tuple(value.shape), value.dtype, value.requires_grad)
        for name, value in named
    ]
    config: Any = getattr(model, "config", None)
    modes = [each.training for each in model.modules()]
    return f"{model} {modes} {tensors} {config.to_json_string() if hasattr(config, 'to_json_string') else ''}"
