"""The inputs of a model's ``forward``, named without data."""

import inspect

from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.core.errors import ModelError
from varuna.data.columns import InputNames
from varuna.partition.capture.building import build_without_data
from varuna.partition.capture.capture import Recipe
from varuna.partition.watching.explaining import BUILDING, explain
from varuna.partition.watching.fake_mode import FakeMode

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def input_names(recipe: Recipe, *, is_weighed: bool) -> InputNames:
    """Name the inputs of ``forward``: of the class if ``model=`` is one, else of a module that is built without data.

    Args:
        recipe: the model.
        is_weighed: a function of the user's weighs batches.

    Raises:
        ModelError: the model cannot be built.
    """
    build = inspect.unwrap(recipe.build)
    if isinstance(build, type) and issubclass(build, nn.Module):
        name, parameters = build.__name__, [*inspect.signature(build.forward).parameters.values()][1:]
    else:
        try:
            mode = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
            module = build_without_data(recipe.build, mode).module
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(explain("cannot be built without allocating it", error, BUILDING)) from error
        name, parameters = type(module).__name__, [*inspect.signature(module.forward).parameters.values()]
    needed = sum(each.kind in _BY_POSITION and each.default is each.empty for each in parameters)
    return InputNames(
        model=name,
        order=tuple(each.name for each in parameters if each.kind in _BY_POSITION),
        named=frozenset(each.name for each in parameters if each.kind in _BY_NAME),
        required=frozenset(each.name for each in parameters if each.kind in _BY_NAME and each.default is each.empty),
        takes_any=any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
        read_apart=recipe.loss is not None or recipe.metrics is not None or is_weighed,
        needed=None if recipe.loss is None else needed,
    )
