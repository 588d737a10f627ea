"""Measure a checkpoint's cost: the stall of the training thread, the speed of writing, bytes read back, host memory.

Everything is measured side by side with `torch.distributed.checkpoint` and with plain files, in interleaved rounds on
the same directory and the same bytes; figures are ratios of medians. Run:

    python benchmarks/checkpoint_stall.py --mib 512 --rounds 7 --directory /tmp
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.distributed.checkpoint as checkpoint

from varuna.checkpoint.collector import Collector
from varuna.checkpoint.io.restore import everything, read_states
from varuna.checkpoint.io.section_state import SectionState
from varuna.checkpoint.io.snapshot import SnapshotBuffer, needed_bytes, parts_of
from varuna.checkpoint.io.writer import BackgroundWriter
from varuna.checkpoint.manifest import Manifest, commit
from varuna.core.model import JobFacts, ModelFacts, SectionFacts
from varuna.core.plan import Pipeline, Plan
from varuna.core.saved import SavedShard
from varuna.engine.device.host_copies import CPU_COPIES
from varuna.store.folder import FolderStore

SECTIONS = 8
dist: Any = distributed  # they export these names at run time only
dcp: Any = checkpoint


def make_states(mib: int) -> dict[int, SectionState]:
    """Parameters and AdamW's two sums, as a run holds them."""
    elements = mib * 2**20 // 4 // SECTIONS // 3 // 2
    return {
        section: SectionState(
            section,
            {
                f"{kind}{section}.{name}{tail}": torch.randn(elements)
                for name in ("a", "b")
                for kind, tail in (("parameters/", ""), ("optimizer/", "/exp_avg"), ("optimizer/", "/exp_avg_sq"))
            },
        )
        for section in range(SECTIONS)
    }


def timed(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


class Ours:
    """The path of a rank's save: snapshot on this thread, shards on the writer's."""

    def __init__(self, states: dict[int, SectionState], root: Path) -> None:
        self.states, self.store, self.saved = states, FolderStore(root), list[SavedShard]()
        self.buffer = SnapshotBuffer()
        self.buffer.reserve(needed_bytes(self.parts()), CPU_COPIES.room)  # at the start of a run, in the background
        self.writer = BackgroundWriter(self.store, on_saved=self.saved.append, on_error=_fail)

    def parts(self) -> Any:
        return parts_of(list(self.states.values()), replica=0, holders=dict.fromkeys(self.states, (0,)), generation=0)

    def save(self, step: int) -> tuple[float, float]:
        """Seconds of stall, and from there until all shards are durable."""
        self.saved.clear()
        begin_s = time.perf_counter()
        parts, pairs = self.buffer.place(self.parts(), self.states, CPU_COPIES.room)
        copied = CPU_COPIES.copy_to_host(pairs)
        stalled_s = time.perf_counter()
        self.writer.submit(step, parts, copied.wait)
        assert self.writer.flush(600)
        return stalled_s - begin_s, time.perf_counter() - stalled_s

    def commit(self, step: int) -> Manifest:
        section = SectionFacts(
            label="s", forward_s=1, parameter_bytes=1, trainable_bytes=1, optimizer_bytes=1, activation_bytes=1,
            boundary_bytes=1,
        )  # fmt: skip
        job = JobFacts(model=ModelFacts(digest="d", sections=(section,) * SECTIONS), global_batch=8, seed=0, steps=9)
        plan = Plan(micro_batch=1, global_batch=8, pipelines=(Pipeline(bounds=(0, SECTIONS), stash_limits=(1,)),))
        collector = Collector(job, run_id="r", writer="w")
        collector.begin(0, plan, first_step=0, rollback=True)
        [manifest] = [found for shard in self.saved if (found := collector.add(shard)) is not None]
        return commit(self.store, manifest)


class CountingStore(FolderStore):
    """Counts what is read."""

    read_bytes = 0

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        self.read_bytes += len(view)
        super().read_into(name, start, view)


def write_plainly(states: dict[int, SectionState], folder: Path) -> None:
    """A file per section, written and synchronised: what the disk gives at best."""
    folder.mkdir(parents=True)
    for section, state in states.items():
        with (folder / f"{section}").open("wb", buffering=0) as file:
            for value in state.tensors.values():
                view = value.numpy().data.cast("B")
                while len(view):
                    view = view[os.write(file.fileno(), view[: 8 * 2**20]) :]
            os.fsync(file.fileno())


def save_async(flat: dict[str, torch.Tensor], folder: Path) -> float:
    """The blocking part; the rest is waited for outside of the clock."""
    begin_s = time.perf_counter()
    future: Any = dcp.async_save(flat, checkpoint_id=str(folder))
    blocked_s = time.perf_counter() - begin_s
    future.result()
    return blocked_s


def _fail(error: Exception) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    states = make_states(args.mib)
    flat = {name: value for state in states.values() for name, value in state.tensors.items()}
    state_bytes = sum(value.nbytes for value in flat.values())
    root = Path(tempfile.mkdtemp(prefix="varuna-stall-", dir=args.directory))
    found: dict[str, list[float]] = {name: [] for name in ("stall", "write", "plain", "sync", "async")}
    try:
        ours = Ours(states, root / "ours")
        for step in range(args.rounds + 1):
            stall_s, write_s = ours.save(step)
            if step == args.rounds:
                break  # its shards are read below
            measured = {
                "stall": stall_s,
                "write": write_s,
                "plain": timed(partial(write_plainly, states, root / f"plain{step}")),
                "sync": timed(partial(dcp.save, flat, checkpoint_id=str(root / f"sync{step}"))),
                "async": save_async(flat, root / f"async{step}"),
            }
            for name, seconds in measured.items():
                if step:  # the first touches memory and warms up both sides
                    found[name].append(seconds)
            for name in ("plain", "sync", "async"):
                shutil.rmtree(root / f"{name}{step}")
            ours.store.remove_folder(f"step-{step:08d}")
        counting = CountingStore(root / "ours")
        half = range(SECTIONS // 2)
        read_states(counting, ours.commit(args.rounds), dict.fromkeys(half, everything))
        own_bytes = sum(value.nbytes for section in half for value in states[section].tensors.values())
    finally:
        shutil.rmtree(root)
        dist.destroy_process_group()
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, seconds in medians.items():
        low, high = min(found[name]), max(found[name])
        print(f"{name:6} {seconds * 1e3:7.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})")
    ratios = (
        ("stall / sync save of torch.distributed.checkpoint", medians["stall"] / medians["sync"], 0.12),
        ("stall / blocking part of its async_save", medians["stall"] / medians["async"], 1.0),
        ("speed of writing / plain files with fsync", medians["plain"] / medians["write"], 0.9),
        ("bytes read back by one of two stages / its own", counting.read_bytes / own_bytes, 1.05),
        ("host memory for snapshots / state of the rank", ours.buffer.size_bytes / state_bytes, 1.0),
    )
    for text, ratio, goal in ratios:
        print(f"{text:52} {ratio:.3f}  (goal: {goal})")


if __name__ == "__main__":
    main()
