"""Whatever way the code of a script takes to a value, a change of it while training runs is refused."""

import array
import collections
import contextvars
import ctypes
import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from varuna import UsageError
from varuna.job.handed_over.watching import BEFORE_STEP, DATASET, LOSS, MODEL, HandedOver, Role

SCALE = 1.0


class Hidden:
    """A configuration that keeps its entries elsewhere."""

    def __init__(self) -> None:
        self.__dict__["entries"] = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["entries"][name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.entries[name] = value


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Losses:
    scale = 1.0

    @staticmethod
    def fixed() -> float:
        return SCALE

    @classmethod
    def of_class(cls) -> float:
        return cls.scale

    def method(self) -> float:
        return SCALE

    def __call__(self) -> float:
        return SCALE


class Child(Losses):
    def method(self) -> float:
        return super().method()

    def own(self) -> float:
        return type(self).scale

    def passed_on(self) -> float:
        return scale_of(self)

    def by_text(self) -> float:
        return float(getattr(self, "scale"))  # noqa: B009 - as scripts do


class Single:
    """Is made once, when it is asked for."""

    made: Any = None

    def __init__(self) -> None:
        self.scale = 1.0

    @classmethod
    def get(cls) -> Any:
        cls.made = cls.made or cls()
        return cls.made


class New(Single):
    def __new__(cls) -> Any:
        cls.made = cls.made or super().__new__(cls)
        return cls.made

    def __init__(self) -> None:
        pass

    scale = 1.0


class Once(type):
    """Makes one object of each class."""

    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls) -> Any:
        if cls not in cls.made:
            cls.made[cls] = super().__call__()
        return cls.made[cls]


class ByMeta(metaclass=Once):
    def __init__(self) -> None:
        self.scale = 1.0


def single() -> Any:
    global made_once
    made_once = made_once or SimpleNamespace(scale=1.0)
    return made_once


made_once: Any = None


@functools.singledispatch
def by_kind(_: Any) -> float:
    return 0.0


@by_kind.register
def _(_: int) -> float:
    return SCALE


def scale_of(found: Any) -> float:
    return float(found.scale)


