"""The machines of the paper, and one of 2026: constants with their sources."""

from dataclasses import dataclass, replace

from varuna.calibration.format import Hardware, Jitter, Link, NetworkCosts, OptimizerCosts, Ring


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of a GPU and the network around it."""

    hardware: Hardware
    flops_per_s: float
    """of matrix products in micro-batches of ``rated_tokens``, useful work only"""
    rated_tokens: int = 4096
    layer_s: float
    """fixed part of one layer's F, whatever m: launches, small kernels"""
    head_share: float = 1.0
    """time of the language-model head against its FLOPs at that rate"""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    across_vms: NetworkCosts
    within_vm: NetworkCosts | None = None
    action_s: float = 0.0005
    optimizer: OptimizerCosts
    snapshot_bytes_per_s: float
    to_device_bytes_per_s: float | None = None
    notes: tuple[str, ...]


# 16,160 MiB; the price is that of a dedicated NC6s_v3 (3.06 $/h) at the paper's factor of 5.
_V100 = Hardware(
    name="V100-16GB, 10 Gb/s",
    memory_bytes=16_945_000_000,
    reserved_bytes=900_000_000,
    gpus_per_vm=1,
    price_per_hour=0.612,
)

V100 = Machine(
    hardware=_V100,
    flops_per_s=43.6e12,
    layer_s=0.00067,
    head_share=0.74,
    # One connection does not fill the card of 10 Gb/s.
    across_vms=NetworkCosts(
        link=Link(latency_s=0.0003, bytes_per_s=0.255e9, line_bytes_per_s=1.1e9, jitter=Jitter(mean_s=0.005)),
        rings=(Ring(latency_s=0.0003, bytes_per_s=0.47e9),),
    ),
    optimizer=OptimizerCosts(fixed_s=1.8),
    snapshot_bytes_per_s=6e9,
    notes=(
        "Written by benchmarks/paper/calibrations.py from constants; nothing in this file was measured by us.",
        "Compute 43.6 TFLOP/s, head at 0.74 of its FLOPs, all-reduce 0.47 GB/s per ring, link 0.255 GB/s, 1.8 s fixed "
        "per step: one least-squares fit to the 12 step times of the paper's simulator table, micro-batches of 4. It "
        "misses them by 4.5 % on average, 11 % at worst: the paper's rows do not fit one calibration.",
        "Fixed 0.67 ms per layer: the paper says that BERT-large runs 26 % better at m = 8 than at m = 4.",
        "B = 2 F, R = F (matrix products). I = 0.61 B, W = 0.40 B: measured on CPU kernels, deferring linears.",
        "Activations: 34 s h bytes per layer and example (Korthikanti et al. 2022), attention matrices not stored; "
        "head: logits in fp16 and fp32. State: 16 bytes per parameter (2 + 2 gradient + 12 optimizer).",
        "Latency 0.3 ms and jitter 5 ms are assumptions; memory 16,160 MiB, of which 0.9 GB for context and libraries.",
        "Price: 3.06 $/h for a dedicated NC6s_v3, from memory, divided by the paper's factor of 5.",
    ),
)

# 4 GPUs behind one 24 Gb/s card and PCIe 3.0 (NC24rs_v3): four rings share it.
V100_4 = replace(
    V100,
    hardware=_V100.model_copy(update={"name": "4 x V100-16GB, 24 Gb/s", "gpus_per_vm": 4}),
    within_vm=NetworkCosts(
        link=Link(latency_s=0.00005, bytes_per_s=8e9),
        rings=(Ring(in_flight=4, latency_s=0.00005, bytes_per_s=4e9),),
    ),
    across_vms=NetworkCosts(
        link=Link(latency_s=0.0003, bytes_per_s=0.255e9, line_bytes_per_s=2.64e9, jitter=Jitter(mean_s=0.005)),
        rings=(
            Ring(in_flight=1, latency_s=0.0003, bytes_per_s=0.47e9),
            Ring(in_flight=4, latency_s=0.0003, bytes_per_s=0.47e9 * 2.4 / 4),
        ),
    ),
)

# 16 GPUs behind NVSwitch, 8 cards of 200 Gb/s InfiniBand per DGX-2.
DGX2 = replace(
    V100,
    hardware=Hardware(
        name="DGX-2, 16 x V100-32GB, InfiniBand",
        memory_bytes=34_000_000_000,
        reserved_bytes=900_000_000,
        gpus_per_vm=16,
        price_per_hour=3.06,
    ),
    within_vm=NetworkCosts(
        link=Link(latency_s=0.00001, bytes_per_s=100e9),
        rings=(Ring(in_flight=16, latency_s=0.00001, bytes_per_s=60e9),),
    ),
    across_vms=NetworkCosts(
        link=Link(latency_s=0.00002, bytes_per_s=10e9, line_bytes_per_s=160e9),
        rings=(Ring(in_flight=16, latency_s=0.00002, bytes_per_s=5e9),),
    ),
    optimizer=OptimizerCosts(fixed_s=0.5),
)

_ASSUMED = "Rates, prices and links are assumptions for plans on paper: nothing was measured by us."

