"""Copies between host and device: over streams that are as late as they may be, no bit of a run changes."""

import math
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.depth import nightly_rows
from tests.unit.engine.late import Late, LateStream, LateStreams, Rash
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens
from tests.unit.engine.plain import same
from tests.unit.engine.ranks import Setup, connected
from tests.unit.engine.stage.test_batch_norm import setup as normalised
from varuna.core.devices import DeviceFacts
from varuna.core.errors import DivergedError
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.wait_bounds import Awaited, Patience
from varuna.engine.device.host_copies import DONE, StreamCopies
from varuna.engine.links.groups import Groups
from varuna.engine.links.message import Layout
from varuna.engine.links.traffic import TransferPaths, traffic_of, traffic_over
from varuna.engine.links.transfer_time import TransferTime
from varuna.engine.pipeline import reduce
from varuna.partition.cut.split import Crossing


@pytest.mark.parametrize(
    ("stages", "replicas", "rounds"),
    [
        (1, 2, True),
        *nightly_rows((3, 2, False), (1, 1, False), (3, 1, False)),
    ],
)
def test_a_late_device_changes_no_bit(stages: int, replicas: int, rounds: bool) -> None:
    late = Late()
    setup = Setup(build=Dropping, dataset=Tokens(padded=True), global_batch=12, rounds=rounds)
    expected, parameters = setup.losses(stages, replicas), setup.parameters()
    setup.traffic = late
    assert setup.losses(stages, replicas) == expected
    assert same(setup.parameters(), parameters)
    assert len(late.made) == stages * replicas
    assert all(streams.copies and not streams.unkept for streams in late.made)


@pytest.mark.nightly
def test_statistics_of_batches_pass_a_late_device() -> None:
    setup = normalised()
    expected = setup.losses(2, 2)
    setup.traffic = Late()
    assert setup.losses(2, 2) == expected


class Hasty(StreamCopies):
    """Computes with what has arrived without waiting for it."""

    def copy_to_device(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._streams.fetch(self._up, value) for name, value in values.items()}


def test_a_wait_that_is_left_out_would_be_seen() -> None:
    """The tests above rest on this."""
    setup = Setup(
        build=SmallLanguage, traffic=Late(lambda streams: TransferPaths(Hasty(streams), StreamCopies(streams), streams))
    )
    with pytest.raises(Exception, match=r"."):  # an index of -1, or NaN
        assert all(math.isfinite(loss) for loss, _ in setup.losses(2, 1, steps=1))
    setup.traffic = Late(lambda streams: TransferPaths(StreamCopies(streams), Rash(streams), streams))
    with pytest.raises(DivergedError, match="gradient norm nan"):
        setup.losses(1, 2, steps=2)


HIDDEN = Crossing("hidden", torch.float32, (0, 3), (1, 0), differentiable=True)


def test_a_message_is_copied_behind_what_was_computed_and_not_before() -> None:
    streams = LateStreams()
    streams.compute = LateStream()
    copies, value = StreamCopies(streams), torch.zeros(2, 3)
    streams.compute.put(lambda: value.fill_(7.0))
    message = Layout((HIDDEN,), 2, digests=True).pack({"hidden": value}, [4, 5], copies)
    streams.compute.put(lambda: value.fill_(9.0))  # after the message
    assert Layout((HIDDEN,), 2, digests=True).digests_of(message.buffer) == [4, 5]
    found = Layout((HIDDEN,), 2, digests=True).unpack(message.whole())
    assert found["hidden"].eq(7.0).all()
    assert streams.compute.passed == 1


def test_sums_leave_at_their_point_and_are_back_at_the_end() -> None:
    streams = LateStreams()
    streams.compute = LateStream()
    copies, sums = StreamCopies(streams), torch.zeros(5)
    streams.compute.put(lambda: sums.fill_(2.0))
    point = copies.point()
    streams.compute.put(lambda: None)  # a later section's backward, which need not be waited for
    with copies.at_host(sums, point, copies.room_for) as values:
        assert values.tolist() == [2.0] * 5
        values *= 3
        assert sums.tolist() == [2.0] * 5
    assert sums.tolist() == [6.0] * 5
    assert streams.compute.passed == 1


def test_a_value_that_is_freed_under_a_copy_is_kept_by_the_copies_only() -> None:
    streams = LateStreams()
    stream = streams.stream()
    streams.copy(stream, torch.zeros(3), torch.ones(3))
    with pytest.raises(RuntimeError, match="given away"):
        streams.record_event(stream).wait()
    target = torch.zeros(3)
    StreamCopies(streams).copy_to_host([(torch.ones(3), target)]).wait()
    assert target.tolist() == [1.0] * 3


def test_a_cpu_copies_nothing_twice() -> None:
    traffic = traffic_of(torch.device("cpu"))
    value = torch.ones(3)
    assert traffic.streams is None
    assert traffic.links.copy_to_device({"x": value})["x"] is value
    assert traffic.sums.point() is DONE
    with traffic.sums.at_host(value, DONE, torch.empty_like) as values:
        assert values is value


class Told(Exception):
    """The device that a session told when it joined."""


class Listening:
    """A membership that goes no further."""

    def shown(self, answer: object) -> None:
        """Nobody asks."""

    def join(self, job: object, *, device: DeviceFacts | None = None, **callbacks: object) -> None:
        raise Told(device)


@pytest.mark.parametrize("gpu", [DeviceFacts(name="gpu", memory_bytes=2**34), None])
def test_a_session_tells_what_device_it_computes_on(gpu: DeviceFacts | None) -> None:
    def traffic() -> TransferPaths:
        streams = LateStreams()
        streams.device = gpu
        return traffic_over(None if gpu is None else streams)

    session = Setup(build=SmallLanguage, traffic=traffic).session(Listening(), None, 1)
    with pytest.raises(Told) as told:
        next(session.steps())
    assert told.value.args == (gpu,)


class Clocked(LateStreams):
    """Every copy takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def _tick(self) -> None:
        self.now_s += 1.0

    def copy(self, stream: LateStream, target: Tensor, source: Tensor) -> None:
        stream.put(self._tick)
        super().copy(stream, target, source)


def test_an_all_reduce_is_timed_with_its_copies_but_without_the_backward_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Clocked()
    setup = Setup(build=SmallLanguage, traffic=lambda: traffic_over(streams))
    setup.losses(1, 1, steps=1)
    generation = setup.finished[0].current
    assert generation is not None
    monkeypatch.setattr(reduce, "time", SimpleNamespace(monotonic=lambda: streams.now_s))
    streams.compute = LateStream()
    streams.compute.put(lambda: setattr(streams, "now_s", 100.0))  # a backward
    flat = generation.stage.buckets[0].flat
    [group] = connected(1)
    inbox = Inbox(Patience(last_s=20))
    reducer = reduce.Reducer(generation.stage, generation.plan, 0, Groups(group, sums={0: group}), inbox)
    reducer.section_done(0, 0)
    inbox.take(("reduced", 0, 0), lambda: Awaited("the sums of section 0"))
    reducer.close()
    assert streams.now_s == 102.0
    assert reducer.reductions[-1] == TransferTime(flat.nbytes, 100.0, 102.0)
