"""One measuring worker: ``python -m varuna.measure OUTPUT SCRIPT [ARGS]``; see ``varuna calibrate``.

Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them, and VARUNA_INTERFACE, as workers do.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from varuna.calibration.cache import cache_file
from varuna.calibration.samples import Measured, PilotSamples, SectionSamples
from varuna.calibration.windows import choose_windows, sizes_to_measure, window_bytes
from varuna.core.errors import VarunaError
from varuna.core.model import ModelFacts
from varuna.core.plan import Plan
from varuna.engine.base.compute_process import configure_process
from varuna.engine.base.transport import connect_store, prefixed
from varuna.engine.device.capacity import device_bytes, device_class, hardware_name, usable_bytes
from varuna.engine.links.traffic import TransferPaths
from varuna.engine.worker.session import Session
from varuna.job.script_runner import take_job
from varuna.job.spec import JobSpec
from varuna.job.start import engine_job, job_facts, open_session
from varuna.measure.collect import FAILED, PHASE
from varuna.measure.network import Peers
from varuna.measure.pilot import PilotTimes, pilot_plan, pilot_steps, run_pilot
from varuna.membership.static import StaticMembership, World
from varuna.partition.initial.constructor import needed_buffers
from varuna.partition.on_device import on_device
from varuna.process.threads import join_all
from varuna.timing.compute import Thoroughness, measure_window
from varuna.timing.equal_sections import section_kinds
from varuna.timing.stand_ins import StandIns

_HOST = os.environ.get("VARUNA_INTERFACE", "127.0.0.1")
_MOST_MESSAGE_BYTES = 64 * 2**20
_SMALL_BYTES = 64
_EXIT_BOUND_S = 5.0
_SIZE_S, _SIZES_S = 0.4, 10.0
"""Seconds for the rounds of one micro-batch size, and after which no further size is begun."""


def measure(spec: JobSpec, peers: Peers, store: Any, tell: Callable[[str], None] = lambda phase: None) -> Measured:
    """Measure everything that this worker can, and ``tell`` what comes next.

    Raises:
        VarunaError: the model cannot be captured, or a section does not fit.
    """
    configure_process(spec.device)
    tell("capturing the model")
    model = spec.partitioned
    facts, kinds = model.facts, section_kinds(model)
    beginning = StandIns(model.shapes, spec.beginning())
    buffers = beginning.buffers(needed) if (needed := needed_buffers(model)) else {}
    moved = on_device(model, spec.device)
    job = engine_job(spec, moved, buffers)
    job = replace(job, memory=replace(spec.memory, offload_optimizer=False))  # the planner adds what streaming takes
    memory_bytes = least_memory(usable_bytes(spec.device, peers.size), peers)
    windows = choose_windows(facts, kinds, memory_bytes=memory_bytes)
    whole = len(windows) == 1
    sizes = sizes_to_measure(spec.global_batch, spec.fixed_micro_batch)
    peers.meet()
    tell(f"timing {len(facts.sections)} sections, at micro-batches of {sizes[0]} to at most {sizes[-1]}")
    # One that was asked for is measured, however slow this machine is.
    most_s = _SIZES_S if spec.fixed_micro_batch is None else math.inf
    effort = Thoroughness(_SIZE_S, deadline_s=time.monotonic() + most_s)
    computed = [
        measure_window(
            job,
            window,
            sizes,
            beginning=beginning,
            batch=spec.batch,
            memory_bytes=memory_bytes,
            agree=peers.agree if whole else float,
            effort=effort,
        )
        for window in (windows if whole else windows[peers.rank :: peers.size])
    ]
    sections = [sample for each in computed for sample in each.sections]
    peers.meet()
    largest = int(peers.agree(max((sample.micro_batch for sample in sections), default=0)))
    sent_bytes = _message_bytes(facts, largest)
    if peers.size > 1:
        tell("timing messages and all-reduces")
    messages = peers.messages(sent_bytes, TransferPaths())
    staged = peers.messages(sent_bytes, job.traffic) if job.traffic.streams is not None else ()
    line = peers.line([sent_bytes[0], sent_bytes[-1]])
    rings = peers.rings(_gradient_bytes(facts), job.traffic.sums)
    pilots: list[PilotSamples] = []
    if whole:
        micro_batch, times = rehearsed_size(sections, spec.fixed_micro_batch, peers.agree)

        def rehearse(world: World, plan: Plan) -> PilotSamples | None:
            def open_steps(n: int, membership: StaticMembership) -> Session:
                return open_session(spec, n, membership, beginning=beginning, global_batch=plan.global_batch)

            count = pilot_steps(times, plan)
            tell(f"running {count} real steps{', as a pipeline' if world.size > 1 else ', each worker alone'}")
            return run_pilot(open_steps, world, plan, facts, count)

        pilots = _pilots(rehearse, peers, store, facts, micro_batch, times, memory_bytes)
    return Measured(
        worker=peers.rank,
        hardware=hardware_name(spec.device),
        device_class=device_class(spec.device),
        device_bytes=device_bytes(spec.device, peers.size),
        facts=facts,
        kinds=kinds,
        cache=str(cache_file(job_facts(spec, 1), device_class(spec.device))),
        sized_for=spec.global_batch if spec.fixed_micro_batch is None else 0,
        sections=tuple(sections),
        updates=tuple(sample for each in computed for sample in each.updates),
        snapshots=tuple(sample for each in computed for sample in each.snapshots),
        arrivals=tuple(sample for each in computed for sample in each.arrivals),
        messages=messages,
        line=line,
        staged=staged,
        rings=rings,
        pilots=tuple(pilots),
    )


def _pilots(
    rehearse: Callable[[World, Plan], PilotSamples | None],
    peers: Peers,
    store: Any,
    facts: ModelFacts,
    micro_batch: int,
    times: Sequence[PilotTimes],
    memory_bytes: int | None,
) -> list[PilotSamples]:
    """Real steps of every worker alone, all at once; then of one pipeline over all of them.

    All must make the same plan, so its inputs have been agreed on.
    """
    found: list[PilotSamples] = []
    alone = World(0, 1, prefixed(f"calibrate/alone{peers.rank}", store), _HOST, 0)
    together = World(peers.rank, peers.size, prefixed("calibrate/together", store), _HOST, 0)
    for world in (alone, together)[: min(2, peers.size)]:
        plan = pilot_plan(times, workers=world.size, micro_batch=micro_batch)
        spans = [plan.first.sections_of(stage) for stage in range(plan.stages)]
        need = max(window_bytes(facts, span, micro_batch) for span in spans)
        if memory_bytes is None or 2 * need <= memory_bytes:  # a copy in the first step
            peers.meet()
            pilot = rehearse(world, plan)
            found += [pilot] if pilot is not None else []
    return found


def least_memory(memory_bytes: int | None, peers: Peers) -> int | None:
    """The least memory of all workers: what is measured depends on it, and must be the same everywhere."""
    found = peers.agree(0.0 if memory_bytes is None else 1.0)
    least = -peers.agree(-float("inf") if memory_bytes is None else -float(memory_bytes))
    return int(least) if found else None


def rehearsed_size(
    sections: Sequence[SectionSamples], given: int | None, agree: Callable[[float], float]
) -> tuple[int, list[PilotTimes]]:
    """The size that a run would take, the one that is best per example if none is given, and its sections' times.

    One that is given, but does not fit into memory, is replaced by the largest that does: the planner will say so.

    Args:
        sections: what was measured, of the same sizes on all workers.
        given: m, if the user fixed it.
        agree: the largest of all workers' values: times are those of the slowest, so that all find the same.
    """
    times = {
        size: [
            PilotTimes(*(agree(median(each)) for each in (sample.forward_s, sample.recompute_s, sample.backward_s)))
            for sample in sections
            if sample.micro_batch == size
        ]
        for size in dict.fromkeys(sample.micro_batch for sample in sections)
    }
    best = min(times, key=lambda size: sum(map(sum, times[size])) / size)
    size = best if given is None else given if given in times else max(times)
    return size, times[size]


def _message_bytes(facts: ModelFacts, micro_batch: int) -> list[int]:
    """Sizes between a bare message and the largest that crosses a cut at the largest m measured."""
    largest = max(each.boundary_bytes for each in facts.sections) * micro_batch
    largest = min(max(largest, 2**16), _MOST_MESSAGE_BYTES)
    return [_SMALL_BYTES, largest // 4, largest]


def _gradient_bytes(facts: ModelFacts) -> list[int]:
    """Sizes around those of one section's gradients, which are reduced as a whole."""
    largest = min(max(2**16, *(each.trainable_bytes for each in facts.sections)), _MOST_MESSAGE_BYTES)
    return [_SMALL_BYTES, largest // 4, largest]


def main(argv: Sequence[str]) -> int:
    """Measure, write a ``Measured`` to the output file, or the error next to it; returns the exit code."""
    output, script, args = Path(argv[0]), Path(argv[1]), argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        spec = take_job(script, args).spec
        store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

        def tell(phase: str) -> None:
            output.with_suffix(PHASE).write_text(phase)

        measured = measure(spec, Peers(store, rank, size, _HOST), store, tell)
    except VarunaError as error:
        output.with_suffix(FAILED).write_text(json.dumps({"error": str(error), "kind": type(error).__name__}))
        return error.exit_code
    whole = output.with_suffix(".part")
    whole.write_text(measured.model_dump_json())
    whole.replace(output)  # the command goes on at once: Python and torch take a second or two to end
    join_all(_EXIT_BOUND_S)
    return 0
