"""Jobs of timm and torchvision: one small model of each family, on small images or short videos."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from tests.field import libraries
from tests.field.jobs import MODEST_PARAMETERS, MOST_PARAMETERS, Attempt, Job, Prepared, quiet
from tests.field.narrow import narrow, smaller
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
"""Words in the names of the smallest models, the smallest first."""


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
    """Narrow and shallow first, then shallow, then with narrow layers, then as it is; on small images first."""
    job = attempt.job
    kind, own, parameters = _looked_at(job)
    takes = _arguments_of(kind)
    sizes = [(64, _FRAMES), (own, _FRAMES), (own, 2 * _FRAMES) if job.kind == "video" else (_LARGE, _FRAMES)]
    for side, frames in dict.fromkeys(sizes):
        for build in _builders(job, kind, takes, parameters, side, frames):
            yield Prepared(build, Drawn(partial(_sample, job.kind, side, frames, _input_of(kind))), _loss_of)


def _arguments_of(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Of its constructor, with the fields of a configuration that it takes, which a builder takes by their names."""
    found = dict(inspect.signature(kind.__init__).parameters)
    hints = get_type_hints(kind.__init__) if "cfg" in found else {}
    for each in (hints.get("cfg"), *get_args(hints.get("cfg"))):
        for field in dataclasses.fields(each) if isinstance(each, type) and dataclasses.is_dataclass(each) else ():
            found[field.name] = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
    return found


_FRAMES = 8
_LARGE = 299


def _builders(
    job: Job, kind: type[nn.Module], takes: Mapping[str, Any], parameters: int, side: int, frames: int
) -> Iterator[Callable[[], nn.Module]]:
    """Each in one way smaller than the next."""
    make: Callable[..., nn.Module] = _timm(job) if job.library == "timm" else _torchvision(job)
    sized = {"img_size": side} if job.library == "timm" and "img_size" in takes else {}
    for changes in (_tiny(takes), _shallow(takes)):
        if changes and job.library == "timm":
            yield partial(_built, partial(make, **{**changes, **sized}), nullcontext)
    plain = partial(make, **sized)
    if parameters <= MODEST_PARAMETERS and job.kind != "video":
        yield partial(_built, plain, nullcontext)
    if job.library == "torchvision":
        yield partial(_built, plain, partial(smaller, kind, side, frames))
    for part in _PARTS:
        yield partial(_built, plain, partial(narrow, part))
    if parameters <= MOST_PARAMETERS:
        yield partial(_built, plain, nullcontext)


_PARTS = (4, 2)


def _built(make: Callable[[], nn.Module], within: Callable[[], AbstractContextManager[None]]) -> nn.Module:
    with within():
        return quiet(make())


def _timm(job: Job) -> Callable[..., nn.Module]:
    import timm

    return partial(timm.create_model, job.model, num_classes=CLASSES)


def _torchvision(job: Job) -> Callable[..., nn.Module]:
    import torchvision

    backbone = {"weights_backbone": None} if job.kind == "pixels" else {}
    return partial(torchvision.models.get_model, job.model, weights=None, num_classes=CLASSES, **backbone)


@cache
def _looked_at(job: Job) -> tuple[type[nn.Module], int, int]:
    """The model's class, the side of the images that it is made for, and how many parameters it has."""
    make = _timm(job) if job.library == "timm" else _torchvision(job)
    try:
        with torch.device("meta"):
            module = make()
    except RuntimeError:  # it computes with what it has just drawn; what else is wrong with it comes again
        module = make()
    own: Any = getattr(module, "default_cfg", {}).get("input_size", (3, 224, 224))
    return type(module), int(own[-1]), sum(parameter.numel() for parameter in module.parameters())


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


def _sample(kind: str, side: int, frames: int, name: str, index: int) -> dict[str, Tensor]:
    generator = generator_of(index)
    shape = (3, frames, side, side) if kind == "video" else (3, side, side)
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
