"""A calibration within seconds, by one worker alone: enough to choose m, and to begin with."""

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from varuna.calibration.fit import assemble
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import with_nominal_halves
from varuna.calibration.samples import Measured, SectionSamples
from varuna.calibration.windows import choose_windows, sizes_to_measure
from varuna.data.randomness import seeded
from varuna.engine.device.capacity import device_bytes, device_class, hardware_name, usable_bytes
from varuna.engine.stage.job import Job
from varuna.engine.stage.optimizer import NamedParameters
from varuna.partition.initial.initial_values import InitialParameters
from varuna.timing.compute import Thoroughness, measure_window
from varuna.timing.equal_sections import section_kinds
from varuna.timing.stand_ins import StandIns

LIMIT_S = 8.0
"""Time for all sizes; a size that would take longer is left out."""
_HOST_WORKERS = 4
"""Workers that may share a host's memory: a size that needs more than such a share is not tried."""


def quick_calibration(
    job: Job,
    beginning: InitialParameters,
    batch: Mapping[str, Tensor],
    *,
    global_batch: int,
    limit_s: float = LIMIT_S,
) -> Calibrations:
    """Time F, R and B of all sections at several micro-batch sizes, on stand-ins: nothing of the job changes.

    If the time ends before the best size is known, its ``sized_for`` is 0.

    Neither its parameters nor its optimizer is built, and random numbers are as they were before.

    Args:
        job: the captured job.
        beginning: gives the model's buffers.
        batch: some samples, collated; repeated for larger sizes.
        global_batch: the largest size of interest.
        limit_s: about how long to measure.

    Raises:
        NoPlanError: memory does not hold one example.
    """
    model, device = job.model, job.device
    stand_ins = StandIns(model.shapes, beginning)
    memory_bytes = usable_bytes(device, 1 if device.type == "cuda" else _HOST_WORKERS)
    kinds = section_kinds(model)
    windows = choose_windows(model.facts, kinds, memory_bytes=memory_bytes)
    alone = replace(job, optimizer=_no_optimizer, scheduler=None, memory=replace(job.memory, offload_optimizer=False))
    own_draws = nullcontext() if device.type == "cpu" else torch.random.fork_rng(device_type=device.type)
    sections: list[SectionSamples] = []
    is_cut_short = False
    begin_s = time.monotonic()
    with own_draws, seeded(0, "times"):
        for done, window in enumerate(windows, start=1):
            effort = Thoroughness(
                limit_s / 20,
                least_rounds=3,
                undisturbed=True,
                halves=False,
                updates=False,
                deadline_s=begin_s + limit_s * done / len(windows),
            )
            found = measure_window(
                alone,
                window,
                sizes_to_measure(global_batch, None),
                beginning=stand_ins,
                batch=lambda size: _repeated(batch, size),
                memory_bytes=memory_bytes,
                effort=effort,
            )
            sections += found.sections
            is_cut_short |= found.is_cut_short
    if device.type == "cuda":
        torch.cuda.empty_cache()
    measured = Measured(
        worker=0,
        hardware=hardware_name(device),
        device_class=device_class(device),
        device_bytes=device_bytes(device, 1),
        facts=model.facts,
        kinds=kinds,
        sections=tuple(sections),
        sized_for=0 if is_cut_short else global_batch,
    )
    assembled = assemble([measured], name="captured", created=time.strftime("%Y-%m-%d %H:%M:%S%z"))
    known = assembled if job.compiler is not None else with_nominal_halves(assembled)
    return Calibrations.of_one(known, measured.device_class)


def _no_optimizer(named: NamedParameters) -> torch.optim.Optimizer:
    """In place of the user's, which must not hear of stand-ins."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


def _repeated(batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """``size`` examples: those of the batch, over and over."""
    count = min(len(value) for value in batch.values())
    times = math.ceil(size / count)
    return {name: torch.cat([value[:count]] * times)[:size] for name, value in batch.items()}
