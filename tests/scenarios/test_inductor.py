"""A section compiled by inductor, with a real C++ compiler."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.engine.test_compiled import Dropping
from varuna.engine.compiled import Compiler
from varuna.partition.split import SectionGraph


def given_to(section: SectionGraph, setup: Setup) -> list[Tensor]:
    """Three examples of what crosses into a middle section, then its parameters."""
    into = {crossing.name: crossing for crossing in setup.model.split.crossings[section.index]}
    generator = torch.Generator().manual_seed(1)
    parameters = setup.beginning.parameters(section.parameters)
    taken = [torch.randn(into[name].shape(3), generator=generator) for name in section.takes]
    return [value.clone().requires_grad_() for value in (*taken, *(parameters[name] for name in section.parameters))]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports what torch itself deprecates
@pytest.mark.timeout(600)  # the compiler's first run on a machine takes its time
def test_inductor_draws_as_eager_and_gives_the_same_bits_with_and_without_a_graph() -> None:
    def seeded(seed: int) -> Callable[[], AbstractContextManager[object]]:
        return lambda: nullcontext(torch.manual_seed(seed))

    setup = Setup(build=Dropping)
    section = next(section for section in setup.model.sections if section.random)
    arguments = given_to(section, setup)
    with single_threaded():
        run = Compiler("inductor").of(section, arguments, seeded(0))
        for seed in (1, 2):
            seeded(seed)()
            [eager] = section.module(*arguments)
            seeded(seed)()
            [recomputed] = run(*arguments)
            with torch.no_grad():
                seeded(seed)()
                [forward] = run(*arguments)
            assert torch.equal(recomputed, forward)
            assert torch.equal(eager == 0, forward == 0)  # the same were dropped
            torch.testing.assert_close(forward.detach(), eager.detach(), rtol=1e-5, atol=1e-6)
            assert 0.1 < float((forward == 0).float().mean()) < 0.3
    assert run(*arguments)[0].requires_grad
