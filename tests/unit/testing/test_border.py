"""Copies of a script's objects mean the same as the objects: modes, references, parameters of the loss."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varuna
import varuna.data
from tests.depth import nightly_rows, of_depth
from varuna.core.errors import DataError, ModelError, VarunaError
from varuna.testing import run

STEPS, BATCH, SAMPLES = 3, 4, 40
ODD_STEP = 5
"""beyond what is looked at before step 0"""


class Points:
    """Ten features and one of five classes."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(10, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x[:5].argmax()}


class Net(nn.Module):
    """A backbone with dropout, and a head."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x))


def quiet() -> Net:
    """A model whose backbone stays in evaluation mode, so that nothing draws."""
    torch.manual_seed(0)
    model = Net()
    model.backbone.eval()
    return model


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


def batch_of(step: int, dataset: Any) -> dict[str, Tensor]:
    places = [varuna.data.sample_index(step * BATCH + i, size=SAMPLES, seed=0) for i in range(BATCH)]
    samples = [dataset[place] for place in places]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Any, Any], Tensor] | None) -> list[float]:
    """Losses of the script's own loop."""
    found = []
    for step in range(STEPS):
        batch = batch_of(step, Points())
        value = loss(model(batch["x"]), batch) if loss is not None else model(**batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def trained(trainer: varuna.Trainer) -> list[float]:
    return [step.loss for step in trainer.steps(STEPS)]


Script = Callable[[], tuple[nn.Module, Callable[[Any, Any], Tensor] | None, Sequence[nn.Parameter]]]
"""Builds a model and its loss; and the loss's parameters, which the optimizer has, too."""


def frozen_normalisation() -> Any:
    model, norm = quiet(), nn.BatchNorm1d(8)
    norm.running_mean.fill_(0.3)  # type: ignore[union-attr]
    model.backbone.append(norm.eval())
    return model, cross_entropy, ()


def replaced_forward() -> Any:
    model = quiet()
    before = model.head.forward
    model.head.forward = lambda x: before(x) * 1.5  # type: ignore[method-assign,assignment]
    return model, cross_entropy, ()


def penalty() -> Any:
    model = quiet()
    listed = [each for each in model.parameters() if each.dim() > 1]
    return (
        model,
        lambda output, batch: (
            cross_entropy(output, batch)
            + 2e-2 * sum(each.pow(2).sum() for each in model.parameters())
            + 1e-2 * sum(each.abs().sum() for each in listed)
        ),
        (),
    )


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.penalty = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x))
        self.penalty = made.pow(2).mean()
        return made


def kept_penalty() -> Any:
    model = quiet()
    model.backbone.append(Noted())
    model(torch.zeros(2, 10))  # the script has called it before: its attribute has a graph
    last: Any = model.backbone[-1]
    return model, lambda output, batch: cross_entropy(output, batch) + 0.5 * last.penalty, ()


def weight_normed() -> Any:
    model = quiet()
    model.head = torch.nn.utils.weight_norm(model.head)
    return model, cross_entropy, ()


def unregistered() -> Any:
    model = quiet()
    model.more = [nn.Linear(5, 5)]  # type: ignore[assignment]
    forward = model.forward
    model.forward = lambda x: model.more[0](forward(x))  # type: ignore[method-assign, operator, index]
    return model, cross_entropy, ()


class Proxies(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.eye(5))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(8 * F.normalize(output, dim=-1) @ F.normalize(self.centres, dim=-1).T, labels)


def proxies_in_a_function() -> Any:
    model, proxies = quiet(), Proxies()
    return model, lambda output, batch: proxies(output, batch["labels"]), tuple(proxies.parameters())


def weights_of_tasks() -> Any:
    model, weights = quiet(), nn.Parameter(torch.zeros(2))

    def loss(output: Tensor, batch: Any) -> Tensor:
        one, two = cross_entropy(output, batch), output.pow(2).mean()
        return (-weights).exp()[0] * one + (-weights).exp()[1] * two + weights.sum()

    return model, loss, (weights,)


