"""The check before step 0: sound jobs pass, each thing that capture cannot keep is refused by name."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from varuna.checks.selfcheck import Checked, SelfCheck
from varuna.core.errors import DataError, ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture import Recipe
from varuna.partition.initialise import materialise
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
    dtype: torch.dtype = torch.float32,
    cut_points: int | None = None,
) -> Checked:
    recipe = Recipe(build, loss=loss, dtype=dtype)
    source = SampleSource(dataset or Rows(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors, cut_points=cut_points)
    model = mutate(model) or model
    initial = materialise(recipe, 0)
    states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    before = {name: value.clone() for name, value in (initial.parameters | initial.buffers).items()}
    try:
        return SelfCheck(recipe, source, None, micro_batch, micro_batch is not None).compare(model, initial)
    finally:
        assert states[:2] == (random.getstate(), repr(np.random.get_state()))
        assert torch.equal(states[2], torch.get_rng_state())
        after = {**dict(initial.module.named_parameters()), **dict(initial.module.named_buffers())}
        if build not in WRITERS:
            assert all(torch.equal(value, after[name].detach()) for name, value in before.items())


class Normed(Net):
    """Dropout, and statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def changed(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(x))  # type: ignore[no-any-return]


class Dropping(Net):
    def changed(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3) * (torch.rand(x.shape[0], 1) < 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_models_pass_with_small_errors(dtype: torch.dtype) -> None:
    bound = 1e-6 if dtype is torch.float32 else 0.05
    for build, micro_batch in ((Net, None), (Dropping, None), (Normed, 4)):
        found = checked(build, micro_batch=micro_batch, dtype=dtype)
        assert found.samples == (8 if micro_batch else 4)
        assert found.errors.loss <= bound
        assert found.errors.gradient <= bound


# -- what is refused by name -----------------------------------------------------------------------------------


class TensorHook(Net):
    def changed(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        return x


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


@pytest.mark.parametrize(
    "which", ["register_hook", "register_post_accumulate_grad_hook", "register_full_backward_hook"]
)
def test_hooks_of_the_constructor_are_refused(which: str) -> None:
    with pytest.raises(ModelError, match=rf"{which} on layers\.1.*before_step"):
        checked(with_parameter_hook(which))


def test_hooks_of_forward_are_refused_with_their_place() -> None:
    with pytest.raises(ModelError, match=r"Tensor\.register_hook at .*test_selfcheck\.py:\d+"):
        checked(TensorHook)


class Skipping(Net):
    def __init__(self, chance: float = 0.5) -> None:
        super().__init__()
        self.chance = chance

    def changed(self, x: Tensor) -> Tensor:
        return x if random.uniform(0, 1) < self.chance else self.layer(2, x)


class NumpyNoise(Net):
    def changed(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


@pytest.mark.parametrize(("build", "whose"), [(Skipping, "Python's"), (NumpyNoise, "NumPy's")])
def test_draws_from_python_and_numpy_are_refused_with_their_place(build: Callable[[], nn.Module], whose: str) -> None:
    with pytest.raises(ModelError, match=rf"{whose} random at .*test_selfcheck\.py:\d+.*for the whole run"):
        checked(build)


def test_draws_that_decide_on_nothing_pass() -> None:
    checked(lambda: Skipping(0.0))
    with pytest.raises(ModelError, match="Python's random"):
        checked(lambda: Skipping(1e-6))


class Teacher(Net):
    """What the second layer computes is held against its moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def changed(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.layers[1].weight, alpha=0.1)
            target: Tensor = self.teacher(x)
        return x + target


WRITERS = (Teacher,)


def test_a_parameter_that_forward_writes_is_refused() -> None:
    with pytest.raises(ModelError, match=r"teacher\.weight.*moving average"):
        checked(Teacher)


class Annealed(Net):
    """``warm`` is the step from which on the counter matters."""

    def __init__(self, warm: int = 0) -> None:
        super().__init__()
        self.steps, self.warm = 0, warm

    def changed(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * min(1.0, 0.1 * max(1, self.steps - self.warm))


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def changed(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_counter_is_refused_if_the_loss_depends_on_it_at_any_time() -> None:
    for build in (Annealed, partial(Annealed, 500)):
        with pytest.raises(ModelError, match=r"a number that forward\(\) itself changes: steps"):
            checked(build)
    checked(Counting)


class RandomRows(Rows):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(self.generator.standard_normal(8), dtype=torch.float32), "y": torch.ones(8)}


def test_a_random_dataset_is_named_as_that() -> None:
    with pytest.raises(DataError, match=r"the dataset is random: dataset\[\d+\]"):
        checked(Net, RandomRows())


def test_a_random_loss_is_named_as_that() -> None:
    generator = np.random.default_rng(0)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output * (1 + float(generator.random()))

    with pytest.raises(ModelError, match=r"Plain PyTorch itself computes something else.*default_rng"):
        checked(Net, loss=loss)


# -- mutants: what a wrong capture would compute ---------------------------------------------------------------


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


def detached(graph: torch.fx.Graph, node: torch.fx.Node, which: Any = torch.ops.aten.tanh.default) -> bool:
    if node.target is not which:
        return False
    with graph.inserting_after(node):
        cut = graph.call_function(torch.ops.aten.detach.default, (node,))
    node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)
    return True


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


class Reentrant(Net):
    def changed(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layers[2], x, use_reentrant=True)
        return torch.tanh(found)


def test_a_reentrant_checkpoint_that_slipped_through_is_named() -> None:
    with pytest.raises(ModelError, match=r"use_reentrant=True \(torch\.utils\.checkpoint at .*test_selfcheck"):
        checked(Reentrant, mutate=lambda model: edited(model, detached))


class Spectral(Net):
    def changed(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.layer(2, x))
        for number in range(1, 4):
            spectrum = spectrum * torch.exp(1j * self.layers[number].bias[:5])
        back: Tensor = torch.fft.irfft(spectrum, n=8)
        return back


def test_complex_activations_whose_gradient_was_lost_are_named() -> None:
    def forgetful(model: PartitionedModel) -> None:
        complex_ones = [c for into in model.split.crossings for c in into if c.dtype.is_complex]
        assert complex_ones
        for crossing in complex_ones:
            object.__setattr__(crossing, "differentiable", False)

    with pytest.raises(ModelError, match="Activations are complex numbers"):
        checked(Spectral, mutate=forgetful, cut_points=9)


# -- what is no difference -------------------------------------------------------------------------------------


class Softmaxed(Net):
    """The gradient of the bias is zero but for rounding: a softmax does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def changed(self, x: Tensor) -> Tensor:
        return torch.softmax(100 * x + self.bias, dim=-1)


class Sparse(nn.Module):
    """Sparse gradients, an empty parameter, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.registers = nn.Parameter(torch.zeros(1, 0, 8))
        self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([self.registers.expand(tokens.shape[0], -1, -1), self.embed(tokens)], dim=1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x.mean(1), y)


class Words(Rows):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": torch.arange(index, index + 6) % 16, "y": super().__getitem__(index)["y"]}


def test_true_zeros_empty_and_sparse_gradients_are_no_differences() -> None:
    assert checked(Softmaxed).errors.gradient < 1e-5
    assert checked(Sparse, Words()).errors.gradient < 1e-6


class Faint(Net):
    """The gradient of one parameter is a billionth of the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.faint = nn.Parameter(torch.ones(8))

    def changed(self, x: Tensor) -> Tensor:
        return x + 1e-9 * torch.sin(self.faint)


def test_a_missing_gradient_shows_however_small_it_is() -> None:
    assert checked(Faint).errors.gradient < 1e-6
    with pytest.raises(ModelError, match=r"faint \(in Faint, section \d\) gets no gradient"):
        checked(Faint, mutate=lambda model: edited(model, partial(detached, which=torch.ops.aten.sin.default)))


class Variational(nn.Module):
    """Draws noise: the loss of a batch is no mean of its parts' but for that."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        drawn = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        apart: Tensor = (mean**2 + log_variance.exp() - log_variance).mean()
        return nn.functional.mse_loss(self.decode(drawn), y) + apart


def test_noise_that_a_model_draws_is_no_difference_and_a_sum_is_compared_in_spite_of_it() -> None:
    assert checked(Variational).errors.gradient < 1e-6
    found = checked(Variational, DrawnRows(), loss=lambda output, batch: output * batch["x"].shape[0])
    assert found.errors.gradient < 1e-6


class DrawnRows(Rows):
    """Drawn anew at each reading, from torch's generator, which Varuna seeds."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(8), "y": torch.rand(8)}


def test_contrastive_losses_are_checked_by_micro_batch() -> None:
    class Pairs(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            one, two = self.layer(1, self.layer(0, x)), self.layer(3, self.layer(2, y))
            return nn.functional.cross_entropy(one @ two.T, torch.arange(x.shape[0]))

    assert checked(Pairs, micro_batch=3).errors.loss < 1e-6
