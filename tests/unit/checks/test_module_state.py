"""A look at a model leaves nothing behind."""

import pytest
from torch import nn

from varuna.checks.module_state import same_attributes


class Noting(nn.Module):
    """Registers a hook when it is first called, and notes that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.register_forward_hook(lambda *_: None)
        self.is_hooked = False
        self.own_hooks = ["a list of the model's own"]

    def call(self) -> None:
        self.is_hooked = True
        self.layer.register_forward_hook(lambda *_: None)
        self.layer.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_and_hooks_are_put_back(fails: bool) -> None:
    model = Noting()
    hooks = [*model.layer._forward_hooks.values()]
    try:
        with same_attributes(model):
            model.call()
            assert len(model.layer._forward_hooks) == 2
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert not model.is_hooked
    assert [*model.layer._forward_hooks.values()] == hooks
    assert not model.layer._forward_pre_hooks