def frozen_teacher() -> Any:
    model, teacher = quiet(), quiet()

    def loss(output: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            goal = teacher(batch["x"])
        return cross_entropy(output, batch) + F.mse_loss(output, goal)

    return model, loss, ()


SCRIPTS: list[Script] = [
    *(frozen_normalisation, replaced_forward, penalty, kept_penalty, weight_normed, unregistered),
    *(proxies_in_a_function, weights_of_tasks, frozen_teacher),
]
ONE_OF_EACH = {frozen_normalisation, replaced_forward, penalty, weight_normed}
"""one for each kind: a model's call, what it has become, calls by the loss, its parameters"""


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("script", of_depth(SCRIPTS, ONE_OF_EACH), ids=lambda script: script.__name__)
def test_a_script_that_passes_what_it_has_built_trains_as_its_own_loop(script: Script) -> None:
    model, loss, more = script()
    expected = plain(model, sgd([*model.parameters(), *more]), loss)
    values = [each.detach().clone() for each in (*model.parameters(), *more)]
    model, loss, more = script()
    optimizer = sgd([*model.parameters(), *more])
    trainer = varuna.Trainer(model, Points(), optimizer, BATCH, loss=loss, device="cpu")
    assert trained(trainer) == pytest.approx(expected, rel=1e-5)
    for mine, other in zip((*model.parameters(), *more), values, strict=True):
        torch.testing.assert_close(mine.detach(), other, rtol=1e-4, atol=1e-5)


def test_a_loss_with_parameters_trains_is_exported_and_given_back_with_a_model_from_a_function(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model, proxies = quiet(), Proxies()
    expected = plain(model, sgd([*model.parameters(), *proxies.parameters()]), lambda o, b: proxies(o, b["labels"]))
    mine = Proxies()
    named: list[str] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        named.extend(name for name, _ in parameters)
        return sgd([parameter for _, parameter in parameters])

    trainer = varuna.Trainer(quiet, Points(), optimizer, BATCH, loss=mine, device="cpu")
    assert trained(trainer) == pytest.approx(expected, rel=1e-5)
    trainer.export(tmp_path / "weights.safetensors")
    assert "loss.centres" in named
    saved = load_file(tmp_path / "weights.safetensors")["loss.centres"]
    torch.testing.assert_close(saved, proxies.centres.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.centres.detach(), saved)


class WithSpares(Net):
    """Has a layer that forward() does not use, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.eval()
        self.spare = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.register_buffer("unused", torch.arange(3))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "function"])
def test_an_export_has_all_that_a_state_dict_has(is_built: bool, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(0)
    first = WithSpares()
    model: Any = first if is_built else WithSpares
    optimizer: Any = sgd(first.parameters()) if is_built else lambda named: sgd([each for _, each in named])
    trainer = varuna.Trainer(model, Points(), optimizer, BATCH, loss=cross_entropy, device="cpu")
    trained(trainer)
    trainer.export(tmp_path / "weights.safetensors")
    saved, other = load_file(tmp_path / "weights.safetensors"), WithSpares()
    other.load_state_dict(saved)
    for name in ("spare.weight", "scale", "unused"):
        torch.testing.assert_close(saved[name], first.state_dict()[name])


def test_two_stages_and_two_replicas_train_modes_penalties_and_loss_parameters_as_one_process() -> None:
    model, loss, more = proxies_in_a_function()
    regularised = lambda o, b: loss(o, b) + 1e-2 * sum(each.pow(2).sum() for each in model.parameters())  # noqa: E731
    expected = plain(model, sgd([*model.parameters(), *more]), regularised)

    def script() -> None:
        mine, base, others = proxies_in_a_function()
        both = lambda o, b: base(o, b) + 1e-2 * sum(each.pow(2).sum() for each in mine.parameters())  # noqa: E731
        optimizer = sgd([*mine.parameters(), *others])
        for _ in varuna.Trainer(mine, Points(), optimizer, BATCH, loss=both, device="cpu").steps(STEPS):
            pass

    assert run(script, workers=4, stages=2).losses == pytest.approx(expected, rel=1e-5)


# -- refused in words, with a way out that works ----------------------------------------------------------------


class Teaching(Net):
    """A criterion in forward, for models whose samples have labels."""

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(super().forward(x), labels)


class Hang(torch.autograd.Function):
    """Hangs an auxiliary loss onto an activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones(())


class Hanging(Teaching):
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(Hang.apply(output, 0.3 * output.pow(2).mean()), labels)  # type: ignore[no-untyped-call]


class Adding(Teaching):
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels) + 0.3 * output.pow(2).mean()


class Seeding(Teaching):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        noise = torch.randn(10, generator=torch.Generator().manual_seed(3))
        return super().forward(x + noise, labels)


class Holding(Teaching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(10, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        noise: Any = self.noise
        return super().forward(x + noise, labels)


class Missing(Teaching):
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        target = torch.where(output.detach() > 9, torch.nan, 0.1)
        return torch.nanmean((output - target) ** 2)


class Choosing(Teaching):
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        target = torch.full_like(output, 0.1)
        return ((output - target) ** 2).mean()


class Listed(Teaching):
    def __init__(self, kind: Callable[[Any], Any] = list) -> None:
        super().__init__()
        self.more = kind([nn.Linear(5, 5)])

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.more[0](output), labels)


def registered() -> nn.Module:
    return Listed(nn.ModuleList)


@pytest.mark.parametrize(
    ("refused", "words", "advised"),
    [
        (Seeding, r"generator of its own .*test_border\.py:\d+.*register_buffer", Holding),
        *nightly_rows(
            (Hanging, r"backward of Hang at .*test_border\.py:\d+ .*add it to the model's loss", Adding),
            (Missing, r"leaves NaN out of the mean, but not out of the gradient", Choosing),
            (Listed, r"more is a list of modules.*ModuleList", registered),
        ),
    ],
)
def test_what_is_refused_is_right_once_the_advice_is_followed(refused: Any, words: str, advised: Any) -> None:
    def seeded(build: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        model: Any = build()
        model.backbone.eval()
        return model  # type: ignore[no-any-return]

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return sgd([parameter for _, parameter in named])

    with pytest.raises(ModelError, match=f"(?s){words}"):
        trained(varuna.Trainer(lambda: seeded(refused), Points(), optimizer, BATCH, device="cpu"))
    model = seeded(advised)
    expected = plain(model, sgd(model.parameters()), None)
    trainer = varuna.Trainer(lambda: seeded(advised), Points(), optimizer, BATCH, device="cpu")
    assert trained(trainer) == pytest.approx(expected, rel=1e-5)


def test_parameters_in_a_loss_function_are_refused_and_a_module_is_the_way_out() -> None:
    proxies = Proxies()
    optimizer = lambda named: sgd([parameter for _, parameter in named])  # noqa: E731
    with pytest.raises(ModelError, match=r"test_border\.py:\d+ with a parameter of shape \(5, 5\).*loss=MyLoss\(\)"):
        trained(varuna.Trainer(quiet, Points(), optimizer, BATCH, loss=lambda o, b: proxies(o, b["labels"])))


class Single(Net):
    """A binary classifier that squeezes."""

    def __init__(self) -> None:
        super().__init__(classes=1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.binary_cross_entropy_with_logits(super().forward(x).squeeze(), (labels > 1).float())


@pytest.mark.parametrize("micro_batch", of_depth([None, 1, 2], {1}))
def test_squeeze_keeps_the_batch_of_a_micro_batch_of_one(micro_batch: int | None) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Single()
        model.backbone.eval()
        return model

    model = build()
    expected = plain(model, sgd(model.parameters()), None)
    optimizer = lambda named: sgd([parameter for _, parameter in named])  # noqa: E731
    trainer = varuna.Trainer(build, Points(), optimizer, BATCH, micro_batch=micro_batch, device="cpu")
    assert trained(trainer) == pytest.approx(expected, rel=1e-5)


ODD = varuna.data.sample_index(ODD_STEP * BATCH + 1, size=SAMPLES, seed=0)


class Beyond(Points):
    """A label beyond the classes."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if index == ODD:
            sample["labels"] = torch.tensor(7)
        return sample


class Picking(Net):
    """Picks by a label, which only the operation itself can refuse."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = -super().forward(x).log_softmax(-1).gather(1, labels[:, None]).mean()
        return found


def test_a_label_beyond_the_classes_names_the_sample_and_the_line_before_its_step_is_applied() -> None:
    done = list[int]()
    trainer = varuna.Trainer(quiet(), Beyond(), lambda n: sgd([p for _, p in n]), BATCH, loss=cross_entropy)
    words = rf"dataset\[{ODD}\] has 7 in 'labels', .* loss over 5 classes takes at .*test_border\.py:\d+"
    with pytest.raises(DataError, match=words):
        done.extend(step.index for step in trainer.steps(ODD_STEP + 2))
    assert done == list(range(ODD_STEP))


def test_an_error_of_the_model_carries_its_line_and_the_samples() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = Picking()
        model.backbone.eval()
        return model

    trainer = varuna.Trainer(build, Beyond(), lambda n: sgd([p for _, p in n]), BATCH, micro_batch=2)
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        list(trainer.steps(ODD_STEP + 2))
    told = "\n".join(getattr(caught.value, "__notes__", []))
    assert not isinstance(caught.value, VarunaError)
    assert "test_border.py:" in told
    assert str(ODD) in told


def test_what_after_step_reads_may_not_be_changed_by_the_loop() -> None:
    bounds = {"weights": 0.5}

    def clamp(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        parameters["head.weight"].clamp_(-bounds["weights"], bounds["weights"])

    model = quiet()
    trainer = varuna.Trainer(model, Points(), sgd(model.parameters()), BATCH, loss=cross_entropy, after_step=clamp)

    def loop() -> None:
        for _ in trainer.steps(STEPS):
            bounds["weights"] = 0.1

    with pytest.raises(VarunaError, match=r"weights.*, which after_step= reads: it was 0.5, and is now 0.1.*state="):
        loop()


def test_what_a_plain_loop_would_draw_or_average_otherwise_is_told_before_step_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def noisy(named: list[tuple[str, nn.Parameter]]) -> None:
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad))

    def told(**options: Any) -> str:
        model = options.pop("model", quiet)()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        list(varuna.Trainer(model, Points(), optimizer, BATCH, loss=cross_entropy, device="cpu", **options).steps(1))
        return " ".join(capsys.readouterr().err.split())

    said = told(model=Net, before_step=noisy, ema=0.9)
    assert "forward() or loss= draws random numbers (dropout), which Varuna seeds" in said
    assert "before_step= or the optimizer draws random numbers, which Varuna seeds" in said
    assert "ema=0.9 begins with the parameters before the first step" in said
    said = told(before_step=lambda named: None, ema=0.9, ema_from="first step")
    assert "draws random numbers" not in said
    assert "begins with" not in said
