"""Jobs of timm and torchvision: one small model of each family, on small images or short videos."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.field import libraries
from tests.field.jobs import Attempt, Job, Prepared, quiet
from tests.field.samples import CLASSES, Drawn, generator_of
from tests.field.shrink import DEPTH, shrunk

_SIZES = (
    "test_",
    "atto",
    "femto",
    "zepto",
    "pico",
    "nano",
    "xxs",
    "xxtiny",
    "xtiny",
    "xxsmall",
    "extra_tiny",
    "xs",
    "tiny",
    "mini",
    "micro",
    "_t0",
    "_t",
    "small",
    "_s_",
    "_s$",
    "s12",
    "s18",
    "_a1",
    "_b0",
    "_m0",
    "_0",
    "18",
    "_t1",
    "_1_",
    "35",
    "050",
    "11",
)
"""What names call their smallest models, the smallest first."""


def _smallest(names: list[str]) -> str:
    """By its name: the shortest of those that have the first of the words for small."""

    def size(name: str) -> tuple[int, int, str]:
        found = [place for place, word in enumerate(_SIZES) if re.search(word, name)]
        return (found[0] if found else len(_SIZES), len(name), name)

    return min(names, key=size)


@cache
def jobs() -> tuple[Job, ...]:
    """A model of every family; none where the libraries are not installed."""
    if not libraries.has_all():
        return ()
    import timm
    import torchvision

    found = [Job("timm", family, _smallest(timm.list_models(module=family)), "class") for family in timm.list_modules()]
    for kind, module in (
        ("class", torchvision.models),
        ("pixels", torchvision.models.segmentation),
        ("video", torchvision.models.video),
    ):
        families: dict[str, list[str]] = {}
        for name in torchvision.models.list_models(module=module):
            source = torchvision.models.get_model_builder(name).__module__.rsplit(".", 1)[-1]
            families.setdefault(source, []).append(name)
        found += [Job("torchvision", family, _smallest(names), kind) for family, names in families.items()]
    return tuple(found)


def ways(attempt: Attempt) -> Iterator[Prepared]:
    """Narrow and shallow first, then shallow, then as it is; on small images first, then on its own size."""
    job = attempt.job
    make: Callable[..., nn.Module] = _timm(job) if job.library == "timm" else _torchvision(job)
    kind, own = _looked_at(job)
    parameters = inspect.signature(kind.__init__).parameters
    for changes in (_tiny(parameters), _shallow(parameters), {}):
        for side in dict.fromkeys((64, own)):
            sized = {"img_size": side} if job.library == "timm" and "img_size" in parameters else {}
            build = partial(_built, make, {**changes, **sized})
            yield Prepared(build, Drawn(partial(_sample, job.kind, side, _input_of(kind))), _loss_of)


def _built(make: Callable[..., nn.Module], changes: Mapping[str, Any]) -> nn.Module:
    return quiet(make(**changes))


def _timm(job: Job) -> Callable[..., nn.Module]:
    import timm

    return partial(timm.create_model, job.model, num_classes=CLASSES)


def _torchvision(job: Job) -> Callable[..., nn.Module]:
    import torchvision

    backbone = {"weights_backbone": None} if job.kind == "pixels" else {}
    return partial(torchvision.models.get_model, job.model, weights=None, num_classes=CLASSES, **backbone)


@cache
def _looked_at(job: Job) -> tuple[type[nn.Module], int]:
    """The model's class, and the side of the images that it is made for."""
    make = _timm(job) if job.library == "timm" else _torchvision(job)
    try:
        with torch.device("meta"):
            module = make()
    except (NotImplementedError, RuntimeError):  # it computes with what it has just drawn
        module = make()
    own: Any = getattr(module, "default_cfg", {}).get("input_size", (3, 224, 224))
    return type(module), int(own[-1])


def _tiny(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Changes by the rules for configurations."""
    found = {}
    for name, parameter in parameters.items():
        value = parameter.default
        if isinstance(value, int | list | tuple) and (new := shrunk(name, value)) != value:
            found[name] = new
    return found


def _shallow(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Changes that leave one block of each stage, or a few of a single one."""
    found: dict[str, Any] = {}
    for name in ("depth", "depths", "num_layers", "layers"):
        default = parameters[name].default if name in parameters else None
        if isinstance(default, int):
            found[name] = DEPTH
        elif isinstance(default, list | tuple) and all(isinstance(each, int) for each in default):
            found[name] = type(default)(1 for _ in default)
    return found


def _input_of(kind: type[nn.Module]) -> str:
    return list(inspect.signature(kind.forward).parameters)[1]


def _sample(kind: str, side: int, name: str, index: int) -> dict[str, Tensor]:
    generator = generator_of(index)
    shape = (3, 8, side, side) if kind == "video" else (3, side, side)
    target = torch.randint(0, CLASSES, (side, side) if kind == "pixels" else (), generator=generator)
    return {name: torch.randn(shape, generator=generator), "target": target}


def _loss_of(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of the first output; auxiliary heads count 0.4, as their authors train them."""
    outputs = (
        list(output.values())
        if isinstance(output, dict)
        else list(output)
        if isinstance(output, tuple | list)
        else [output]
    )
    first, *others = [nn.functional.cross_entropy(each, batch["target"]) for each in outputs if each is not None]
    return first + 0.4 * sum(others, torch.zeros(())) if others else first
