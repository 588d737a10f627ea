"""Models that are too large to be run whole: how much is run, and what is seen without data."""

from collections.abc import Callable
from functools import partial

import pytest
from torch import nn

from tests.depth import by_depth
from tests.unit.checks.jobs import (
    Annealed,
    Mutate,
    Net,
    Reentrant,
    Rows,
    Skipping,
    detached,
    edited,
    with_parameter_hook,
)
from varuna.checks.extent import extent_of
from varuna.checks.selfcheck import Checked, SelfCheck
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition


def looked_at(build: Callable[[], nn.Module], mutate: Mutate = lambda model: model) -> Checked:
    """Nobody has the memory for the whole model."""
    recipe, source = Recipe(build), SampleSource(Rows(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors)
    return SelfCheck(recipe, source, None, None).compare(mutate(model) or model, None)


@pytest.mark.nightly
def test_without_data_gradients_hooks_draws_and_counters_are_seen() -> None:
    models: list[Callable[[], nn.Module]] = [Net, partial(Skipping, 0.0)]
    for sound in by_depth(models[:1], models):
        found = looked_at(sound)
        assert found.errors is None
        assert "losses, gradients and buffers" in str(found)
    with pytest.raises(ModelError, match=r"parameters get no gradient \(layers\.\d.*use_reentrant=True"):
        looked_at(Reentrant, lambda model: edited(model, detached))
    seen = [
        (with_parameter_hook("register_hook"), r"register_hook on layers\.1\.weight"),
        (Skipping, "Python's random at"),
        (Annealed, r"itself changes: steps"),
    ]
    for build, said in by_depth(seen[:1], seen):
        with pytest.raises(ModelError, match=said):
            looked_at(build)


def test_as_much_is_run_as_takes_seconds_and_fits() -> None:
    recipe, source = Recipe(Net), SampleSource(Rows(), seed=0)
    facts = partition(recipe, source.micro_batch([0, 1]).tensors).facts
    second = 1 / sum(section.forward_s for section in facts.sections)

    def sizes(
        forward_s: float, micro_batch: int | None = None, cores: int = 1, free_bytes: float = 1e9
    ) -> tuple[int, ...]:
        slowdown = second * forward_s
        return extent_of(facts, micro_batch=micro_batch, slowdown=slowdown, cores=cores, free_bytes=free_bytes).sizes

    assert [sizes(s) for s in (0.5, 1.5, 10.0, 100.0)] == [(3, 1), (1, 1), (1,), ()]
    assert [sizes(s, 32) for s in (0.5, 1.5, 5.0, 100.0)] == [(4, 4), (2, 2), (2,), ()]
    assert sizes(2.5, 1) == (1, 1)
    assert sizes(1.5, cores=16) == (3, 1)
    assert sizes(0.5, free_bytes=sum(section.parameter_bytes for section in facts.sections)) == ()
