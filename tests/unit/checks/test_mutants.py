"""The check refuses wrong captures, and names the cause where probing finds one."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.unit.checks.jobs import Masking, Net, Normed, Reentrant, checked, detached, edited, other_forward, writing
from varuna.core.errors import ModelError
from varuna.partition.model import PartitionedModel


def test_a_wrong_forward_a_wrong_gradient_and_a_wrong_buffer_are_refused() -> None:
    with pytest.raises(ModelError, match=r"the captured model's loss is .* Please report"):
        checked(Net, mutate=lambda model: edited(model, other_forward))
    with pytest.raises(ModelError, match=r"layers\.0\.\w+ \(in Linear, section \d\) gets no gradient .*detaches"):
        checked(Net, mutate=lambda model: edited(model, detached))

    def other_momentum(model: PartitionedModel) -> None:
        (update,) = (u for s in model.sections for u in s.updates if "norm.running_mean" in u.buffers)
        for node in update.module.graph.nodes:
            if node.target is torch.ops.aten.mul_.Tensor:
                node.args = (node.args[0], 0.5)
        update.module.recompile()

    with pytest.raises(ModelError, match=r"the buffer norm\.running_\w+ .*after the step"):
        checked(Normed, micro_batch=4, mutate=other_momentum)


@pytest.mark.nightly
def test_a_section_that_writes_to_what_it_is_given_is_refused() -> None:
    with pytest.raises(ModelError, match=r"section \d \(.*\) writes in place to (y|gt), which it is given"):
        checked(Net, mutate=lambda model: edited(model, writing))
    with pytest.raises(ModelError, match=r"writes in place to gt, which it is given"):
        checked(Masking, mutate=lambda model: edited(model, writing), cut_points=6)


def test_a_reentrant_checkpoint_that_slipped_through_is_named() -> None:
    with pytest.raises(ModelError, match=r"use_reentrant=True \(torch\.utils\.checkpoint at .*jobs\.py"):
        checked(Reentrant, mutate=lambda model: edited(model, detached))


class Spectral(Net):
    def changed(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.layer(2, x))
        for number in range(1, 4):
            spectrum = spectrum * torch.exp(1j * self.layers[number].bias[:5])
        back: Tensor = torch.fft.irfft(spectrum, n=8)
        return back


@pytest.mark.nightly
def test_complex_activations_whose_gradient_was_lost_are_named() -> None:
    def forgetful(model: PartitionedModel) -> None:
        complex_ones = [c for into in model.split.crossings for c in into if c.dtype.is_complex]
        assert complex_ones
        for crossing in complex_ones:
            object.__setattr__(crossing, "differentiable", False)

    with pytest.raises(ModelError, match="Activations are complex, and"):
        checked(Spectral, mutate=forgetful, cut_points=9)


class Faint(Net):
    """The gradient of one parameter is a billionth of the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.faint = nn.Parameter(torch.ones(8))

    def changed(self, x: Tensor) -> Tensor:
        return x + 1e-9 * torch.sin(self.faint)


def test_a_missing_gradient_shows_however_small_it_is() -> None:
    assert checked(Faint).gradient < 1e-6
    with pytest.raises(ModelError, match=r"faint \(in Faint, section \d\) gets no gradient"):
        checked(Faint, mutate=lambda model: edited(model, partial(detached, which=torch.ops.aten.sin.default)))
