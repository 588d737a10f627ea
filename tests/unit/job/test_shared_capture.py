"""Workers that are threads share a capture if they were given the same, and only then."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, adamw
from varuna.core.errors import VarunaError
from varuna.job.shared_capture import is_same
from varuna.testing import run
from varuna.trainer import Trainer


def closing_over(value: object) -> Callable[[], object]:
    return lambda: value


def other_code(value: object) -> Callable[[], object]:
    return lambda: [value]


def defaulting(value: object) -> Callable[..., object]:
    def function(given: object = value) -> object:
        return given

    return function


def keeping(value: object) -> Callable[[], object]:
    def function() -> object:
        return None

    vars(function)["kept"] = value
    return function


@pytest.mark.parametrize(
    ("make", "values"),
    [
        pytest.param(closing_over, (0.1, "a", SmallLanguage, adamw, None, (1, [2])), id="closures"),
        pytest.param(defaulting, (1, "a"), id="defaults"),
        pytest.param(lambda value: closing_over(closing_over(value)), (1, 2), id="functions in closures"),
        pytest.param(lambda value: partial(torch.full, value, fill_value=value), (1, 2), id="partials"),
        pytest.param(lambda value: closing_over(Namespace(layers=value)), (1, 2), id="arguments"),
        pytest.param(lambda value: {"ids": torch.full((2,), value)}, (0, 1), id="batches"),
    ],
)
def test_functions_of_the_same_code_are_the_same_if_they_see_the_same(
    make: Callable[[Any], object], values: tuple[Any, ...]
) -> None:
    for value in values:
        assert [is_same(make(value), make(other)) for other in values] == [value is other for other in values]


def test_what_may_differ_is_not_the_same() -> None:
    assert not is_same(closing_over(1), other_code(1))
    assert not is_same(closing_over(1), closing_over(1.0))
    assert not is_same(closing_over(object()), closing_over(object()))
    assert not is_same(closing_over(SmallLanguage()), closing_over(SmallLanguage()))
    assert not is_same(keeping(1), keeping(1))
    assert not is_same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not is_same({"a": 1}, {"b": 1})


class Counted(SmallLanguage):
    captures = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        Counted.captures += torch.compiler.is_exporting()
        return super().forward(input_ids, labels)


def test_workers_capture_once_what_is_the_same_for_all() -> None:
    def script() -> list[float]:
        trainer = Trainer(lambda: Counted(), Tokens(), adamw, 8, micro_batch=2)
        return [trainer.evaluate(Tokens(size=5)).loss for _ in trainer.steps(1)]

    Counted.captures = 0
    outcome = run(script, workers=2, stages=2)
    assert Counted.captures == 2  # to train, and to evaluate
    first, second = outcome.returned.values()
    assert first == second


@pytest.mark.nightly
def test_runs_share_captures_only_if_they_are_told_to() -> None:
    def script(build: Callable[[], torch.nn.Module]) -> None:
        for _ in Trainer(build, Tokens(), adamw, 8, micro_batch=2).steps(1):
            pass

    Counted.captures = 0
    captures: list[Any] = []
    for kept in (captures, captures, None, None):
        run(partial(script, lambda: Counted()), captures=kept)
    assert Counted.captures == 3
    run(partial(script, Dropping), captures=captures)
    assert len(captures) == 2


def test_a_worker_with_another_model_is_still_found_out() -> None:
    kinds = [SmallLanguage, Dropping]

    def script() -> None:
        for _ in Trainer(kinds.pop(), Tokens(), adamw, 8, micro_batch=2).steps(1):
            pass

    with pytest.raises(VarunaError, match=r"was refused: its job\.model\.digest is"):
        run(script, workers=2, stages=1)


def test_a_worker_with_other_samples_than_the_run_is_refused_though_it_has_as_many() -> None:
    datasets = [Tokens(), Tokens(padded=True)]

    def script() -> None:
        for _ in Trainer(SmallLanguage, datasets.pop(), adamw, 8, micro_batch=2).steps(1):
            pass

    with pytest.raises(VarunaError, match="was refused: its dataset has other samples than the run's"):
        run(script, workers=2, stages=1)