# Half the peak of 312 TFLOP/s in bf16, as published training runs reach on it; a VM with one GPU and 16 Gb/s.
A100 = replace(
    V100,
    hardware=Hardware(
        name="A100-40GB, 16 Gb/s",
        memory_bytes=42_300_000_000,
        reserved_bytes=1_500_000_000,
        gpus_per_vm=1,
        price_per_hour=1.2,
    ),
    flops_per_s=150e12,
    rated_tokens=8192,
    layer_s=0.0003,
    micro_batches=(1, 2, 4, 8),
    across_vms=NetworkCosts(
        link=Link(latency_s=0.0002, bytes_per_s=1.7e9, jitter=Jitter(mean_s=0.002)),
        rings=(Ring(latency_s=0.0002, bytes_per_s=1.2e9),),
    ),
    optimizer=OptimizerCosts(fixed_s=0.2, bytes_per_s=0.6e12),
    snapshot_bytes_per_s=12e9,
    notes=(_ASSUMED,),
)

# A third of the peak of 65 TFLOP/s in fp16: its memory is slow, and it throttles at 70 W; the network of the V100s.
T4 = replace(
    V100,
    hardware=Hardware(
        name="T4-16GB, 10 Gb/s",
        memory_bytes=15_800_000_000,
        reserved_bytes=900_000_000,
        gpus_per_vm=1,
        price_per_hour=0.16,
    ),
    flops_per_s=20e12,
    optimizer=OptimizerCosts(fixed_s=1.8, bytes_per_s=0.15e12),
    notes=(_ASSUMED,),
)

H100 = Machine(
    hardware=Hardware(
        name="H100-80GB, 40 Gb/s",
        memory_bytes=85_500_000_000,
        reserved_bytes=2_000_000_000,
        gpus_per_vm=1,
        price_per_hour=2.5,
    ),
    flops_per_s=400e12,
    rated_tokens=8192,
    layer_s=0.0002,
    micro_batches=(1, 2, 4, 8),
    across_vms=NetworkCosts(
        link=Link(latency_s=0.0002, bytes_per_s=4.4e9, jitter=Jitter(mean_s=0.002)),
        rings=(Ring(latency_s=0.0002, bytes_per_s=3.5e9),),
    ),
    optimizer=OptimizerCosts(fixed_s=0.1, bytes_per_s=1.2e12),
    snapshot_bytes_per_s=25e9,
    notes=(
        "Written by benchmarks/paper/calibrations.py from constants; nothing in this file was measured by us.",
        "An H100-class spot VM with one GPU and 40 Gb/s Ethernet. Compute 400 TFLOP/s in bf16: 40 % of 989, a usual "
        "share in published training runs. Fixed 0.2 ms per layer, latency 0.2 ms, jitter 2 ms: assumptions.",
        "Link 4.4 GB/s of 5 (framing and TCP, as for 10 Gb/s); rings 3.5 GB/s: assumption.",
        "B = 2 F, R = F (matrix products). I = 0.61 B, W = 0.40 B: measured on CPU kernels, deferring linears.",
        "Activations: 34 s h bytes per layer and example (Korthikanti et al. 2022), attention matrices not stored; "
        "head: logits in bf16 and fp32. State: 16 bytes per parameter (2 + 2 gradient + 12 optimizer).",
        "Optimizer at 1.2 TB/s of 3.35 TB/s HBM; snapshots at 25 GB/s over PCIe 5.0. Price 2.5 $/h: assumption.",
    ),
)

# 24,564 MiB; the cards of one machine cannot write to each other's memory, so messages pass through its host's.
RTX_4090 = Machine(
    hardware=Hardware(
        name="RTX 4090 24GB, 8 in a machine",
        memory_bytes=25_757_000_000,
        reserved_bytes=1_000_000_000,
        gpus_per_vm=8,
        price_per_hour=0.35,
    ),
    flops_per_s=70e12,
    layer_s=0.0003,
    within_vm=NetworkCosts(
        link=Link(latency_s=0.0001, bytes_per_s=8e9), rings=(Ring(latency_s=0.0001, bytes_per_s=5e9),)
    ),
    across_vms=NetworkCosts(
        link=Link(latency_s=0.0003, bytes_per_s=1.1e9, jitter=Jitter(mean_s=0.002)),
        rings=(Ring(latency_s=0.0003, bytes_per_s=0.47e9),),
    ),
    optimizer=OptimizerCosts(fixed_s=0.1, bytes_per_s=0.4e12),
    snapshot_bytes_per_s=12e9,
    to_device_bytes_per_s=20e9,
    notes=(
        "Written by benchmarks/paper/calibrations.py from constants; nothing in this file was measured by us.",
        "Compute 70 TFLOP/s in bf16: 42 % of 165 (sums in fp32). Fixed 0.3 ms per layer. Sequences of 1,024 tokens.",
        "Host memory to a card 20 GB/s of 32 (PCIe 4.0 x16), also while the other cards of the machine copy; between "
        "cards 8 GB/s, through host memory; between machines 10 Gb/s Ethernet. Price 0.35 $/h. All assumptions.",
        "Adapters of rank 16 beside attention's matrices, in fp32 with Adam; all else is frozen, in bf16. R = B = F.",
        "Activations: 34 s h bytes per layer and example, of experts 63 s h; head: logits in bf16 and fp32.",
    ),
)
