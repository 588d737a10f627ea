"""Models that the check before step 0 looks at, and mutants of what was captured of them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from varuna.checks.compare import Errors
from varuna.checks.selfcheck import SelfCheck
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import PartitionedModel, partition


class Rows:
    """Eight features and as many targets; in every third sample some are masked."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "y": torch.randn(8, generator=generator)}


class Net(nn.Module):
    """Four residual layers; the tests change what happens to the second one's activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def changed(self, x: Tensor) -> Tensor:
        return x

    def layer(self, number: int, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layers[number](x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.changed(self.layer(1, self.layer(0, x)))
        return nn.functional.mse_loss(self.layer(3, self.layer(2, x)), y)


Mutate = Callable[[PartitionedModel], PartitionedModel | None]


def checked(
    build: Callable[[], nn.Module],
    dataset: Any = None,
    *,
    mutate: Mutate = lambda model: model,
    micro_batch: int | None = None,
    loss: Any = None,
    metrics: Any = None,
    dtype: torch.dtype = torch.float32,
    cut_points: int | None = None,
) -> Errors:
    """The errors that were found; the generators and the model are as before."""
    recipe = Recipe(build, loss=loss, metrics=metrics, dtype=dtype)
    source = SampleSource(dataset or Rows(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors, cut_points=cut_points)
    model = mutate(model) or model
    initial = materialise(recipe, 0)
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    before = {name: value.clone() for name, value in (initial.parameters | initial.buffers).items()}
    try:
        found = SelfCheck(recipe, source, None, micro_batch, micro_batch is not None).compare(model, initial)
        assert found.errors is not None
        assert found.samples == (2 * min(micro_batch, 4) if micro_batch else 4)
        assert not found.left_out
        return found.errors
    finally:
        assert states[:2] == (random.getstate(), repr(np.random.get_state()))
        assert torch.equal(states[2], torch.get_rng_state())
        after = {**dict(initial.module.named_parameters()), **dict(initial.module.named_buffers())}
        if not getattr(build, "writes", False):
            assert all(torch.equal(value, after[name].detach()) for name, value in before.items())


class Normed(Net):
    """Dropout, and statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def changed(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.drop(x))
        return found


class Dropping(Net):
    def changed(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3) * (torch.rand(x.shape[0], 1) < 0.7)


def with_parameter_hook(which: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        layer: Any = model.layers[1]
        weight = layer.weight
        if which == "register_hook":
            weight.register_hook(lambda gradient: gradient * torch.eye(8))
        elif which == "register_post_accumulate_grad_hook":
            weight.register_post_accumulate_grad_hook(lambda parameter: None)
        else:
            layer.register_full_backward_hook(lambda module, into, out: None)
        return model

    return build


class Masking(Net):
    def changed(self, x: Tensor) -> Tensor:
        mask = x > 0
        return self.layer(2, self.layer(1, x)) * mask


class Skipping(Net):
    def __init__(self, chance: float = 0.5) -> None:
        super().__init__()
        self.chance = chance

    def changed(self, x: Tensor) -> Tensor:
        return x if random.uniform(0, 1) < self.chance else self.layer(2, x)


class Annealed(Net):
    """``warm`` is the step from which on the counter matters."""

    def __init__(self, warm: int = 0) -> None:
        super().__init__()
        self.steps, self.warm = 0, warm

    def changed(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * min(1.0, 0.1 * max(1, self.steps - self.warm))


class Reentrant(Net):
    def changed(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layers[2], x, use_reentrant=True)
        return torch.tanh(found)


def edited(model: PartitionedModel, edit: Callable[[torch.fx.Graph, torch.fx.Node], bool]) -> None:
    """Change the first node for which ``edit`` does something."""
    for section in model.sections:
        graph = section.module.graph
        if any(edit(graph, node) for node in list(graph.nodes)):
            section.module.recompile()
            return
    raise AssertionError("nothing to change")


def other_forward(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    if node.target is torch.ops.aten.tanh.default:
        node.target = torch.ops.aten.sin.default
        return True
    return False


def writing(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """Let the section write to the sample or the mask that it is given."""
    if node.op != "placeholder" or not (node.name == "gt" or node.name.endswith("_y")):
        return False
    first = next(each for each in graph.nodes if each.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(torch.ops.aten.copy_.default, (node, node))
    return True


def detached(graph: torch.fx.Graph, node: torch.fx.Node, which: Any = torch.ops.aten.tanh.default) -> bool:
    if node.target is not which:
        return False
    with graph.inserting_after(node):
        cut = graph.call_function(torch.ops.aten.detach.default, (node,))
    node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)
    return True
