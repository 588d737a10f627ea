"""A section compiled by inductor, with a real C++ compiler."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tests.unit.engine.models import dropping
from tests.unit.engine.ranks import Setup, single_threaded
from varuna.engine.graphs.compiled import Compiler
from varuna.partition.cut.split import SectionGraph


def given_to(section: SectionGraph, setup: Setup) -> list[Any]:
    """Three examples of what crosses into a middle section, their number, and its parameters."""
    into = {crossing.name: crossing for crossing in setup.model.split.crossings[section.index]}
    generator = torch.Generator().manual_seed(1)
    parameters = setup.beginning.parameters(section.parameters)
    taken = [torch.randn(into[name].shape(3), generator=generator).requires_grad_() for name in section.takes]
    assert section.needs_batch_size
    return [*taken, 3, *(parameters[name].clone().requires_grad_() for name in section.parameters)]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not quote torch's own path for the compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch itself deprecates
@pytest.mark.timeout(600)  # the compiler's first run on a machine takes its time
def test_inductor_draws_as_eager_and_gives_the_same_bits_with_and_without_a_graph() -> None:
    def seeded(seed: int) -> Callable[[], AbstractContextManager[object]]:
        return lambda: nullcontext(torch.manual_seed(seed))

    setup = Setup(build=dropping)
    # Two dropouts around an attention with one of its own: their order matters.
    section = next(each for each in setup.model.sections if each.module.code.count("dropout.default") == 2)
    arguments = given_to(section, setup)
    with single_threaded():
        run = Compiler("inductor").of(section, arguments, seeded(0))
        found = []
        for seed in (1, 2):
            seeded(seed)()
            [eager] = section.module(*arguments)
            seeded(seed)()
            [recomputed] = run(*arguments)
            with torch.no_grad():
                seeded(seed)()
                [forward] = run(*arguments)
            assert torch.equal(recomputed, forward)
            torch.testing.assert_close(forward, eager, rtol=1e-5, atol=1e-6)
            found.append(forward)
    assert not torch.allclose(found[0], found[1])
