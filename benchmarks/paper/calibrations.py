"""Writes examples/calibrations/: models of the paper, Llama-3 405B, and adapters, on the machines of ``machines.py``.

python -m benchmarks.paper.calibrations
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.machines import H100, RTX_4090, V100, Machine
from varuna.calibration.file import write_calibration
from varuna.calibration.format import Calibration, Calibrations, ModelIdentity, OptimizerCosts, SectionKind, SectionRun
from varuna.core.model import TiedParameter

FOLDER = Path(__file__).parents[2] / "examples" / "calibrations"
INPUT_SHARE, WEIGHT_SHARE = 0.61, 0.40


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder or encoder: what its costs follow from."""

    name: str
    layers: int
    hidden: int
    sequence: int = 1024
    vocabulary: int = 50304
    feed_forward: int = 0
    """width of the inner layer; 0: 4 x hidden"""
    gated: bool = False
    """three matrices of it, not two"""
    key_value_share: float = 1.0
    """heads of keys and values against heads of queries"""
    queries: int = 0
    """width of all heads of queries; 0: hidden"""
    experts: int = 1
    active_experts: int = 1
    mlp_activations: int = 21
    """bytes per token and unit of the hidden width"""
    adapter_rank: int = 0
    """of adapters of attention's matrices, which alone are trained; 0: all is trained"""
    tied: bool = True

    @property
    def attention_parameters(self) -> int:
        return int(self.hidden * self._queries * (2 + 2 * self.key_value_share)) + 6 * self.hidden

    @property
    def adapter_parameters(self) -> int:
        return int(self.adapter_rank * (4 * self.hidden + 2 * self._queries * (1 + self.key_value_share)))

    @property
    def mlp_parameters(self) -> int:
        return self._mlp_parameters(self.experts)

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        layers = self.layers * (self.attention_parameters + self.mlp_parameters)
        return layers + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def useful_flops(self) -> float:
        """Per example, F and B: 72 L s h^2 (1 + s / 6h) + 6 s h V for GPT-2."""
        return 3 * (self.layers * (self.attention_flops + self.mlp_flops) + self.head_flops)

    @property
    def attention_flops(self) -> float:
        return 2.0 * self.sequence * (self.attention_parameters + 2 * self.sequence * self.hidden)

    @property
    def mlp_flops(self) -> float:
        return 2.0 * self.sequence * self._mlp_parameters(self.active_experts)

    @property
    def head_flops(self) -> float:
        return 2.0 * self.sequence * self.embedding_parameters

    @property
    def _queries(self) -> int:
        return self.queries or self.hidden

    def _mlp_parameters(self, experts: int) -> int:
        inner = self.feed_forward or 4 * self.hidden
        router = self.hidden * self.experts if self.experts > 1 else 0
        return experts * (3 if self.gated else 2) * self.hidden * inner + router + 7 * self.hidden


GPT2 = {
    "2.5b": Transformer(name="gpt2-2.5b", layers=54, hidden=1920),
    "8.3b": Transformer(name="gpt2-8.3b", layers=72, hidden=3072),
    "20b": Transformer(name="gpt2-20b", layers=96, hidden=4096),
    "200b": Transformer(name="gpt2-200b", layers=100, hidden=12960),
}
LLAMA3_405B = Transformer(
    name="llama3-405b",
    layers=126,
    hidden=16384,
    sequence=8192,
    vocabulary=128256,
    feed_forward=53248,
    gated=True,
    key_value_share=1 / 16,
    tied=False,
)
LLAMA3_70B_LORA = Transformer(
    name="llama3.1-70b, LoRA",
    layers=80,
    hidden=8192,
    vocabulary=128256,
    feed_forward=28672,
    gated=True,
    key_value_share=1 / 8,
    adapter_rank=16,
    tied=False,
)
QWEN3_235B_LORA = Transformer(
    name="qwen3-235b-a22b, LoRA",
    layers=94,
    hidden=4096,
    vocabulary=151936,
    feed_forward=1536,
    gated=True,
    key_value_share=1 / 16,
    queries=8192,
    experts=128,
    active_experts=8,
    mlp_activations=50,
    adapter_rank=16,
    tied=False,
)
BERT_LARGE = Transformer(name="bert-large", layers=24, hidden=1024, sequence=512, vocabulary=30522)
BERT_72 = Transformer(name="bert-72", layers=72, hidden=1024, sequence=512, vocabulary=30522)


