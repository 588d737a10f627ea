"""A snapshot is the state between two steps, though a device copies it while the next step runs."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.depth import nightly
from tests.unit.engine.late import Late, LateStream, LateStreams
from tests.unit.engine.models import SmallLanguage, adamw
from tests.unit.engine.optimizers import momentum
from tests.unit.engine.ranks import STEPS, Setup
from tests.unit.engine.stage.test_batch_norm import setup as normalised
from tests.unit.engine.worker.test_snapshotter import assigned, make_plan, manifest_of, stage_of
from tests.unit.testing.test_resuming import train
from varuna.checkpoint.io.restore import everything, read_states
from varuna.checkpoint.io.section_state import SectionState
from varuna.checkpoint.io.snapshot import SnapshotBuffer, parts_of
from varuna.core.saved import SavedShard
from varuna.engine.device.host_copies import Ready, StreamCopies
from varuna.engine.links.traffic import TransferPaths, traffic_over
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.snapshotter import Snapshotter
from varuna.store.base import Store
from varuna.store.opening import open_store


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.nodeid}")


class Point:
    """Waited for by the writer once the gate is open, and by the computation at once."""

    def __init__(self, inner: Ready, gate: threading.Event) -> None:
        self.inner, self._gate = inner, gate

    def wait(self) -> None:
        assert self._gate.wait(20)
        self.inner.wait()

    def passed(self) -> bool:
        return self._gate.is_set() and self.inner.passed()


class Gated(StreamCopies):
    """Keeps a writer from hurrying copies that the next update should wait for."""

    def __init__(self, gate: threading.Event, streams: LateStreams) -> None:
        super().__init__(streams)
        self._gate = gate

    def copy_to_host(self, *given: Any) -> Point:
        return Point(super().copy_to_host(*given), self._gate)

    def compute_after(self, copied: Ready) -> None:
        super().compute_after(copied.inner if isinstance(copied, Point) else copied)


class Rash(Gated):
    """Computes on while the state is copied."""

    def compute_after(self, copied: Ready) -> None:
        pass


def late_traffic(kind: type[Gated], gate: threading.Event) -> Callable[[], TransferPaths]:
    def make() -> TransferPaths:
        streams = LateStreams()
        return traffic_over(streams)._replace(saves=kind(gate, streams))

    return make


def stepped(stage: Stage, *, overflowed: bool = False) -> None:
    """One more step, of gradients that are not zero, in which every micro-batch found statistics of one."""
    stage.optimizer.prepare()
    for bucket in stage.buckets.values():
        bucket.flat.normal_()
    for section in filter(stage.statistics.has, stage.sections):
        table = stage.statistics.table(section)
        table.view(torch.uint8).view(torch.float16).fill_(1.0)
        stage.statistics.complete(section, table)
    stage.apply(stage.next_step, 0.5, overflowed=overflowed)


def cloned(stage: Stage) -> dict[int, SectionState]:
    def of(section: int) -> SectionState:
        state = stage.state_of(section, owned_only=True)
        return SectionState(section, {name: value.clone() for name, value in state.tensors.items()}, state.scalars)

    return {section: of(section) for section in stage.sections}


def differing(found: Mapping[int, SectionState], expected: Mapping[int, SectionState]) -> set[str]:
    """Names of what is not bit for bit the same."""
    names = set[str]()
    for section, state in expected.items():
        tensors, scalars = found[section].tensors, found[section].scalars
        assert (tensors.keys(), scalars.keys()) == (state.tensors.keys(), state.scalars.keys())
        names |= {name for name, value in state.tensors.items() if not torch.equal(tensors[name], value)}
        names |= {name for name, value in state.scalars.items() if scalars[name] != value}
    return names


def saved_while_training(
    setup: Setup, kind: type[Gated], store: Store, *, morph: bool = False, overflowed: bool = False
) -> tuple[set[str], set[str]]:
    """Save between two steps and let the writer begin after the second: what it got wrong, and what changed."""
    gate, shards = threading.Event(), list[SavedShard]()
    setup = replace(setup, traffic=late_traffic(kind, gate))
    plan = make_plan(setup)
    stage = stage_of(setup, plan, next_step=3)
    saver = Snapshotter(store, 1, shards.append, smallest_part_bytes=64)
    saver.begin(stage, assigned(plan))
    stepped(stage)
    expected = cloned(stage)
    saver.save(stage, assigned(plan))
    if morph:
        states = {section: stage.state_of(section) for section in stage.sections}
        stage = Stage(stage.job, plan, 0, states, stage.next_step)
        seat = assigned(plan, generation=1)
        opening = threading.Thread(target=saver.begin, args=(stage, seat))
        opening.start()
        opening.join(20)  # it does not wait for the writer
    stepped(stage, overflowed=overflowed)
    changed = differing(cloned(stage), expected)
    gate.set()
    saver.flush()
    saver.close()
    manifest = manifest_of(setup, store, plan, shards)
    found = read_states(store, manifest, dict.fromkeys(range(manifest.sections), everything))
    return differing(found, expected), changed


CASES: list[dict[str, Any]] = [
    {"optimizer": adamw},
    {"optimizer": momentum, "offload": True},
    {"precision": "bf16"},
    {"precision": "bf16", "offload": True},
]


def shown(given: dict[str, Any]) -> str:
    """Without addresses, by which no two processes would name a test alike."""
    return "-".join(getattr(value, "__name__", key if value is True else str(value)) for key, value in given.items())


@pytest.mark.parametrize("given", CASES, ids=shown)
@pytest.mark.parametrize("morph", [False, True])
def test_the_next_update_overwrites_nothing_that_is_still_to_be_copied(
    given: dict[str, Any], morph: bool, store: Store
) -> None:
    torn, changed = saved_while_training(Setup(build=SmallLanguage, **given), Gated, store, morph=morph)
    assert changed
    assert not torn


@pytest.mark.parametrize("given", CASES, ids=shown)
def test_an_update_that_does_not_wait_tears_the_snapshot(given: dict[str, Any], store: Store) -> None:
    """The test above rests on this."""
    torn, _ = saved_while_training(Setup(build=SmallLanguage, **given), Rash, store)
    assert torn


@pytest.mark.nightly
def test_a_step_that_overflows_changes_buffers_and_the_loss_scale_but_not_those_that_are_saved(store: Store) -> None:
    """Both change at a commit, without an update of the optimizer."""
    setup = normalised(precision="fp16")
    torn, changed = saved_while_training(setup, Gated, store, overflowed=True)
    assert not torn
    assert {name.split("/")[0] for name in changed} == {"buffers", "run"}


def test_a_copy_is_queued_behind_the_update_and_not_behind_the_next_step() -> None:
    streams = LateStreams()
    streams.compute = LateStream()
    copies, value = StreamCopies(streams), torch.zeros(16)
    streams.compute.put(lambda: value.fill_(7.0))  # an update
    states = {0: SectionState(0, {"parameters/w": value}, {})}
    planned = parts_of([states[0]], replica=0, holders={0: (0,)}, generation=0)
    [part], pairs = SnapshotBuffer().place(planned, states, copies.room)
    copied = copies.copy_to_host(pairs)
    streams.compute.put(lambda: None)  # the next step's F, R and B
    copied.wait()
    assert streams.compute.passed == 1
    assert torch.frombuffer(bytearray(part.data), dtype=torch.float32).eq(7.0).all()


@pytest.mark.parametrize("offload", [True, *nightly(False)])
def test_a_checkpoint_of_a_late_device_continues_bit_for_bit(offload: bool, tmp_path: Path) -> None:
    plain = Setup(build=SmallLanguage)
    undisturbed = plain.losses(2, 1)
    late = replace(plain, directory=str(tmp_path), traffic=Late(), offload=offload)
    first = train(late, 2, 1, STEPS // 2, str(tmp_path))
    assert first + train(replace(plain, directory=str(tmp_path)), 2, 1, STEPS, str(tmp_path)) == undisturbed
