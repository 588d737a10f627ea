"""Primitive parameters of the hardware: what the planner knows beside the model. Independent of P, D and m."""

from pydantic import Field

from varuna.core.value import Value


class Calibration(Value):
    """Compute relative to F, and the network."""

    backward_factor: float = Field(gt=0, description="B = factor x F, recomputation not included")
    link_latency_s: float = Field(ge=0, description="of a message between two stages, seconds")
    link_bytes_per_s: float = Field(gt=0, description="of one directed link")
    allreduce_bytes_per_s: float = Field(
        gt=0, description="ring rate: bytes that a rank sends, 2 (D - 1) / D of its buffer, over the time it takes"
    )
    action_overhead_s: float = Field(ge=0, description="fixed cost of each F, R and B on the host, seconds")


# For 10 Gb/s Ethernet, the paper's setting, until something is measured:
# - B does two products where F does one (Megatron-LM's count of FLOPs: B = 2F).
# - 10 Gb/s are 1.25 GB/s; framing and TCP leave about 1.1. A round of TCP in a data centre and the hand-over
#   between threads take some 0.3 ms.
# - 0.47 GB/s is the all-reduce rate that the paper's own step times imply (reference/varuna-original.md §5).
# - Python and kernel launches cost about 0.5 ms per action, so that tiny micro-batches are not free.
NOMINAL = Calibration(
    backward_factor=2.0,
    link_latency_s=0.0003,
    link_bytes_per_s=1.1e9,
    allreduce_bytes_per_s=0.47e9,
    action_overhead_s=0.0005,
)
