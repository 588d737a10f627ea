"""Measure a GPU worker's host memory over the null GPU: ``python -m tests.null_gpu.measuring saves bf16``.

Prints figures as JSON, in bytes unless they are said to be something else.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.null_gpu.counts import counted
from tests.unit.engine.ranks import Setup, connected
from varuna.checkpoint.io.section_state import SectionState, from_bytes, to_bytes
from varuna.core.messages import Assignment, Transfer
from varuna.core.plan import Pipeline, Plan
from varuna.core.precision import Precision
from varuna.engine.copies.memory_checkpoints import MemoryCheckpoints
from varuna.engine.links.traffic import traffic_of
from varuna.engine.stage.cross_stage import StageExchange
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.engine.worker.state_transfer import exchange_states
from varuna.engine.worker.stored import initial_states
from varuna.store.opening import open_store
from varuna.testing.threads import run_all

WIDTH = 300
"""Of the layers: no size is a power of two, nor near below one."""

Figures = dict[str, Any]


class Wide(nn.Module):
    """A language model of 7.4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Frozen(Wide):
    """All but its head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers.requires_grad_(False)


def saves(precision: Precision) -> Figures:
    """Before the first step and after one."""
    stage = _stage(Setup(Wide, device="cuda:0", precision=precision))
    assignment = Assignment(generation=0, plan=stage.plan, rank=0, members=1, next_step=0, fresh=True)
    saver = Snapshotter(open_store("memory://measured"), 1, lambda shard: None)
    saver.begin(stage, assignment)
    saver.flush()
    reserved = counted().pinned_bytes
    _update(stage)
    saver.save(stage, assignment)
    saver.flush()
    states = [stage.state_of(section, owned_only=True) for section in stage.sections]
    copied = sum(value.nbytes for state in states for value in state.tensors.values())
    return {"copied": copied, "reserved": reserved, "pinned": counted().peak_pinned_bytes}


def keeps(precision: Precision) -> Figures:
    """Memory checkpoints of five steps, of which the newest and the one before it are kept."""
    stage, memory = _stage(Setup(Wide, device="cuda:0", precision=precision)), MemoryCheckpoints()
    _update(stage)
    before, states = counted().pageable_reads, {section: stage.state_of(section) for section in stage.sections}
    for step in range(1, 6):
        made = memory.make(0, step, states, stage.job.traffic.saves, None)
        assert made is not None
        made.copied.wait()
        memory.complete_own(0, step)
        if step > 1:
            memory.note_everywhere(0, step - 1)
    copied = sum(value.nbytes for state in states.values() for value in state.tensors.values())
    found = counted()
    return {"copied": copied, "pinned": found.peak_pinned_bytes, "pageable reads": found.pageable_reads - before}


def offload(precision: Precision) -> Figures:
    """State in host memory, after an update and after another stage has taken it over."""
    setup = Setup(Wide, device="cuda:0", precision=precision, offload=True)
    stage = _stage(setup)
    _update(stage)
    pinned = counted().pinned_bytes
    states = [stage.state_of(each) for each in stage.sections]
    held = sum(v.nbytes for state in states for v in state.tensors.values() if v.device.type == "cpu" and v.dim())
    state = {each.section: from_bytes(to_bytes(each)) for each in states}
    plan = stage.plan
    del stage, states
    stage = Stage(setup.job(), plan, 0, state, 1)
    taken_over = counted().pinned_bytes
    del stage, state
    return {"held": held, "pinned": pinned, "taken_over": taken_over, "left": counted().pinned_bytes}


def streams(precision: Precision) -> Figures:
    """Frozen parameters in host memory, and what the device holds beside them."""
    stage = _stage(Setup(Frozen, device="cuda:0", precision=precision, stream=True))
    held = sum(value.nbytes for value in stage.parameters.values() if value.device.type == "cpu")
    figures = {"held": held, "pinned": counted().pinned_bytes, "device": torch.cuda.memory_allocated()}
    del stage
    return {**figures, "left": counted().pinned_bytes}


def moves() -> Figures:
    """State of 200 MB from a GPU to another rank."""
    held = {each: SectionState(each, {"parameters/w": torch.ones(25_000_000, device="cuda:0")}) for each in range(2)}
    transfers = [Transfer(section=each, source_rank=0, target_rank=1) for each in held]
    groups, copies, before = connected(2), traffic_of(torch.device("cuda:0")).state, counted().pageable_reads

    def work(rank: int) -> None:
        exchange_states(groups[rank], transfers, rank, {} if rank else held, copies=copies)

    run_all([partial(work, rank) for rank in range(2)])
    return {"pinned": counted().peak_pinned_bytes, "pageable reads": counted().pageable_reads - before}


def segments(*before: str) -> Figures:
    """Whether each segment of device memory grows, once a worker has its streams; a script was ``before`` on some."""
    small = [torch.empty(10, device=device) for device in before]
    del small  # it is in torch's cache now
    traffic_of(torch.device("cuda:0"))
    used = torch.empty(10_000_000, device="cuda:0")
    snapshot: Callable[[], list[dict[str, Any]]] = torch.cuda.memory_snapshot
    return {"grow": [each["is_expandable"] for each in snapshot()], "used": used.nbytes}


def others() -> Figures:
    """Return the bytes that a worker takes for memory of others, first and when a script was on the GPU before."""
    first = traffic_of(torch.device("cuda:0")).streams
    used = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda:0")
    then = traffic_of(torch.device("cuda:0")).streams
    assert first is not None
    assert then is not None
    facts = [each.memory() for each in (first, then)]
    return {"others": [each and each.others_bytes for each in facts], "used": used.nbytes}


def _stage(setup: Setup) -> Stage:
    sections = len(setup.model.sections)
    plan = Plan(
        micro_batch=setup.micro_batch or 1,
        global_batch=setup.global_batch,
        pipelines=(Pipeline(bounds=(0, sections), stash_limits=(1,)),),
        streams_frozen=setup.stream,
    )
    job = setup.job()
    states = initial_states(setup.model, range(sections), setup.beginning.parameters, job.buffers)
    return Stage(job, plan, 0, states, 0)


def _update(stage: Stage) -> None:
    stage.apply_tentatively(1.0, StageExchange(lambda row: row.view(1, -1), stage.owned))


def measured(*case: str, **settings: str) -> Figures:
    """Measure a case in a process of its own, over the null GPU that this one has."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.null_gpu.measuring", *case],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return cast(Figures, json.loads(done.stdout.splitlines()[-1])) | {"said": done.stderr}


CASES: dict[str, Callable[..., Figures]] = {
    "saves": saves,
    "keeps": keeps,
    "offload": offload,
    "streams": streams,
    "moves": moves,
    "segments": segments,
    "others": others,
}

if __name__ == "__main__":
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is an empty library here
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))
