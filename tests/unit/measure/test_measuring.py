"""Tiny real measurements: that everything is measured, in the engine's own stage; never how long it took."""

import threading
import time
from collections.abc import Hashable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.late import Late, LateStream, LateStreams
from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup, single_threaded
from varuna.calibration.samples import RingSamples, SectionSamples, Sized
from varuna.core.errors import NoPlanError
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.transport import local_store
from varuna.engine.device.host_copies import HostCopies
from varuna.engine.links.links import Sender
from varuna.engine.links.message import Packed
from varuna.engine.links.traffic import TransferPaths, traffic_over
from varuna.measure.network import Peers, Repeats
from varuna.measure.pilot import PilotTimes, pilot_plan, pilot_steps
from varuna.measure.worker import least_memory, rehearsed_size
from varuna.testing.threads import run_all
from varuna.timing.compute import Thoroughness, measure_window, timed_rounds
from varuna.timing.equal_sections import section_kinds
from varuna.timing.stand_ins import StandIns
from varuna.timing.window import Pass


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with single_threaded():
        yield


class TwoHalves(SmallLanguage):
    """Layers of two different halves, as a transformer's."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers[:3]:
            x = x + torch.tanh(layer(x))
            x = x + torch.sigmoid(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.nightly
def test_sections_with_the_same_graph_are_one_kind() -> None:
    model = Setup(TwoHalves).model
    kinds = section_kinds(model)
    assert len(kinds) == len(model.sections)
    assert kinds[0] == 0
    assert len(set(kinds)) == 4, "an embedding, two halves of a layer, the head with the loss"
    assert kinds[1] == kinds[3] == kinds[5]
    assert kinds[2] == kinds[4] == kinds[6]


def test_every_section_of_a_window_is_measured_at_every_size() -> None:
    setup = Setup(SmallLanguage)
    count = len(setup.model.sections)
    beginning = StandIns(setup.model.shapes, setup.beginning)
    for span in (range(count), range(1, count - 1), range(count - 1, count)):
        found = measure_window(
            setup.job(),
            span,
            (1, 2),
            beginning=beginning,
            batch=lambda m: setup.source.micro_batch(range(m)).tensors,
            memory_bytes=None,
            effort=Thoroughness(0.0),
        )
        assert [(each.section, each.micro_batch) for each in found.sections] == [(s, m) for m in (1, 2) for s in span]
        for each in found.sections:
            for times in (each.forward_s, each.recompute_s, each.backward_s):
                assert len(times) >= 3
                assert min(times) > 0
            assert len(each.input_s) == len(each.weight_s)
        assert all(seconds > 0 for _, seconds in (*found.updates, *found.snapshots))
        assert not found.arrivals, "a CPU computes with what is in its memory"


def test_copies_to_a_device_are_measured_of_a_window_and_of_its_smallest_section() -> None:
    """They are waited for: otherwise parameters of the device would be what late streams leave there."""
    setup = Setup(SmallLanguage, traffic=Late())
    found = measure_window(
        setup.job(),
        range(len(setup.model.sections)),
        (1,),
        beginning=StandIns(setup.model.shapes, setup.beginning),
        batch=lambda m: setup.source.micro_batch(range(m)).tensors,
        memory_bytes=None,
        effort=Thoroughness(0.0),
    )
    sizes = {sample.size_bytes for sample in found.arrivals}
    whole = sum(section.parameter_bytes for section in setup.model.facts.sections)
    assert len(sizes) == 2
    assert whole - sum(tied.size_bytes for tied in setup.model.facts.tied) == max(sizes)
    assert all(sample.seconds > 0 for sample in found.arrivals)


def test_a_section_that_does_not_fit_is_refused_with_its_bytes() -> None:
    setup = Setup(SmallLanguage)
    with pytest.raises(NoPlanError, match=r"measuring section 0 takes .* but this worker has 10 B"):
        measure_window(
            setup.job(),
            range(1),
            (1,),
            beginning=StandIns(setup.model.shapes, setup.beginning),
            batch=lambda m: setup.source.micro_batch(range(m)).tensors,
            memory_bytes=10,
            effort=Thoroughness(0.0),
        )


def test_no_message_leaves_before_both_have_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wait after a late one, and its time would be that of both."""
    noted: list[str] = []
    send, put = Sender.send, Inbox.put

    def note_send(sender: Sender, message: Packed) -> None:
        noted.append("sent")
        send(sender, message)

    def note_put(inbox: Inbox, key: Hashable, value: Any) -> None:
        if threading.current_thread().name.startswith("varuna-receive-with rank 0"):
            time.sleep(0.002)  # one direction is slower: the other would run ahead
        noted.append("received")
        put(inbox, key, value)

    monkeypatch.setattr(Sender, "send", note_send)
    monkeypatch.setattr(Inbox, "put", note_put)
    store = local_store()
    run_all([partial(_measure_messages, store, rank) for rank in range(2)])
    turns = [noted[i : i + 4] for i in range(0, len(noted), 4)]
    assert len(turns) >= Repeats().warm_rounds + Repeats().least_rounds, "a slow machine makes no more"
    assert all(sorted(turn) == ["received", "received", "sent", "sent"] for turn in turns)


def _measure_messages(store: Any, rank: int) -> None:
    Peers(store, rank, 2, "127.0.0.1").messages((64,), TransferPaths())


def test_messages_and_rings_are_measured_between_real_ranks() -> None:
    store = local_store()
    messages: dict[int, tuple[Sized, ...]] = {}
    rings: dict[int, tuple[RingSamples, ...]] = {}
    lines: dict[int, tuple[Sized, ...]] = {}

    def measure(rank: int) -> None:
        peers = Peers(store, rank, 3, "127.0.0.1")
        assert peers.agree(float(rank)) == 2.0
        messages[rank] = peers.messages((64, 4096), TransferPaths())
        lines[rank] = peers.line((64, 4096))
        rings[rank] = peers.rings((64, 4096), HostCopies())

    run_all([partial(measure, rank) for rank in range(3)])
    assert {size for size, _ in messages[0]} == {64, 4096}
    assert messages[2] == (), "it has no partner"
    assert {size for size, _ in lines[1]} == {128, 8192}, "of both neighbours"
    assert all(seconds > 0 for _, seconds in lines[1])
    assert lines[0] == lines[2] == ()
    assert [(ring.ranks, ring.in_flight) for ring in rings[0]] == [(2, 1), (3, 1)]
    assert [bool(ring.samples) for ring in rings[2]] == [False, True]
    assert all(seconds > 0 for ring in rings[1] for _, seconds in ring.samples)


@pytest.mark.nightly
def test_messages_and_rings_of_a_device_are_over_when_both_copies_are() -> None:
    store, devices = local_store(), [LateStreams(), LateStreams()]

    def measure(rank: int) -> None:
        streams = devices[rank]
        streams.compute = LateStream()  # or whatever the computation follows would be waited for at once
        traffic, peers = traffic_over(streams), Peers(store, rank, 2, "127.0.0.1")
        messages = len(peers.messages((64, 4096), traffic))
        crossed = streams.copies
        assert streams.left == 0
        rings = sum(len(ring.samples) for ring in peers.rings((64, 4096), traffic.sums))
        assert crossed >= 2 * messages > 0
        assert streams.copies - crossed >= 2 * rings > 0
        assert streams.left == 0

    run_all([partial(measure, rank) for rank in range(2)])


class Rounds:
    """A window whose rounds take a moment, or more memory than there is."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def round(self, batch: dict[str, torch.Tensor], size: int, *, halves: bool) -> Pass:
        if self.fails:
            raise torch.OutOfMemoryError
        return Pass({0: 0.1}, {}, {}, {}, {})


@pytest.mark.parametrize("fails", [True, False])
def test_workers_ask_each_other_equally_often_whichever_runs_out_of_memory(fails: bool) -> None:
    asked: list[float] = []

    def agree(value: float) -> float:
        asked.append(value)
        return 1.0  # some worker has run out of memory

    window: Any = Rounds(fails=fails)
    assert timed_rounds(window, {}, 4, agree, Thoroughness(1.0)) is None
    assert asked == [float(fails)]
    passes = timed_rounds(window, {}, 4, lambda value: value, Thoroughness(1.0))
    assert passes is None if fails else len(passes or ()) > 1


def test_what_the_plan_of_a_rehearsal_follows_from_is_the_same_on_all_workers() -> None:
    def sample(section: int, micro_batch: int) -> SectionSamples:
        each = (1.0 * section, 2.0 * section, 9.0)
        return SectionSamples(
            section=section, micro_batch=micro_batch, forward_s=each, recompute_s=each, backward_s=each
        )

    samples = [sample(section, micro_batch) for micro_batch in (2, 4) for section in (1, 2)]

    def slower(value: float) -> float:
        return max(value, 3.0)

    size, times = rehearsed_size(samples, None, slower)
    assert size == 4, "as fast as 2 with twice the examples"
    assert [each.forward_s for each in times] == [3.0, 4.0]
    assert rehearsed_size(samples, 2, slower)[0] == 2, "the user's own"
    table: Any = SimpleNamespace(agree=lambda value: max(value, -5e9))
    assert least_memory(8 * 10**9, table) == 5 * 10**9
    alone: Any = SimpleNamespace(agree=lambda value: value)
    assert least_memory(None, alone) is None


def test_a_rehearsal_of_long_steps_has_fewer_of_them() -> None:
    def steps(seconds: float) -> int:
        times = [PilotTimes(seconds, seconds, seconds)] * 4
        return pilot_steps(times, pilot_plan(times, workers=2, micro_batch=8))

    assert [steps(seconds) for seconds in (1e-4, 0.003, 10.0)] == [14, 9, 6]


def test_a_size_that_is_worse_from_the_first_round_on_gets_fewer() -> None:
    window: Any = Rounds(fails=False)

    def rounds(promising_s: float) -> int:
        return len(timed_rounds(window, {}, 4, float, Thoroughness(0.0), promising_s) or ())

    assert (rounds(0.2), rounds(0.05)) == (5, 3)


def test_a_size_that_is_given_is_rehearsed_or_the_largest_that_fits() -> None:
    def sample(size: int, seconds: float) -> SectionSamples:
        each = (seconds,)
        return SectionSamples(section=0, micro_batch=size, forward_s=each, recompute_s=each, backward_s=each)

    sections = [sample(1, 1.0), sample(2, 1.5), sample(4, 4.0)]
    assert rehearsed_size(sections, None, float)[0] == 2
    assert rehearsed_size(sections, 4, float) == (4, [PilotTimes(4.0, 4.0, 4.0)])
    assert rehearsed_size(sections, 8, float)[0] == 4
