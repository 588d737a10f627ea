"""A quantized base that is not trained, under adapters that are: as in plain PyTorch, on every plan."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import varuna
from tests.depth import by_depth
from tests.unit.engine.models import Tokens
from tests.unit.engine.ranks import single_threaded
from varuna.core.errors import ModelError, UsageError
from varuna.data import sample_index
from varuna.data.randomness import generator_lock
from varuna.testing import fail_at, run

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, STEPS, BATCH = 64, 4, 8


class Int8(Tensor):
    """A weight as torchao makes it: codes and scales that look like one tensor, with a product of their own."""

    codes: Tensor
    scales: Tensor
    _products: ClassVar[set[Any]] = {nn.functional.linear}

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> "Int8":
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)
        made.codes, made.scales = codes, scales
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "Int8":
        return Int8(inner["codes"], inner["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls._products:
            x, weight, bias = (*args, None)[:3]
            return nn.functional.linear(x, weight.codes.to(x.dtype), bias) * weight.scales
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Int8(args[0].codes, args[0].scales)
        raise NotImplementedError(f"{func} of an Int8")


class Layer(nn.Module):
    """A layer that stays as it is, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 64).requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def ours(model: Any) -> None:
    for layer in model.layers:
        weight = layer.base.weight
        scales = weight.abs().amax(1) / 127
        layer.base.weight = nn.Parameter(Int8((weight / scales[:, None]).round().to(torch.int8), scales), False)


def torchaos(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="optional: pip install torchao")
    for layer in model.layers:
        quantization.quantize_(nn.Sequential(layer.base), quantization.Int8WeightOnlyConfig())


def torchaos_4_bits(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="optional: pip install torchao")
    granularity = quantization.granularity.PerGroup(16)
    config = quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        granularity=granularity,
    )
    for layer in model.layers:
        quantization.quantize_(nn.Sequential(layer.base), config)


def bitsandbytes_4_bits(model: Any) -> None:
    made = pytest.importorskip("bitsandbytes.nn", reason="optional: pip install bitsandbytes")
    for layer in model.layers:
        weight = made.Params4bit(
            layer.base.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        layer.base = made.LinearNF4(WIDTH, WIDTH, bias=False)
        layer.base.weight = weight
        layer.base.to("cpu")


Quantize = Callable[[Any], None]
KINDS: list[Quantize] = [ours, torchaos, torchaos_4_bits, bitsandbytes_4_bits]


def built(quantize: Quantize) -> nn.Module:
    with generator_lock:
        torch.manual_seed(0)
        model = Adapted()
        quantize(model)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def plain(model: nn.Module) -> list[float]:
    optimizer, data, found = adamw(model), Tokens(size=16), []
    for step in range(STEPS):
        samples = [data[sample_index(step * BATCH + i, size=16, seed=0)] for i in range(BATCH)]
        loss = model(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def trainer(model: nn.Module, **options: Any) -> varuna.Trainer:
    return varuna.Trainer(model, Tokens(size=16), adamw(model), BATCH, micro_batch=2, device="cpu", **options)


@pytest.mark.nightly
@pytest.mark.parametrize("quantize", by_depth(KINDS[:1], KINDS))
def test_it_trains_as_in_plain_pytorch_with_stages_replicas_and_a_lost_worker(quantize: Quantize) -> None:
    def script() -> Tensor:
        model = built(quantize)
        for _ in trainer(model).steps(STEPS):
            pass
        return model(**{key: value[None] for key, value in Tokens()[0].items()}).detach()  # type: ignore[no-any-return]

    with single_threaded():
        alone = built(quantize)
        expected = plain(alone)
        lived = run(script, workers=4, stages={4: 2, 3: 3}, faults=[fail_at(rank=1, step=2)])
        afterwards = alone(**{key: value[None] for key, value in Tokens()[0].items()})
    assert lived.plans == ("2x2", "3x1")
    assert lived.losses == pytest.approx(expected, rel=1e-6)
    assert [found.item() for found in lived.returned.values()] == pytest.approx([afterwards.item()] * 3, rel=1e-6)


@pytest.mark.nightly
def test_sizes_and_checkpoints_are_those_of_packed_numbers_and_of_adapters(tmp_path: Path) -> None:
    model = built(ours)
    made = trainer(model, checkpoints=varuna.Checkpoints(tmp_path, every=2, frozen=False))
    losses = {step.index: step.loss for step in made.steps(2)}
    model_facts = made._spec.partitioned
    assert made._spec.beginning().stored == model_facts.shapes.keys()  # which a morph then does not send
    facts = model_facts.facts.sections
    adapters, rest = 4 * 3 * 2 * 2 * WIDTH, 4 * (2 * 64 * WIDTH + 64)
    assert sum(each.parameter_bytes for each in facts) == 3 * (WIDTH * WIDTH + 4 * WIDTH) + adapters + rest
    [shards] = {sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))}
    assert 3 * adapters < shards < 3 * adapters + 20_000
    resumed = trainer(built(ours), checkpoints=varuna.Checkpoints(tmp_path, every=2, frozen=False))
    losses |= {step.index: step.loss for step in resumed.steps(STEPS)}  # the newest step of a checkpoint comes again
    assert list(losses.values()) == pytest.approx(plain(built(ours)), rel=1e-6)
    with pytest.raises(UsageError, match="would round the scales of a quantized base"):
        trainer(built(ours), precision="bf16")


