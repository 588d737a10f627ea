"""The check before step 0: sound jobs pass, each thing that capture cannot keep is refused by name."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.checks.jobs import Annealed, Dropping, Net, Normed, Rows, Skipping, checked, with_parameter_hook
from tests.unit.engine.models import adamw
from varuna.checks.compare import Errors
from varuna.checks.selfcheck import SelfCheck
from varuna.core.errors import DataError, ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition
from varuna.trainer import Trainer


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def test_sound_models_pass_with_small_errors(dtype: torch.dtype) -> None:
    bound = 1e-6 if dtype is torch.float32 else 0.05
    for build, micro_batch in ((Net, None), (Dropping, None), (Normed, 4)):
        found = checked(build, micro_batch=micro_batch, dtype=dtype)
        assert found.loss <= bound
        assert found.gradient <= bound


# -- what is refused by name -----------------------------------------------------------------------------------


class TensorHook(Net):
    def changed(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize(
    "which",
    [
        "register_post_accumulate_grad_hook",
        pytest.param("register_full_backward_hook", marks=pytest.mark.nightly),
        pytest.param("register_hook", marks=pytest.mark.nightly),
    ],
)
def test_hooks_of_the_constructor_are_refused(which: str) -> None:
    with pytest.raises(ModelError, match=rf"{which} on layers\.1.*before_step"):
        checked(with_parameter_hook(which))


def test_hooks_of_forward_are_refused_with_their_place() -> None:
    with pytest.raises(ModelError, match=r"Tensor\.register_hook at .*test_selfcheck\.py:\d+"):
        checked(TensorHook)


class NumpyNoise(Net):
    def changed(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


@pytest.mark.parametrize(("build", "whose"), [(Skipping, "Python's"), (NumpyNoise, "NumPy's")])
def test_draws_from_python_and_numpy_are_refused_with_their_place(build: Callable[[], nn.Module], whose: str) -> None:
    with pytest.raises(ModelError, match=rf"{whose} random at .*(jobs|test_selfcheck)\.py:\d+.*for the whole run"):
        checked(build)


@pytest.mark.nightly
def test_draws_that_decide_on_nothing_pass() -> None:
    checked(lambda: Skipping(0.0))
    with pytest.raises(ModelError, match="Python's random"):
        checked(lambda: Skipping(1e-6))


class Teacher(Net):
    """A model whose second layer's output is held against its moving average."""

    writes = True

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def changed(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.layers[1].weight, alpha=0.1)
            target: Tensor = self.teacher(x)
        return x + target


def test_a_parameter_that_forward_writes_is_refused() -> None:
    with pytest.raises(ModelError, match=r"teacher\.weight.*moving average"):
        checked(Teacher)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def changed(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_counter_is_refused_if_the_loss_depends_on_it_at_any_time() -> None:
    for warm in by_depth([500], [0, 500]):
        with pytest.raises(ModelError, match=r"a number that forward\(\) itself changes: steps"):
            checked(partial(Annealed, warm))
    checked(Counting)


class RandomRows(Rows):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(self.generator.standard_normal(8), dtype=torch.float32), "y": torch.ones(8)}


def test_a_loss_that_trains_nothing_is_refused_as_in_plain_pytorch() -> None:
    with pytest.raises(ModelError, match=r"no parameter gets a gradient.*detach\(\)"):
        checked(Net, loss=lambda output, batch: output.detach() * 2)


def test_a_random_dataset_is_named_as_that() -> None:
    with pytest.raises(DataError, match=r"the dataset is random: reading dataset\[\d+\]"):
        checked(Net, RandomRows())


def test_a_random_loss_is_named_as_that() -> None:
    generator = np.random.default_rng(0)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output * (1 + float(generator.random()))

    with pytest.raises(ModelError, match=r"Plain PyTorch itself gives a different result.*default_rng"):
        checked(Net, loss=loss)


# -- what is not a difference ------------------------------------------------------------------------------------


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


@pytest.mark.nightly
def test_true_zeros_empty_and_sparse_gradients_are_no_differences() -> None:
    assert checked(Softmaxed).gradient < 1e-5
    assert checked(Sparse, Words()).gradient < 1e-6


