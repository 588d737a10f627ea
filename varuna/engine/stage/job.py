"""A job as the engine needs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from varuna.core.model import Memory
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.graphs.split_backward_check import Halves
from varuna.engine.links.traffic import TransferPaths
from varuna.engine.stage.optimizer import BeforeStep, OptimizerFactory, SchedulerFactory
from varuna.partition.after_step import AfterStep
from varuna.partition.model import PartitionedModel
from varuna.partition.parameter_marks import ParameterMarks

Frozen = Callable[[str, int], bool]
"""``fn(name, step)``: whether the step leaves a parameter of the model as it is"""


@dataclass(frozen=True)
class Job:
    """The user's choices, as the engine needs them: equal on all ranks and in all generations."""

    model: PartitionedModel
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None
    seed: int
    clip_grad_norm: float | None
    before_step: BeforeStep | None
    buffers: Mapping[str, Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    """of computation and of what crosses links; sums of gradients, optimizer state and parameters are fp32"""
    unit: float = 1.0
    """fp16 only: a power of two near the weight of a global batch, by which seeds of B are divided"""
    bf16_reduction: bool = False
    """gradients cross between replicas as bf16"""
    halves: Halves = field(default_factory=Halves)
    compiler: Compiler | None = None
    """of sections in training; evaluation runs them as captured"""
    memory: Memory = field(default_factory=Memory)
    """home of optimizer state, and of fp32 parameters unless sections compute with them"""
    traffic: TransferPaths = field(default_factory=TransferPaths)
    """between the device and host memory"""
    marks: ParameterMarks = field(default_factory=dict)
    """attributes of parameters that the user's functions see"""
    after_step: AfterStep | None = None
    """runs after each step; ``model.following`` says on what"""
    frozen: Frozen | None = None
    """trained parameters that have no gradient in a step"""
    stops_at_nan: bool = True
    """a step whose loss or gradients are not finite is not applied, and ends the run"""

    is_steered: bool = False
    """the training loop may write options of the optimizer's groups, so every rank has all groups"""

    @property
    def masters_away(self) -> bool:
        """Parameters that the optimizer updates live in host memory; copies of them are on the device."""
        return self.memory.offload_optimizer and self.dtype is not torch.float32

    @property
    def sums_outlast(self) -> bool:
        """Whether sums of gradients may outlast the loss of a worker, so that only what is missing runs again.

        Not where a micro-batch leaves more than gradients, a loss and statistics for buffers: counts of the whole
        batch, which all begin with, and truths of branches, which are compared when all have run. Nor where a section
        updates buffers and trains nothing: its statistics would go with no sum.
        """
        sections = [section for graph in self.model.graphs for section in graph.sections]
        trains = self.model.trainable
        alone = any(each.updates and trains.isdisjoint(each.parameters) for each in sections)
        return self.model.whole is None and not alone and not any(each.truths for each in sections)