def test_a_function_that_quantizes_is_told_to_pass_what_it_builds() -> None:
    made = varuna.Trainer(lambda: built(ours), Tokens(size=16), lambda named: adamw(nn.ModuleDict()), BATCH)
    with pytest.raises(ModelError, match=r"builds a quantized model .*Pass the model that is built"):
        next(iter(made.steps(1)))


def test_what_cannot_be_trained_is_refused_in_words() -> None:
    made = pytest.importorskip("bitsandbytes.nn", reason="optional: pip install bitsandbytes")
    model: Any = built(bitsandbytes_4_bits)
    mixed = copy.deepcopy(model)
    mixed.layers[1].base.compute_dtype = torch.bfloat16
    with pytest.raises(ModelError, match=r"layers\.1.base was quantized from float32 and computes in bfloat16"):
        trainer(mixed)
    model.layers[0].base = made.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False).to("cpu")
    with pytest.raises(ModelError, match=r"Linear8bitLt of bitsandbytes.*torchao \(Int8WeightOnlyConfig\)"):
        trainer(model)


@pytest.mark.nightly
def test_optimizers_with_state_in_8_bits(tmp_path: Path) -> None:
    """Those of bitsandbytes move and are saved; those of torchao are refused."""
    optim = pytest.importorskip("bitsandbytes.optim", reason="optional: pip install bitsandbytes")

    def eight_bits(named: Any) -> Any:
        return optim.AdamW8bit([each for _, each in named], lr=1e-2)

    def wide() -> nn.Module:
        return Adapted().requires_grad_(True)

    def script(steps: int = STEPS, place: Path | None = None) -> list[float]:
        saved = None if place is None else varuna.Checkpoints(place, every=1)
        made = varuna.Trainer(wide, Tokens(size=16), eight_bits, BATCH, micro_batch=2, device="cpu", checkpoints=saved)
        return [step.loss for step in made.steps(steps)]

    with single_threaded():
        alone = script()
        lived = run(script, workers=4, stages={4: 2, 3: 3}, faults=[fail_at(rank=1, step=2)])
        assert script(2, tmp_path) + script(STEPS, tmp_path) == alone
    assert lived.losses == pytest.approx(alone, rel=1e-4)
    theirs = pytest.importorskip("torchao.optim", reason="optional: pip install torchao")
    with pytest.raises(UsageError, match=r"AdamW8bit of torchao.*bitsandbytes.optim.AdamW8bit"):
        next(varuna.Trainer(wide, Tokens(), lambda n: theirs.AdamW8bit([p for _, p in n]), BATCH).steps(1))
