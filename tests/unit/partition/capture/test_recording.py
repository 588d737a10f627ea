"""A recorded constructor makes each tensor by itself, as the real one would."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.models import tiny_gpt2, tiny_llama
from varuna.core.errors import ModelError
from varuna.partition.capture.construction import construct


class Zoo(nn.Module):
    """One parameter or buffer for each way of making one."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.orthogonal)
        self.truncated = nn.Parameter(torch.empty(40, 50))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.6, b=0.6)
        self.padded = nn.Embedding(5, 3, padding_idx=1)
        self.reduced = nn.Linear(30, 40, dtype=torch.bfloat16)
        self.literal = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.array = nn.Parameter(torch.from_numpy(np.ones(3, dtype=np.float32)))
        self.array.data.mul_(2)
        self.product = nn.Parameter(torch.randn(30, 40) * 0.02)
        with torch.no_grad():
            self.product[0] = 0
        self.untouched = nn.Parameter(torch.empty(3))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.decay = nn.Parameter(torch.full((2,), self.rates[2]))
        self.register_buffer("table", 1 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))


def drawn(build: type[nn.Module] | object, seed: int = 0) -> dict[str, Tensor]:
    construction = construct(build, seed)  # type: ignore[arg-type]
    construction.check_independent()
    return {name: construction.parameter(name, seed) for name in construction.parameters}


def test_each_way_of_initialising_is_replayed() -> None:
    values, real = drawn(Zoo), Zoo()
    for name, parameter in real.named_parameters():
        assert values[name].shape == parameter.shape
        assert values[name].dtype == parameter.dtype
    for name in ("literal", "array", "decay"):
        assert values[name].equal(real.get_parameter(name))
    for name in ("product", "reduced.weight"):
        assert float(values[name].std()) == pytest.approx(float(real.get_parameter(name).detach().std()), rel=0.1)
    assert values["orthogonal"] @ values["orthogonal"].T == pytest.approx(torch.eye(6), abs=1e-5)
    assert float(values["truncated"].abs().max()) <= 0.6
    assert 0.2 < float(values["truncated"].std()) < 0.5
    assert values["padded.weight"][1].eq(0).all()
    assert values["padded.weight"][0].ne(0).all()
    assert values["product"][0].eq(0).all()
    assert values["untouched"].eq(0).all()  # never what was in memory


def test_a_parameters_values_depend_on_the_seed_and_its_name_only() -> None:
    small, large, other = drawn(lambda: tiny_gpt2(layers=1)), drawn(lambda: tiny_gpt2(layers=3)), drawn(tiny_gpt2, 1)
    # the depth scales what GPT-2 adds to the residual stream
    assert all(value.equal(large[name]) for name, value in small.items() if "c_proj" not in name)
    first, second = "transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"
    assert not large[first].equal(large[second])
    assert not large[first].equal(other[first])


def test_constructing_leaves_the_generators_and_trunc_normal_as_they_were() -> None:
    state, function = torch.get_rng_state(), torch.nn.init._no_grad_trunc_normal_
    drawn(Zoo)
    assert torch.get_rng_state().equal(state)
    assert torch.nn.init._no_grad_trunc_normal_ is function


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, Zoo])
def test_buffers_are_the_constructors(build: type[nn.Module]) -> None:
    construction, real = construct(build, 0), build()
    assert construction.buffers.keys() == dict(real.named_buffers()).keys()
    for name, buffer in real.named_buffers():
        assert construction.buffer(name, 0).equal(buffer)
    assert construction.saved_buffers == {name for name, _ in real.named_buffers() if name in real.state_dict()}


def test_a_parameter_of_a_model_that_fits_no_machine() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(2**20, 2**20)
            self.small = nn.Linear(4, 4)

    construction = construct(Huge, 0)
    construction.check_independent()
    assert construction.shapes["wide.weight"] == (2**20, 2**20)
    assert construction.parameter("small.weight", 0).abs().max() <= 0.5


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 3)
        self.student = nn.Linear(3, 3)
        self.student.load_state_dict(self.teacher.state_dict())


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(4, 2)
        self.a, self.b = nn.Parameter(both[:2]), nn.Parameter(both[2:])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(4, 2))
        self.length = nn.Parameter(self.direction.detach().norm(dim=1))


@pytest.mark.parametrize(
    ("build", "reader", "read"),
    [(Copied, "student.weight", "teacher.weight"), (Split, "b", "a"), (Normed, "length", "direction")],
)
def test_an_init_that_depends_on_another_parameter_is_refused(build: type[nn.Module], reader: str, read: str) -> None:
    with pytest.raises(ModelError, match=f"initial values of {reader} depend on those of {read}"):
        drawn(build)


def test_a_copy_of_constants_is_no_dependence() -> None:
    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.LayerNorm(3)
            self.b = nn.Parameter(self.a.weight.detach() * 2)

    assert drawn(Ones)["b"].equal(torch.full((3,), 2.0))


def test_a_random_number_that_passes_through_python_is_refused() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3) + torch.rand(()).item())

    with pytest.raises(ModelError, match="through Python"):
        drawn(Peeks)