def multiplied(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def inner(*given: Any) -> float:
        return function(*given) * SCALE

    return inner


@functools.lru_cache
def settings() -> SimpleNamespace:
    return SimpleNamespace(scale=1.0)


def imports() -> float:
    from tests.unit.job.handed_over import test_ways_to_read as here

    return float(here.SCALE)


def imports_a_name() -> float:
    from tests.unit.job.handed_over.test_ways_to_read import SCALE as found

    return found


def by_attribute_of_itself() -> float:
    return float(by_attribute_of_itself.scale)  # type: ignore[attr-defined]


def more(name: str = "SCALE", holder: Any = None) -> None:
    holder = sys.modules[__name__] if holder is None else holder
    setattr(holder, name, getattr(holder, name) + 1.0)


def ways() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Pairs of a function that reads a value, and one that changes it."""
    global SCALE
    SCALE, Losses.scale, settings().scale = 1.0, 1.0, 1.0
    by_attribute_of_itself.scale = 1.0  # type: ignore[attr-defined]
    os.environ["VARUNA_TEST_SCALE"] = "1"
    hidden, slotted, child = Hidden(), Slotted(), Child()
    deep: dict[str, Any] = {"a": {"b": {"c": {"d": {"scale": 1.0}}}}}
    context = contextvars.ContextVar("context", default=1.0)
    tensor, table = torch.ones(100), np.ones(1)
    shared, number, values = multiprocessing.Value("d", 1.0), ctypes.c_double(1.0), array.array("d", [1.0])
    at, event = 0, threading.Event()

    def through_a_variable() -> float:
        part = deep["a"]
        return float(part["b"]["c"]["d"]["scale"])

    return {
        "a static method": (lambda: Losses.fixed(), more),
        "a class method": (lambda: Losses.of_class(), functools.partial(more, "scale", Losses)),
        "an object that is built there": (lambda: Losses()(), more),
        "a method of a base class": (lambda: child.method(), more),
        "an attribute of the class of an object": (lambda: child.own(), functools.partial(more, "scale", Losses)),
        "an attribute by its name": (lambda: child.by_text(), functools.partial(more, "scale", child)),
        "a method that an object gets": (lambda: child.own(), lambda: setattr(child, "own", lambda: 2.0)),
        "what a decorator adds": (multiplied(lambda: 1.0), more),
        "a module imported there": (imports, more),
        "a name imported there": (imports_a_name, more),
        "an attribute of the function": (by_attribute_of_itself, lambda: more("scale", by_attribute_of_itself)),
        "what a cached function returns": (lambda: settings().scale, lambda: more("scale", settings())),
        "an attribute that the class computes": (lambda: hidden.scale, lambda: more("scale", hidden)),
        "a slot": (lambda: slotted.scale, lambda: more("scale", slotted)),
        "a variable in between": (through_a_variable, lambda: more_of(deep["a"]["b"]["c"]["d"])),
        "a singleton": (lambda: Single.get().scale, lambda: more("scale", Single.get())),
        "a singleton by its constructor": (lambda: New().scale, lambda: more("scale", New())),
        "a singleton by its metaclass": (lambda: ByMeta().scale, lambda: more("scale", ByMeta())),
        "an object that a function makes once": (lambda: single().scale, lambda: more("scale", single())),
        "a function that the kind of its argument chooses": (lambda: by_kind(1), more),
        "a number of a tensor": (lambda: tensor.mean().item(), lambda: tensor.add_(1)),
        "an element of a tensor": (lambda: tensor[50].item(), lambda: tensor.add_(1)),
        "a sum of an array": (lambda: table.sum(), lambda: table.fill(2.0)),
        "a variable of the context": (lambda: context.get(), lambda: context.set(2.0)),
        "the environment": (
            lambda: os.getenv("VARUNA_TEST_SCALE", "1"),
            lambda: os.environ.update(VARUNA_TEST_SCALE="2"),
        ),
        "shared memory": (lambda: shared.value, lambda: setattr(shared, "value", 2.0)),
        "a number of C": (lambda: number.value, lambda: setattr(number, "value", 2.0)),
        "an array of Python's": (lambda: values[at], lambda: values.__setitem__(0, 2.0)),
        "an event": (lambda: event.is_set(), event.set),
    }


def more_of(entries: dict[str, float]) -> None:
    entries["scale"] += 1


@pytest.mark.parametrize("role", [LOSS, DATASET], ids=["loss", "dataset"])
@pytest.mark.parametrize("way", ways())
def test_a_value_is_found_on_every_way_that_code_takes(way: str, role: Role) -> None:
    reads, change = ways()[way]
    reads()
    handed = HandedOver([(role, reads)])
    handed.begin()
    with handed.script():
        pass
    handed.check(None)
    with handed.script():
        change()
    with pytest.raises(UsageError, match="the script changed "):
        handed.check(None)


class Scaled(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.config = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
        self.options, self.lists = {"loss": {"scale": 1.0}}, [{"scale": 1.0}]
        self.mask, self.values = torch.ones(2), np.ones(2)
        self.layer.register_forward_hook(lambda module, given, made: made * SCALE)

    def factor(self) -> Any:
        return self.config.inner.scale * self.options["loss"]["scale"] * self.lists[0]["scale"] * float(self.values[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask * self.factor() * self.__class__.scale  # type: ignore[no-any-return]


IN_MODELS: dict[str, Callable[[Scaled, torch.optim.Optimizer], Any]] = {
    "an object in an object": lambda model, _: more("scale", model.config.inner),
    "a dict in a dict": lambda model, _: more_of(model.options["loss"]),
    "a dict in a list": lambda model, _: more_of(model.lists[0]),
    "a tensor that is no buffer": lambda model, _: model.mask.mul_(2),
    "an array of NumPy's": lambda model, _: np.copyto(model.values, 2.0),
    "what a hook reads": lambda *_: more(),
    "a method of the class": lambda *_: setattr(Scaled, "factor", lambda _: 2.0),
    "an attribute of the class": lambda *_: more("scale", Scaled),
    "a hook on gradients": lambda model, _: model.layer.register_full_backward_hook(lambda *_: None),
    "a hook on all modules": lambda *_: register_module_forward_hook(lambda *_: None),
    "a mark on a parameter": lambda model, _: setattr(model.layer.weight, "decays", False),
    "an attribute of the optimizer, with an underscore": lambda _, optimizer: more("_alpha", optimizer),
    "an object of the optimizer": lambda _, optimizer: more("alpha", optimizer.config),  # type: ignore[attr-defined]
    "a tensor of the optimizer": lambda _, optimizer: optimizer.gain.fill_(2.0),  # type: ignore[attr-defined]
    "a queue of the optimizer": lambda _, optimizer: optimizer.past.append(2.0),  # type: ignore[attr-defined]
    "a method of the optimizer": lambda _, optimizer: setattr(optimizer, "step", lambda: None),
    "a hook of the optimizer": lambda _, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "an attribute of the schedule": lambda _, optimizer: setattr(optimizer.schedule(), "gamma", 0.1),  # type: ignore[attr-defined]
    "how far the schedule is": lambda _, optimizer: setattr(optimizer.schedule(), "last_epoch", 9),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("case", IN_MODELS)
def test_what_models_optimizers_and_schedules_compute_with_is_watched(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_hooks", collections.OrderedDict())
    monkeypatch.setattr(Scaled, "factor", Scaled.factor)
    model = Scaled()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    vars(optimizer).update(_alpha=1.0, config=SimpleNamespace(alpha=1.0), gain=torch.tensor(1.0))
    vars(optimizer).update(past=collections.deque([1.0]), schedule=lambda: schedule)
    handed = HandedOver([], model=model, optimizer=optimizer, schedule=schedule)
    handed.begin()
    try:
        with handed.script(steps=1):
            pass
        handed.check(None)
        with handed.script(steps=2):
            assert schedule.last_epoch == 2, "as in a plain loop"
            IN_MODELS[case](model, optimizer)
        with pytest.raises(UsageError, match="the script changed "):
            handed.check(None)
    finally:
        handed.end()


def test_a_model_that_a_function_builds_reads_what_its_class_reads() -> None:
    ways()
    handed = HandedOver([(MODEL, lambda: Scaled())])
    handed.begin()
    with handed.script():
        more("scale", Scaled)
    with pytest.raises(UsageError, match=r"Scaled\.scale, which model= reads"):
        handed.check(None)


def test_an_object_that_captured_code_passes_on_is_watched() -> None:
    child = Child()
    handed = HandedOver([(LOSS, child.passed_on)])
    handed.begin()
    with handed.script():
        more("scale", child)
    with pytest.raises(UsageError, match="which loss= reads"):
        handed.check(None)


def test_what_was_captured_may_not_be_changed_within_the_step_either() -> None:
    entries, counts = {"scale": 1.0}, {"calls": 0}

    def loss() -> float:
        counts["calls"] += 1
        counts["last"] = 0
        return entries["scale"]

    handed = HandedOver([(LOSS, loss), (BEFORE_STEP, lambda named: more_of(entries))])
    handed.begin()
    loss()  # its own counts are its own
    with handed.script():
        pass
    handed.check(None)
    more_of(entries)
    with handed.script():
        pass
    with pytest.raises(UsageError, match=r"changed entries\['scale'\], which loss= reads"):
        handed.check(None)


def test_the_scripts_own_rates_may_be_read_within_the_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed = HandedOver(
        [(BEFORE_STEP, lambda named: optimizer.param_groups[0]["lr"])], model=model, optimizer=optimizer
    )
    handed.begin()
    with handed.script():
        optimizer.param_groups[0]["lr"] = 0.5
    handed.check(None)
    assert handed.written(0) == {(0, "lr"): 0.5}
    handed.end()
