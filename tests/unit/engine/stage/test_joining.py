"""Sections that have one graph give the bits that they give apart, and are left as soon as autograd is through."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, dropping, tiny_gpt2, tiny_llama
from tests.unit.engine.ranks import Setup
from tests.unit.engine.stage.test_stage import plan_of
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.tape import Tape, backward, take_row
from varuna.engine.worker.stored import initial_states

WIDTH = 8


class Rows:
    """Some numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.rand(6, WIDTH, generator=torch.Generator().manual_seed(index))}


class Layers(nn.Module):
    """Layers, each of which takes what the one before makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def each(self, x: Tensor, layer: nn.Module) -> Tensor:
        return x + torch.tanh(layer(x)) * x

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.each(x, layer)
        return x.square().mean()


class Chain(Layers):
    """Nothing is taken twice."""

    def each(self, x: Tensor, layer: nn.Module) -> Tensor:
        return torch.tanh(layer(x))


class Turned(Layers):
    """Each layer makes a tensor that is not contiguous, and its gradient is not either."""

    def each(self, x: Tensor, layer: nn.Module) -> Tensor:
        return torch.tanh(layer(x)).mT.softmax(1).reshape(x.shape[0], WIDTH, 6).mT


class TurnedInside(Layers):
    """Layers whose gradients of inputs are transposed views."""

    def each(self, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(torch.tanh(x).mT.contiguous().mT + x.mT.contiguous().mT)  # type: ignore[no-any-return]


class Shared(Layers):
    """The first layer makes what all others take, as the first block of T5 does."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(x)
        shared = torch.tanh(x) * 0.3
        for layer in others:
            x = torch.tanh(layer(x + shared)) * shared + x * shared
        return x.square().mean()


class Skipping(Layers):
    """The first layers make what the last ones take, as in a U-Net."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
            kept.append(x.sin())
        x = torch.tanh(self.layers[2](x))
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x)) * kept.pop() + x
        return x.square().mean()


class Partly(Layers):
    """The middle layer is not trained, and the first ones learn nothing of what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = self.each(x.detach() if place == 2 else x, layer)
        return x.square().mean()


class Complex(Layers):
    """Layers whose values at a boundary are complex, and conjugated."""

    def each(self, x: Tensor, layer: nn.Module) -> Tensor:
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else torch.stack([x, x.cos()], -1)
        return torch.view_as_complex(torch.tanh(layer(x.mT)).mT.contiguous()).conj()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.each(x, layer)
        return torch.view_as_real(x.resolve_conj()).square().mean()


def setup_of(build: Any, **more: Any) -> Setup:
    is_language = not (isinstance(build, type) and issubclass(build, Layers))
    return Setup(build=build, dataset=Tokens(padded=True) if is_language else Rows(), **more)


def stage_of(setup: Setup) -> Stage:
    job, sections = setup.job(), range(len(setup.model.sections))
    states = initial_states(setup.model, sections, setup.beginning.parameters, job.buffers)
    return Stage(job, plan_of(setup, 1), 0, states, 0)


def recorded(setup: Setup, stage: Stage, *, joined: bool, keep: int = 0) -> tuple[list[Tape], Tensor]:
    """F and, of what that did not keep, R."""
    examples = Examples(setup.source.micro_batch([0, 1]).tensors, 2)
    _, results, kept, begin = stage.forward({}, examples, 0, 0, keep=keep, joined=joined)
    tapes = stage.record(begin, examples, 0, 0, keep=keep, first=stage.gradient_free, joined=joined)
    return [*tapes, *kept], results[0]


def gradients(setup: Setup, *, joined: bool, keep: int = 0) -> tuple[dict[str, Tensor], Tensor, int]:
    """Those of a micro-batch, its loss, and how many graphs it had."""
    stage = stage_of(setup)
    stage.clear_gradients()
    tapes, loss = recorded(setup, stage, joined=joined, keep=keep)
    graphs = sum(tape.row is None for tape in tapes)
    stage.backward(tapes, {setup.model.sections[-1].makes[0]: torch.full_like(loss, 1.7)}, lambda section: None)
    found = {f"{at} {name}": view for at, each in stage.buckets.items() for name, view in each.views.items()}
    return found, loss, graphs


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "layers": (Layers, {}),
    "layers in bf16": (Layers, {"precision": "bf16"}),
    "turned": (Turned, {}),
    "turned inside": (TurnedInside, {}),
    "shared": (Shared, {}),
    "skipping": (Skipping, {}),
    "partly": (Partly, {}),
    "complex": (Complex, {}),
    "tied": (SmallLanguage, {}),
    "dropout": (Dropping, {"precision": "bf16"}),
    "llama": (tiny_llama, {}),
    "gpt2": (tiny_gpt2, {"precision": "bf16"}),
    "gpt2 with dropout": (dropping, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_sections_in_one_graph_give_the_bits_that_they_give_apart(name: str) -> None:
    build, more = MODELS[name]
    setup = setup_of(build, **more)
    sections = len(setup.model.sections)
    for keep in {0, 1, sections // 2, sections}:
        expected, loss, apart = gradients(setup, joined=False, keep=keep)
        found, same, graphs = gradients(setup, joined=True, keep=keep)
        assert torch.equal(loss, same)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], expected[each]) for each in expected)
        assert any(value.count_nonzero() for value in found.values())
        assert graphs < apart


