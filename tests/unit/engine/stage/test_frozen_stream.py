"""Frozen parameters that rest in host memory: the same bits, two sections' parameters on the device, and no leak."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import nightly, nightly_rows
from tests.unit.engine.late import WAITING, Late, LateStream, LateStreams
from tests.unit.engine.models import tiny_llama
from tests.unit.engine.ranks import Setup
from varuna.core.errors import DivergedError, UsageError
from varuna.engine.device.host_copies import DONE, Ready, StreamCopies
from varuna.engine.device.mapped_copies import MappedCopies
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.links.traffic import traffic_over
from varuna.engine.stage.frozen_stream import FrozenStream, Pass

pytestmark = [
    pytest.mark.usefixtures("shared_captures"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing"),  # PEFT asks transformers for it
]


class Deep(nn.Module):
    """Layers with adapters beside them; embedding and head are tied and frozen, as all layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(16, 2, bias=False) for _ in self.layers)
        self.up = nn.ModuleList(nn.Linear(2, 16, bias=False) for _ in self.layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embed(input_ids), 0.1)
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + torch.tanh(layer(x) + up(down(x)))
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def adapted_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def adapted_experts() -> nn.Module:
    """Experts run as an operation with a backward of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, **heads))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def streaming(**changes: Any) -> Setup:
    return Setup(**{"build": Deep, "stream": True, **changes})


PLANS = [(1, 1), (2, 2), *nightly_rows((2, 1), (3, 1), (1, 2))]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"policy": "adaptive"},
    "bf16": {"precision": "bf16"},
    "llama": {"build": adapted_llama},
    "experts": {"build": adapted_experts},
    "compiled": {"compiler": Compiler("aot_eager")},
    "offloaded": {"offload": True, "precision": "bf16"},
}


@pytest.mark.parametrize("name", ["plain", "bf16", *nightly("adaptive", "llama", "experts", "compiled", "offloaded")])
@pytest.mark.parametrize(("stages", "replicas"), PLANS)
def test_no_bit_changes(name: str, stages: int, replicas: int) -> None:
    job = streaming(**OPTIONS[name])
    expected = replace(job, stream=False).losses(stages, replicas)
    assert job.losses(stages, replicas) == expected
    assert replace(job, traffic=Late()).losses(stages, replicas) == expected


class Early(StreamCopies):
    """Says that parameters are there when their copy is queued."""

    def overwrite(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready = DONE) -> Ready:
        super().overwrite(pairs, after)
        return DONE


def test_a_wait_that_is_left_out_would_be_seen() -> None:
    early = Late(lambda streams: traffic_over(streams)._replace(frozen=Early(streams)))
    with pytest.raises(DivergedError):
        streaming(traffic=early).losses(1, 1)


def stage_of(setup: Setup) -> Any:
    setup.losses(1, 1, 1)
    assert setup.finished[0].current is not None
    return setup.finished[0].current.stage


def test_two_sections_parameters_are_on_the_device() -> None:
    late = Late()
    stage = stage_of(streaming(traffic=late))
    held = {section: stage.stream.at_work(section, "F") for section in stage.sections}
    memory = {value.untyped_storage().data_ptr() for values in held.values() for value in values.values()}
    assert len(memory) == 2
    assert all(set(values) <= stage.job.model.streamable for values in held.values())


def test_autograd_keeps_no_parameter_of_a_place() -> None:
    """All sections are recorded before the first backward: else their weights would be those of the last ones."""
    stage = stage_of(streaming())
    weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    homes = {section: {"w": weight.detach() * (section + 1)} for section in range(4)}
    stream = FrozenStream(homes, stage.job.traffic.frozen)
    taken = torch.ones(4, requires_grad=True)
    made = []
    for section in homes:
        here = stream.at_work(section, "R")["w"]
        with stream.saving(section):
            made.append(here.t() @ taken)
    for section in reversed(homes):
        [gradient] = torch.autograd.grad(made[section].sum(), taken)
        assert torch.equal(gradient, torch.full((4,), 4.0 * (section + 1)))


def numbered(count: int) -> dict[int, dict[str, Tensor]]:
    return {section: {"w": torch.full((4,), float(section))} for section in range(count)}


def test_sections_are_read_ahead_in_the_order_in_which_they_came_before() -> None:
    """Nothing is copied that is not wanted next."""
    streams, homes = LateStreams(), numbered(4)
    stream = FrozenStream(homes, StreamCopies(streams))
    ways: list[tuple[Pass, Sequence[int]]] = [("F", range(4)), ("R", range(4)), ("B", range(3, -1, -1))]
    copies = []
    for _ in range(3):
        before = streams.copies
        for way, order in ways:
            for section in order:
                assert torch.equal(stream.at_work(section, way)["w"], homes[section]["w"])
        copies.append(streams.copies - before)
    turns = 2 + 4 + 2  # F begins with the sections that B ends with, B with those of R
    assert copies[1:] == [turns, turns]


def test_parameters_are_not_overwritten_while_they_are_at_work() -> None:
    streams, ended, homes = LateStreams(), list[bool](), numbered(3)
    stream = FrozenStream(homes, StreamCopies(streams))
    streams.compute = LateStream()
    first = stream.at_work(0, "F")["w"]
    streams.compute.put(lambda: None if ended else WAITING)
    stream.at_work(1, "F")
    third = stream.at_work(2, "F")["w"]
    arrived = streams.record_event(streams.made[1])
    assert not arrived.passed()
    assert torch.equal(first, homes[0]["w"])
    ended.append(True)
    arrived.wait()
    assert torch.equal(third, homes[2]["w"])


class Own(torch.autograd.Function):
    """Keeps its weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight, None


class Keeping(Deep):
    """One layer's scale is used by a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16), requires_grad=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x: Tensor = Own.apply(self.embed(input_ids), self.scale)  # type: ignore[no-untyped-call]
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + torch.tanh(layer(x) + up(down(x)))
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def test_what_a_function_may_keep_for_itself_stays_on_the_device() -> None:
    job = streaming(build=Keeping)
    assert "scale" not in job.model.streamable
    assert "layers.3.weight" in job.model.streamable
    assert not {"down.0.weight"} & job.model.streamable
    assert job.losses(2, 1) == replace(job, stream=False).losses(2, 1)


def test_a_disk_without_room_is_named() -> None:
    with pytest.raises(UsageError, match="Set TMPDIR to a folder on a larger disk"):
        MappedCopies().arena(1 << 60)


def test_parameters_that_are_at_rest_stay_where_they_are() -> None:
    copies = MappedCopies()
    [once] = copies.at_rest([torch.arange(5.0)])
    [twice] = copies.at_rest([once])
    assert twice.data_ptr() == once.data_ptr()
    assert torch.equal(twice, torch.arange(5.0))
