"""A small job's sections, saved as P x D ranks would save them."""

from collections.abc import Mapping, Sequence

import torch

from varuna.checkpoint.collector import Collector
from varuna.checkpoint.io.section_state import SectionState
from varuna.checkpoint.io.snapshot import SnapshotBuffer, parts_of
from varuna.checkpoint.io.writer import write_part
from varuna.checkpoint.manifest import Manifest, commit
from varuna.core.model import JobFacts, ModelFacts, SectionFacts
from varuna.core.plan import Pipeline, Plan
from varuna.core.saved import SavedShard
from varuna.engine.device.host_copies import CPU_COPIES
from varuna.process.threads import AbandoningThreadPool
from varuna.store.base import Store

SECTIONS = 5


def make_job(*, sections: int = SECTIONS, state_digest: str = "abc", seed: int = 1, global_batch: int = 8) -> JobFacts:
    section = SectionFacts(
        label="h",
        forward_s=1,
        parameter_bytes=1,
        trainable_bytes=1,
        optimizer_bytes=1,
        activation_bytes=1,
        boundary_bytes=1,
    )
    model = ModelFacts(digest="d", state_digest=state_digest, sections=(section,) * sections)
    return JobFacts(model=model, global_batch=global_batch, seed=seed, steps=100)


def make_plan(stages: int = 1, replicas: int = 1, sections: int = SECTIONS) -> Plan:
    return Plan(
        micro_batch=1,
        global_batch=8,
        pipelines=(
            Pipeline(
                replicas=replicas,
                bounds=(*tuple(stage * sections // stages for stage in range(stages)), sections),
                stash_limits=(1,) * stages,
            ),
        ),
    )


def make_states(step: int = 0, sections: int = SECTIONS) -> dict[int, SectionState]:
    """Odd sizes, several dtypes, a section without anything, a tensor without elements."""
    states = {}
    for section in range(sections):
        draw = torch.Generator().manual_seed(1000 * step + section)
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in () if section == 1 else (("w", (7, 3 + section)), ("b", (5,)), ("none", (0, 4))):
            full = f"h.{section}.{name}"
            tensors[f"parameters/{full}"] = torch.randn(shape, generator=draw)
            tensors[f"optimizer/{full}/exp_avg"] = torch.randn(shape, generator=draw).bfloat16()
            tensors[f"optimizer/{full}/step"] = torch.tensor(float(step))
        tensors[f"buffers/h.{section}.seen"] = torch.tensor(step)
        scalars = {f"optimizer/h.{section}.w/lr": 0.1, f"optimizer/h.{section}.b/odd": float("inf")}
        states[section] = SectionState(section, tensors, dict(scalars))
    return states


def save_parts(
    store: Store,
    step: int,
    plan: Plan,
    generation: int = 0,
    states: Mapping[int, SectionState] | None = None,
    *,
    replicas: Sequence[int] | None = None,
) -> list[SavedShard]:
    """Every rank's own parts, durable; nothing is committed. ``replicas`` that write, default all."""
    states = make_states(step, plan.sections) if states is None else states
    saved = []
    with AbandoningThreadPool(1, "checksums") as beside:
        for stage in range(plan.stages):
            for replica in range(plan.replicas) if replicas is None else replicas:
                held = {section: states[section] for section in plan.first.sections_of(stage)}
                planned = parts_of(
                    list(held.values()),
                    replica=replica,
                    holders=dict.fromkeys(held, range(plan.replicas)),
                    generation=generation,
                    smallest_bytes=16,
                )
                parts, pairs = SnapshotBuffer().place(planned, held, CPU_COPIES.room)
                CPU_COPIES.copy_to_host(pairs)
                for copied in parts:
                    if copied.part.writer == replica:
                        saved.append(write_part(store, step, copied, "0123456789abcdef", beside))
    return saved


def assemble(step: int, plan: Plan, saved: Sequence[SavedShard], generation: int = 0) -> Manifest:
    collector = Collector(make_job(), run_id="run", writer=f"writer{step}")
    collector.begin(generation, plan, first_step=0, rollback=True)
    found = [manifest for shard in saved if (manifest := collector.add(shard)) is not None]
    assert len(found) == 1
    return found[0]


def save(store: Store, step: int, stages: int = 1, replicas: int = 1, generation: int = 0) -> Manifest:
    """A committed checkpoint."""
    plan = make_plan(stages, replicas)
    return commit(store, assemble(step, plan, save_parts(store, step, plan, generation), generation))


def same_states(one: Mapping[int, SectionState], other: Mapping[int, SectionState]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        one[section].scalars == other[section].scalars
        and one[section].tensors.keys() == other[section].tensors.keys()
        and all(_same_bits(value, other[section].tensors[name]) for name, value in one[section].tensors.items())
        for section in one
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )
