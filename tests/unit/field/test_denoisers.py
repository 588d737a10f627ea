"""A denoiser's inputs follow from its signature; what lies the same for all examples is told around it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tests.field import denoisers
from tests.field.latents import SIDE, Manner, inputs
from tests.field.placed import Placed, is_placed


class Sequence(nn.Module):
    """Takes patches after words, with one row of positions for both, and several layers' texts in a list."""

    class config:
        axes_dims_rope = (2, 3, 3)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        position_ids: Tensor,
        text_encoder_layers: list[Tensor],
    ) -> tuple[Tensor]:
        assert position_ids.shape == (encoder_hidden_states.shape[1] + hidden_states.shape[1], 3)
        return (hidden_states + sum(layer.mean() for layer in text_encoder_layers),)


def test_positions_and_lists_are_told_around_the_denoiser() -> None:
    manner = Manner((16, 4), 6)
    given = inputs(("hidden_states", "encoder_hidden_states", "text_encoder_layers"), {"num_layers": 2}, manner, 0)
    assert given["text_encoder_layers"].shape == (2, 6, 32)
    batch = {name: value[None].repeat(3, *[1] * value.dim()) for name, value in given.items()}
    assert is_placed(Sequence)
    assert Placed(Sequence(), manner.shape)(**batch)[0].shape == (3, 16, 4)


def test_frames_may_have_moments_of_their_own_and_masks_be_of_any_kind() -> None:
    plain = Manner((4, 2, SIDE, SIDE), 6)
    framed = Manner((2, 4, SIDE, SIDE), 6, fraction=True, frames=2, mask=torch.long)
    names = ("timestep", "encoder_attention_mask")
    one, other = inputs(names, {}, plain, 0), inputs(names, {}, framed, 0)
    assert (one["timestep"].shape, one["timestep"].dtype) == ((), torch.int64)
    assert (other["timestep"].shape, other["timestep"].dtype) == ((2,), torch.float32)
    assert [each["encoder_attention_mask"].dtype for each in (one, other)] == [torch.float32, torch.int64]


def test_a_denoiser_is_tried_with_one_name_more_or_less() -> None:
    class Takes(nn.Module):
        def forward(self, hidden_states: Any, timestep: Any, guidance: Any = None, fps: Any = None) -> None: ...

    likely, near = denoisers._given(inspect.signature(Takes().forward).parameters, {})
    assert likely == [("hidden_states", "timestep"), ("hidden_states", "timestep", "guidance", "fps")]
    assert ("hidden_states", "timestep", "fps") in near
