"""Code that cannot be followed is refused at the user's line, and the way out that the message names works."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.checks.verified import verify
from tests.unit.engine.models import Tokens
from tests.unit.partition.families import hugging_face
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition


def batch(size: int) -> dict[str, Tensor]:
    return SampleSource(Tokens(), seed=0).micro_batch(range(size)).tensors


class Layers(nn.Module):
    """An embedding, layers and a head; subclasses put something in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.middle(torch.tanh(layer(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Branching(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return -x if torch.rand([]) > 0.5 else x


@torch.library.custom_op("varuna_tests::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    """The same branch as one operator: capture does not look inside."""
    return -x if x.sum() > 0 else x.clone()


@turn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)  # called during capture too: no branches here


def _turn_back(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return -gradient if x.sum() > 0 else gradient


turn.register_autograd(_turn_back, setup_context=_remember)


class Wrapped(Layers):
    def middle(self, x: Tensor) -> Tensor:
        turned: Tensor = turn(x)
        return turned


@pytest.mark.nightly
def test_layer_drop_runs_as_written_in_the_module_that_draws() -> None:
    build = hugging_face(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        word_embed_proj_dim=16,
        layerdrop=0.5,
    )
    model = partition(Recipe(build), batch(2))
    assert list(model.eager) == ["model.decoder"]
    assert "modeling_opt.py:" in model.eager["model.decoder"]
    found = verify(model, Recipe(build), materialise(Recipe(build), 0), batch(3))
    assert found.loss_error < 1e-6
    assert found.gradient_error < 1e-5


def test_the_same_branch_wrapped_into_an_operator_is_captured_and_cut() -> None:
    recipe = Recipe(Wrapped)
    model = partition(recipe, batch(2), cut_points=5)
    assert sum("varuna_tests.turn" in section.module.code for section in model.sections) == 3
    found = verify(model, recipe, materialise(recipe, 0), batch(3))
    assert found.loss_error < 1e-6
    assert found.gradient_error < 1e-6


class Misspelt(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return nn.functional.gelo(x)  # type: ignore[attr-defined, no-any-return]


class Unknown(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return x.foo()  # type: ignore[attr-defined, no-any-return]


class Unfit(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7)


class Limited(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones([]))

    def middle(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(0.5)
        return x * self.scale


class Differentiated(Layers):
    def middle(self, x: Tensor) -> Tensor:
        [slope] = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)
        return slope


class Looping(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return torch.stack([one / one.norm() for one in list(x)])


class Leaving(Layers):
    """As the matching of boxes does, by SciPy."""

    def middle(self, x: Tensor) -> Tensor:
        return x + float(x.detach().numpy().argmax())


class Noted(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(16)

    def middle(self, x: Tensor) -> Tensor:
        self.table[0] = x.sum()
        return x + self.table


class Noisy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.randn(16)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.noise


class Unreduced(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.embed(input_ids)).flatten(0, 1)
        return nn.functional.cross_entropy(scores, labels.flatten(), reduction="none")


CAUSES = [
    (Misspelt, "functional.gelo", r"middle\(\) fails at {place}: AttributeError: .*gelo.{{0,3}}$"),
    (Looping, "in list(x)", r"one number of samples only.* at {place}.*loops over the samples"),
    (Leaving, "x.detach().numpy()", r"at {place}: values leave the graph for NumPy"),
    (
        Branching,
        "torch.rand([]) > 0.5 else",
        r"captured at {place}: a decision there follows from data.*Two ways out.*torch\.where.*custom_op",
    ),
    (Unknown, "x.foo()", r"middle\(\) fails at {place}: AttributeError: 'Tensor' object has no attribute 'foo'$"),
    (Unfit, "torch.ones(7, 7)", r"at {place}: RuntimeError: .*16\*batch, 16"),
    (Limited, "data.mul_", r"\.data of a parameter at {place}"),
    (Differentiated, "autograd.grad(", r"computes gradients itself at {place}"),
    (Noted, "self.table[0] =", r"plain attribute in place at {place}"),
    (Noisy, "", r"attribute noise of the model .* random"),
    (Unreduced, "", r"shape \(16\*batch,\)"),
]


@pytest.mark.parametrize(("build", "marked", "said"), by_depth(CAUSES[:3], CAUSES))
def test_each_cause_has_words_of_its_own_and_a_line_and_no_names_of_torch(
    build: type[Layers], marked: str, said: str
) -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if marked in text)
    with pytest.raises(ModelError) as refused:
        partition(Recipe(build), batch(2))
    message = str(refused.value)
    assert re.search(said.format(place=rf"[^\n]*{Path(__file__).name}:{line}\b"), message, re.DOTALL), message
    assert not re.search(r"\b(s|u|zuf)\d+\b|lifted_tensor|FakeTensor", message)


class Filling(Layers):
    """Writes into a tensor that forward() makes anew of numbers."""

    def middle(self, x: Tensor) -> Tensor:
        weights = torch.tensor([0.25] * 16)
        weights[3] = x.mean().detach()
        return x * weights


@pytest.mark.nightly
def test_what_forward_makes_of_numbers_may_be_written() -> None:
    recipe = Recipe(Filling)
    found = verify(partition(recipe, batch(2), cut_points=4), recipe, materialise(recipe, 0), batch(3))
    assert found.loss_error < 1e-6
    assert found.gradient_error < 1e-6


class Scripted(Layers):
    """Holds a module that TorchScript has compiled, parameters and all."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.jit.script(nn.Linear(16, 16))

    def middle(self, x: Tensor) -> Tensor:
        made: Tensor = self.compiled(x)
        return made


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_scripted_module_with_parameters_is_refused_by_its_name() -> None:
    with pytest.raises(ModelError, match=r"compiled is a TorchScript module .* Give the model the module as it was"):
        partition(Recipe(Scripted), batch(2))