class Variational(nn.Module):
    """Draws noise: the loss of a batch is not the mean of its parts' only because of that."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        drawn = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        apart: Tensor = (mean**2 + log_variance.exp() - log_variance).mean()
        return nn.functional.mse_loss(self.decode(drawn), y) + apart


@pytest.mark.nightly
def test_noise_that_a_model_draws_is_no_difference_and_a_sum_is_compared_in_spite_of_it() -> None:
    assert checked(Variational).gradient < 1e-6
    found = checked(Variational, DrawnRows(), loss=lambda output, batch: output * batch["x"].shape[0])
    assert found.gradient < 1e-6


class DrawnRows(Rows):
    """Drawn anew at each reading, from torch's generator, which Varuna seeds."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(8), "y": torch.rand(8)}


@pytest.mark.nightly
def test_contrastive_losses_are_checked_by_micro_batch() -> None:
    class Pairs(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            one, two = self.layer(1, self.layer(0, x)), self.layer(3, self.layer(2, y))
            return nn.functional.cross_entropy(one @ two.T, torch.arange(x.shape[0]))

    assert checked(Pairs, micro_batch=3).loss < 1e-6


class One(Rows):
    def __len__(self) -> int:
        return 1


def hooked() -> nn.Module:
    model = Normed()
    weight: Any = model.get_parameter("layers.1.weight")
    weight.register_hook(lambda gradient: gradient * 3)
    return model


def test_fewer_samples_than_the_model_takes_are_checked_several_times_over() -> None:
    """One sample, to see a model learn it: statistics over it alone would be of nothing."""

    def compare(build: Callable[[], nn.Module]) -> Errors | None:
        recipe, source = Recipe(build), SampleSource(One(), seed=0)
        model = partition(recipe, source.micro_batch([0, 0]).tensors)
        return SelfCheck(recipe, source, None, 2).compare(model, materialise(recipe, 0)).errors

    found = compare(Normed)
    assert found is not None
    assert found.loss < 1e-6
    with pytest.raises(ModelError, match="hooks on gradients"):
        compare(hooked)


class Predicting(Net):
    """Returns its prediction, so that ``metrics=`` has something to measure."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        made = self.layer(3, self.layer(2, self.layer(1, self.layer(0, x))))
        return {"loss": nn.functional.mse_loss(made, y), "made": made}


def test_metrics_are_compared_as_well() -> None:
    """A Python number in them was captured once, though neither the loss nor a gradient depends on it."""
    calls: list[int] = []

    def counting(output: Any, batch: Any) -> dict[str, Tensor]:
        calls.append(0)
        return {"close": (output["made"] - batch["y"]).abs().sum() * len(calls)}

    def sound(output: Any, batch: Any) -> dict[str, Tensor]:
        return {"close": (output["made"] - batch["y"]).abs().sum(), "right": (output["made"] > batch["y"]).sum()}

    checked(Predicting, metrics=sound)
    with pytest.raises(ModelError, match=r"close of metrics= is .* as captured, .* in plain PyTorch.*"):
        checked(Predicting, metrics=counting)


# -- a run that goes on ----------------------------------------------------------------------------------------

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)
"""
HOOK = "        self.layer.weight.register_hook(lambda gradient: gradient * 0.5)\n"


def test_a_run_that_goes_on_with_other_code_is_checked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the captured graph is the same: it has no hooks."""

    def go_on(code: str, steps: int) -> str:
        (tmp_path / "net.py").write_text(code)
        found = importlib.util.spec_from_file_location("net_of_a_run", tmp_path / "net.py")
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, "net_of_a_run", module)
        found.loader.exec_module(module)
        trainer = Trainer(module.Net, Rows(), adamw, 4, device="cpu", checkpoints=tmp_path / "saved")
        assert len(list(trainer.steps(steps))) == 1
        return capsys.readouterr().err

    assert "checked against plain PyTorch" in go_on(NET, 1)
    assert "checked" not in go_on(NET, 2)
    said = go_on(f"{NET}# edited", 3)
    assert "the checkpoint of step 2 was written by other code or versions: the model is checked anew" in said
    assert "checked against plain PyTorch" in said
    with pytest.raises(ModelError, match=r"Parameter\.register_hook on layer\.weight"):
        go_on(NET.replace("    def forward", HOOK + "\n    def forward"), 4)