def calibrate(
    model: Transformer, machine: Machine, *, whole_layers: bool = False, optimizer: OptimizerCosts | None = None
) -> Calibration:
    """A calibration from constants.

    Args:
        model: its costs follow from its shape.
        machine: rates.
        whole_layers: a section for each layer, as in the paper's system, instead of one for each half.
        optimizer: instead of the machine's.
    """
    stream_bytes = 2 * model.sequence * model.hidden  # 16-bit activations of the residual stream
    unit = model.sequence * model.hidden
    half, rated = machine.layer_s / 2, machine.rated_tokens / model.sequence
    attention = {
        "flops": model.attention_flops,
        "fixed_s": half,
        "parameters": model.attention_parameters,
        "activations": 13 * unit,
    }
    mlp = {
        "flops": model.mlp_flops,
        "fixed_s": half,
        "parameters": model.mlp_parameters,
        "activations": model.mlp_activations * unit,
    }
    layer = {key: attention[key] + mlp[key] for key in attention}
    middle = [("layer", layer)] if whole_layers else [("attention", attention), ("mlp", mlp)]
    kinds = {
        "embedding": _kind(
            machine,
            rated,
            flops=0.0,
            fixed_s=half,
            parameters=model.embedding_parameters,
            activations=unit,
            boundary=stream_bytes,
        ),
        **{name: _kind(machine, rated, **figures, boundary=stream_bytes) for name, figures in middle},
        "head": _kind(
            machine,
            rated,
            flops=model.head_flops * machine.head_share,
            fixed_s=half,
            parameters=model.embedding_parameters,
            activations=6 * model.sequence * model.vocabulary + 2 * stream_bytes,
            boundary=0,
        ),
    }
    runs = (
        SectionRun(kinds=("embedding",)),
        SectionRun(kinds=tuple(name for name, _ in middle), count=model.layers),
        SectionRun(kinds=("head",)),
    )
    count = sum(len(run.kinds) * run.count for run in runs)
    weights = TiedParameter(name="embedding", sections=(0, count - 1), size_bytes=2 * model.embedding_parameters)
    return Calibration(
        created="2026-11-22",
        notes=machine.notes,
        hardware=machine.hardware,
        model=ModelIdentity(name=model.name, precision="16-bit, 32-bit master copies"),
        kinds=kinds,
        sections=runs,
        tied=(weights,) if model.tied else (),
        within_vm=machine.within_vm,
        across_vms=machine.across_vms,
        action_s=machine.action_s,
        optimizer=optimizer or machine.optimizer,
        snapshot_bytes_per_s=machine.snapshot_bytes_per_s,
        to_device_bytes_per_s=machine.to_device_bytes_per_s,
    )


def _kind(
    machine: Machine,
    rated: float,
    *,
    flops: float,
    fixed_s: float,
    parameters: float,
    activations: float,
    boundary: int,
) -> SectionKind:
    """F(m) = a + b m, such that the machine's rate holds at the rated m."""
    per_example_s = max(0.0, flops / machine.flops_per_s - fixed_s / rated)
    forward_s = [fixed_s + per_example_s * m for m in machine.micro_batches]
    return SectionKind(
        micro_batches=machine.micro_batches,
        forward_s=tuple(_round(t) for t in forward_s),
        backward_s=tuple(_round(2 * t) for t in forward_s),
        input_s=tuple(_round(2 * t * INPUT_SHARE) for t in forward_s),
        weight_s=tuple(_round(2 * t * WEIGHT_SHARE) for t in forward_s),
        activation_bytes=int(activations),
        boundary_bytes=boundary,
        parameter_bytes=2 * int(parameters),
        trainable_bytes=2 * int(parameters),
        optimizer_bytes=12 * int(parameters),
    )


def adapted(whole: Calibration, model: Transformer) -> Calibration:
    """The calibration of a model of which only adapters of attention's matrices are trained, in fp32, by Adam.

    B is as long as F: it makes gradients of inputs, not of weights.
    """
    own_bytes = {"attention": 4 * model.adapter_parameters}
    kinds = {
        name: kind.model_copy(
            update={
                "gradient_free": name == "embedding",
                "backward_s": kind.forward_s,
                "input_s": (),
                "weight_s": (),
                "parameter_bytes": kind.parameter_bytes + own_bytes.get(name, 0),
                "trainable_bytes": own_bytes.get(name, 0),
                "optimizer_bytes": 2 * own_bytes.get(name, 0),
            }
        )
        for name, kind in whole.kinds.items()
    }
    identity = whole.model.model_copy(update={"precision": "bf16, adapters in fp32"})
    return whole.model_copy(update={"kinds": kinds, "model": identity})


def _round(seconds: float) -> float:
    return float(f"{seconds:.4g}")


# State on the host: 12 bytes per parameter over PCIe 3.0 x16 and back, with Adam on the CPU between: 6 GB/s.
ON_HOST = OptimizerCosts(fixed_s=1.8, host_bytes_per_s=6e9)
_NOTE = "Optimizer state lives in host memory, as in the paper, and crosses PCIe at 6 GB/s each way: an assumption."
# The same over PCIe 5.0 x16, at the rate of snapshots.
ON_HOST_H100 = OptimizerCosts(fixed_s=0.1, host_bytes_per_s=25e9)
_NOTE_H100 = (
    "Optimizer state lives in host memory and crosses PCIe 5.0 at 25 GB/s each way, as snapshots do: an assumption."
)


def shipped() -> dict[str, Calibration]:
    """File name to calibration."""
    found = {f"gpt2-{size}-v100": calibrate(GPT2[size], V100) for size in ("2.5b", "8.3b", "20b")}
    large = calibrate(GPT2["200b"], V100, optimizer=ON_HOST)
    found["gpt2-200b-v100"] = large.model_copy(update={"notes": (*large.notes, _NOTE)})
    found |= {f"gpt2-{size}-h100": calibrate(GPT2[size], H100) for size in ("2.5b", "8.3b", "20b", "200b")}
    largest = calibrate(LLAMA3_405B, H100, optimizer=ON_HOST_H100)
    found["llama3-405b-h100"] = largest.model_copy(update={"notes": (*largest.notes, _NOTE_H100)})
    for name, model in (("llama3.1-70b", LLAMA3_70B_LORA), ("qwen3-235b-a22b", QWEN3_235B_LORA)):
        found[f"{name}-lora-4090"] = adapted(calibrate(model, RTX_4090), model)
    return found


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, calibration in shipped().items():
        write_calibration(Calibrations.of_one(calibration), FOLDER / f"{name}.json")
        print(FOLDER / f"{name}.json")


if __name__ == "__main__":
    main()
