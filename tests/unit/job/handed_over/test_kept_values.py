"""Values that captured code keeps are not known in the loop: reading one is refused, and nothing of them is left."""

import collections
import queue
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna import UsageError
from varuna.job.handed_over.watching import AFTER_STEP, DATASET, LOSS, SCHEDULER, HandedOver, Role

LAST = 0.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.entropy: Any = None
        self.seen: list[Tensor] = []
        self.stats: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.entropy = y.mean()
        self.seen.append(y)
        self.stats["norm"] = y.norm()
        self.count += 1
        setattr(self, "by_text", y)  # noqa: B010 - as scripts do
        self.__dict__["by_table"] = y
        return y

    count = 0


class Meter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.number = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.number += 1

    @property
    def average(self) -> float:
        return self.sum / max(1, self.number)


def kept_by_a_loss() -> tuple[list[float], Meter, Callable[[], None]]:
    log, meter = [0.5], Meter()

    def loss() -> None:
        log.append(1.0)
        meter.update(1.0)

    return log, meter, loss


def passed_on(where: Any, value: Any) -> None:
    where["last"] = value


def ways() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Pairs of a function that keeps a value, and one that reads it."""
    log: list[float] = []
    listed, counts, lines = [0.0], collections.Counter[str](), collections.deque([0.0])
    meter, stats, running = Meter(), {"last": 0.0}, torch.zeros(2)
    held, told = queue.Queue[float](), 0

    def keeps_in_a_cell() -> None:
        nonlocal told
        told += 1

    def keeps_in_a_global() -> None:
        global LAST
        LAST = 1.0

    def keeps_in_a_new_global() -> None:
        global NEW
        NEW = 1.0  # type: ignore[name-defined]

    def keeps_at_itself() -> None:
        keeps_at_itself.last = 1.0  # type: ignore[attr-defined]

    def counts_calls() -> None:
        counts["calls"] += 1

    return {
        "list": (lambda: log.append(1.0), lambda: sum(log) / len(log)),
        "length of a list": (lambda: log.append(1.0), lambda: len(log) > 3),
        "list with another name": (partial(keep, listed), lambda: sum(listed)),
        "deque": (lambda: lines.append(1.0), lambda: lines[-1] * 2),
        "counter": (counts_calls, lambda: 1 / (1 + counts["calls"])),
        "meter": (lambda: meter.update(1.0), lambda: meter.average),
        "passed to a helper": (lambda: passed_on(stats, 1.0), lambda: stats["last"] * 2),
        "cell": (keeps_in_a_cell, lambda: told + 1),
        "global": (keeps_in_a_global, lambda: LAST < 1),
        "global that was not there": (keeps_in_a_new_global, lambda: float(globals()["NEW"])),
        "attribute of the function": (keeps_at_itself, lambda: -keeps_at_itself.last),  # type: ignore[attr-defined]
        "tensor in place": (lambda: running.mul_(0.9).add_(1.0), lambda: torch.stack([running])),
        "queue of a library": (lambda: held.put(1.0), lambda: held.qsize() * 2),
    }


def keep(where: list[float]) -> None:
    where.append(1.0)


WAYS = ways()


@pytest.mark.parametrize("name", WAYS)
def test_what_a_loss_keeps_is_not_read_in_the_loop(name: str) -> None:
    keeps, reads = WAYS[name]
    handed = HandedOver([(LOSS, keeps)])
    handed.before_capture()
    keeps()  # as the capture does
    with (
        handed.script(),
        pytest.raises(UsageError, match=r"asked for .*, which loss= writes \(test_kept_values\.py:\d+\).*metrics="),
    ):
        reads()


@pytest.mark.parametrize(
    "reads",
    [
        lambda model: float(model.entropy),
        lambda model: 0.1 * (model.entropy or 1.0),
        lambda model: torch.cat([*model.seen]),
        lambda model: model.stats.get("norm", torch.ones(())).item(),
        lambda model: f"{model.count}",
        lambda model: getattr(model, "by_text", 1.0) + 1.0,
        lambda model: getattr(model, "by_table", 1.0) + 1.0,
    ],
)
def test_what_forward_keeps_is_not_read_in_the_loop(reads: Callable[[Any], Any]) -> None:
    model = Net()
    handed = HandedOver([], model=model)
    handed.before_capture()
    handed.begin()
    with handed.script(), pytest.raises(UsageError, match=r"asked for .*, which forward\(\) writes"):
        reads(model)
    handed.check(None)
    handed.end()
    assert (model.entropy, model.seen, model.stats, model.count) == (None, [], {}, 0)
    model(torch.ones(1, 2))  # after the loop it is a model as any other
    assert len(model.seen) == 1
    assert isinstance(model.entropy, Tensor)


def test_nothing_of_a_capture_is_left_in_what_a_loss_keeps() -> None:
    log, meter, stats = [0.5], Meter(), dict[str, float]()

    def loss() -> None:
        log.append(1.0)
        meter.update(1.0)
        passed_on(stats, 1.0)

    handed = HandedOver([(LOSS, loss)])
    handed.before_capture()
    loss()
    with handed.script():
        pass
    assert (log, meter.sum, meter.number, stats) == ([0.5], 0.0, 0, {})
    with handed.unwatched():  # an evaluation may run it
        loss()
    assert (log, meter.sum, meter.number, stats) == ([0.5], 0.0, 0, {})


def test_what_a_hook_keeps_for_the_loss_is_no_change_of_the_scripts() -> None:
    features: dict[str, Tensor] = {}
    model = Net()
    model.layer.register_forward_hook(lambda module, given, output: features.__setitem__("layer", output))

    def loss() -> Tensor:
        return features["layer"].mean() + sum(each.mean() for each in features.values())

    handed = HandedOver([(LOSS, loss)], model=model)
    handed.before_capture()
    model(torch.ones(1, 2))  # as the capture does
    handed.begin()
    with torch.no_grad(), handed.unwatched():
        model(torch.ones(1, 2))
    with handed.script():
        pass
    handed.check(None)
    with handed.script(), pytest.raises(UsageError, match=r"asked for features, which forward\(\) writes"):
        features["layer"].mean()
    handed.end()


def test_the_script_may_forget_and_put_something_else() -> None:
    log, meter, loss = kept_by_a_loss()
    handed = HandedOver([(LOSS, loss)])
    handed.before_capture()
    with handed.script():
        log.clear()
        meter.reset()
        assert meter.average == 0.0
    assert meter.number == 0
    with handed.script(), pytest.raises(UsageError, match="asked for meter"):
        _ = meter.average


STATS = {"last": 0.0, "other": 1.0}


def write_stats() -> None:
    STATS["last"] = 1.0


@pytest.mark.parametrize("role", [AFTER_STEP, DATASET, SCHEDULER])
def test_what_runs_in_steps_may_not_read_it(role: Role) -> None:
    handed = HandedOver([(LOSS, write_stats), (role, lambda: STATS["last"])])
    handed.before_capture()
    with pytest.raises(UsageError, match=rf"{role.name} reads STATS\['last'\], which loss= writes.*step\.metrics"):
        handed.begin()


def test_what_runs_in_steps_may_not_read_what_a_helper_has_written() -> None:
    stats = {"last": 0.0}
    handed = HandedOver([(LOSS, partial(passed_on, stats, 1.0)), (AFTER_STEP, lambda: stats["last"])])
    handed.before_capture()
    handed.begin()
    passed_on(stats, 1.0)
    with pytest.raises(UsageError, match="after_step= reads stats"), handed.script():
        pass


def test_what_only_it_does_not_write_is_read() -> None:
    handed = HandedOver([(LOSS, write_stats), (AFTER_STEP, lambda: STATS["other"])])
    handed.before_capture()
    handed.begin()
    with handed.script():
        assert STATS["other"] == 1.0
    handed.end()


def test_two_who_hide_the_same_place_leave_what_was_there() -> None:
    log, meter, loss = kept_by_a_loss()
    handed = [HandedOver([(LOSS, loss)]) for _ in range(2)]
    for each in handed:
        each.before_capture()
    one, two = (each.script() for each in handed)  # ranks that are threads
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    with handed[0].unwatched():
        loss()
    two.__exit__(None, None, None)
    assert (log, meter.number, meter.sum) == ([0.5], 0, 0.0)