def test_a_transformer_has_one_graph_and_what_f_kept_has_its_own() -> None:
    setup = setup_of(tiny_llama)
    sections = len(setup.model.sections)
    assert [gradients(setup, joined=True, keep=keep)[2] for keep in (0, 2, sections)] == [1, 2, 1]
    assert gradients(setup, joined=False)[2] == sections


@pytest.mark.parametrize("build", [Shared, Skipping, SmallLanguage])
def test_what_several_sections_take_is_cut_off_from_what_makes_it(build: Any) -> None:
    setup = setup_of(build)
    sections = setup.model.sections
    takers = {name: [each.index for each in sections if name in each.takes] for each in sections for name in each.makes}
    shared = {name for name, taken in takers.items() if len(taken) > 1}
    assert shared
    tapes, _ = recorded(setup, stage_of(setup), joined=True)
    begins = {tape.section.index: tape.begin for tape in tapes}
    for section in sections:
        for name in shared.intersection(section.makes):
            assert all(begins[taker] != begins[section.index] for taker in takers[name])
    assert len(set(begins.values())) < len(sections)


def test_sections_in_one_graph_are_let_go_one_by_one() -> None:
    """Memory is promised for sections one by one: none keeps its values and gradients until all are through."""
    setup = setup_of(Chain)
    stage = stage_of(setup)
    tapes, loss = recorded(setup, stage, joined=True)
    assert sum(value.numel() for tape in tapes[:-1] for value in tape.made) == 0
    seen: list[str] = []

    def note(event: str) -> Callable[[Tensor], None]:
        return lambda gradient: seen.append(event)

    @contextmanager
    def inside(tape: Tape) -> Iterator[None]:
        yield
        seen.append(f"end of {tape.section.index}")

    learning = [section for section in reversed(stage.sections) if stage.buckets[section].names]
    for section in learning:
        for name in stage.buckets[section].names:
            stage.parameters[name].register_hook(note(f"gradient in {section}"))  # type: ignore[no-untyped-call]
    backward(take_row(tapes), {setup.model.sections[-1].makes[0]: torch.ones_like(loss)}, inside)
    ends = [event for event in seen if event.startswith("end")]
    assert ends == [f"end of {section}" for section in reversed(stage.sections)]
    for section in learning:
        count = len(stage.buckets[section].names)
        at = seen.index(f"end of {section}")
        assert seen[at - count : at] == [f"gradient in {section}"] * count


def test_nothing_of_a_backward_is_left() -> None:
    setup = setup_of(Layers)
    stage = stage_of(setup)
    gc.collect()
    gc.disable()
    try:
        tapes, loss = recorded(setup, stage, joined=True)
        left = [weakref.ref(tape.row) for tape in tapes if tape.row is not None]
        stage.backward(tapes, {setup.model.sections[-1].makes[0]: torch.ones_like(loss)}, lambda section: None)
        assert not any(each() for each in left)
    finally:
        gc.enable()


@pytest.mark.parametrize("at", [0, 2, -1])
def test_an_error_in_one_graph_names_the_section(at: int) -> None:
    setup = setup_of(Layers)
    stage = stage_of(setup)
    section = [each for each in stage.sections if stage.buckets[each].names][at]

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("a kernel broke")

    stage.parameters[stage.buckets[section].names[0]].register_hook(fail)  # type: ignore[no-untyped-call]
    tapes, loss = recorded(setup, stage, joined=True)
    with pytest.raises(RuntimeError, match="a kernel broke") as raised:
        stage.backward(tapes, {setup.model.sections[-1].makes[0]: torch.ones_like(loss)}, lambda section: None)
    assert f"in section {section} (" in raised.value.__notes__[0]
    assert stage.sums.counted(section, 0)[0] == 0
