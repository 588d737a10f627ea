"""Models whose blocks share modules, biases and bare parameters in any pattern, and the plain loop to compare with."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import Setup
from varuna.data import sample_index

BLOCKS = 6
_WIDTH = 8


@dataclass(frozen=True)
class Pattern:
    """Who shares what: equal numbers are the same thing."""

    modules: tuple[int, ...]
    """by block: its linear module"""
    biases: tuple[int, ...]
    """by linear module: whose bias it has"""
    leaves: tuple[int, ...]
    """by block: the bare parameter that it is scaled with"""
    tied_head: bool
    frozen: int
    """bit n: the n-th parameter is not trained"""


class Sharing(nn.Module):
    """A small language model with shared parts."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.order = pattern.leaves
        self.embed = nn.Embedding(64, _WIDTH)
        linears = [nn.Linear(_WIDTH, _WIDTH) for _ in range(BLOCKS)]
        for linear, other in zip(linears, pattern.biases, strict=True):
            linear.bias = linears[other].bias
        self.blocks = nn.ModuleList(linears[number] for number in pattern.modules)
        used = sorted(set(pattern.leaves))
        self.leaves = nn.ParameterDict({str(number): nn.Parameter(torch.randn(_WIDTH)) for number in used})
        self.head = nn.Linear(_WIDTH, 64, bias=False)
        if pattern.tied_head:
            self.head.weight = self.embed.weight
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(not pattern.frozen >> number & 1)
        self.leaves[str(used[0])].requires_grad_()  # something is trained

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block, leaf in zip(self.blocks, self.order, strict=True):
            x = x + torch.tanh(block(x)) * self.leaves[str(leaf)]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer in which a rounding error of a gradient stays one, whatever its size."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)


def trained_plainly(setup: Setup, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters of a plain eager loop over whole batches."""
    torch.manual_seed(setup.seed)
    model = setup.build().train()
    optimizer = momentum([(name, value) for name, value in model.named_parameters() if value.requires_grad])
    losses = []
    for step in range(steps):
        numbers = range(step * setup.global_batch, (step + 1) * setup.global_batch)
        rows = [setup.dataset[sample_index(n, size=len(setup.dataset), seed=setup.seed)] for n in numbers]
        optimizer.zero_grad()
        loss = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]})
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference of a parameter, relative to its largest element."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())
