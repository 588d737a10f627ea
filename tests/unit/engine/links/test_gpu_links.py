"""From GPU to GPU without the host: over late streams and a stand-in for NCCL, no bit of a run changes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.depth import by_depth, nightly_rows
from tests.unit.engine.late import Late, LateEvent, LateStream, LateStreams
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, dropping
from tests.unit.engine.plain import same, worst
from tests.unit.engine.ranks import Setup, connected
from tests.unit.engine.stage.test_batch_norm import setup as normalised
from tests.unit.engine.wire import Wire, WireCommunicator, own_gpu
from varuna.core.errors import LinkError
from varuna.core.plan import Pipeline, Plan
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.transport import FORMING_BOUND_S, local_store
from varuna.engine.base.wait_bounds import Awaited, Patience
from varuna.engine.links import gpu_links as module
from varuna.engine.links.gpu_links import CommGroup, GpuChannel, GpuLinks, comm_groups, connect
from varuna.engine.links.groups import Groups
from varuna.engine.links.links import Receiver, Sender
from varuna.engine.links.message import DeviceMessage, Layout, Packed
from varuna.engine.links.traffic import DirectCopies, traffic_over
from varuna.engine.pipeline.reduce import Reducer
from varuna.engine.worker.forming import InterruptibleStore
from varuna.partition.cut.split import Crossing
from varuna.testing.threads import run_all


class Wired(Late):
    """Gives every rank late streams and a GPU: its own, or the one that ``gpus`` names."""

    def __init__(self, *gpus: str | None) -> None:
        super().__init__(self.over)
        self.fabrics: list[Wire] = []
        self._gpus = gpus

    def over(self, streams: LateStreams) -> Any:
        streams.device = own_gpu(self._gpus[len(self.fabrics)] if self._gpus else None)
        self.fabrics.append(Wire())
        return traffic_over(streams, self.fabrics[-1])

    @property
    def calls(self) -> list[list[str]]:
        """Of all communicators, the one that warms up left out."""
        return [made.calls[1:] for fabric in self.fabrics for made in fabric.made]


# -- who goes this way ---------------------------------------------------------------------------------------------


def plan_of(stages: int, replicas: int) -> Plan:
    return Plan(
        micro_batch=1,
        global_batch=replicas,
        pipelines=(Pipeline(replicas=replicas, bounds=(*tuple(range(stages)), stages), stash_limits=(1,) * stages),),
    )


def test_every_link_has_two_directions_and_every_stage_its_sums_whoever_asks() -> None:
    found = comm_groups(plan_of(3, 2), range(1, 7), sums=True)
    assert [each.name for each in found] == [
        *("0>1", "1>0", "3>4", "4>3"),  # stages 0 and 1
        *("1>2", "2>1", "4>5", "5>4"),  # stages 1 and 2
        *("stage0", "stage1", "stage2"),
    ]
    assert found[0] == CommGroup("0>1", (0, 1), sums=False)
    assert found[-1] == CommGroup("stage2", (2, 5), sums=True)


def test_pairs_of_a_turn_have_nobody_in_common_so_that_turns_do_not_queue_up() -> None:
    found = comm_groups(plan_of(50, 3), range(1, 151), sums=False)
    for turn in (found[: 2 * 25 * 3], found[2 * 25 * 3 :]):
        members = [rank for each in turn for rank in each.members]
        assert all(members.count(rank) == 2 for rank in set(members))


def test_a_gpu_that_two_ranks_share_takes_part_in_nothing() -> None:
    names = {each.name for each in comm_groups(plan_of(2, 3), [10, 11, 12, 13, 12, 14], sums=True)}
    assert names == {"0>1", "1>0", "stage1"}
    assert comm_groups(plan_of(2, 2), [7, 7, 7, 7], sums=True) == []
    assert comm_groups(plan_of(2, 1), [0, 7], sums=True) == []  # nobody knows what rank 0 has


def test_sums_that_are_rounded_are_not_these_and_one_replica_has_none() -> None:
    assert not any(each.sums for each in comm_groups(plan_of(2, 2), range(1, 5), sums=False))
    assert not any(each.sums for each in comm_groups(plan_of(4, 1), range(1, 5), sums=True))


# -- whole runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), *nightly_rows((2, 1), (3, 2))])
def test_plans_over_direct_links_and_sums_keep_every_bit(stages: int, replicas: int) -> None:
    setup = Setup(build=by_depth(Dropping, dropping), dataset=Tokens(padded=True), global_batch=12)
    expected, parameters = setup.losses(stages, replicas), setup.parameters()
    setup.traffic = wired = Wired()
    assert setup.losses(stages, replicas) == expected
    assert same(setup.parameters(), parameters)
    assert len(wired.calls) == 2 * 2 * (stages - 1) * replicas + stages * replicas * (replicas > 1)
    assert all(wired.calls)  # nothing took another way


def test_three_replicas_add_up_as_one_process_does_but_for_rounding() -> None:
    setup = Setup(build=SmallLanguage, global_batch=12)
    alone = setup.losses(1, 1)
    setup.traffic = Wired()
    assert worst(setup.losses(1, 3), alone) < 1e-5


@pytest.mark.nightly
def test_a_missing_gradient_and_statistics_of_batches_pass() -> None:
    setup = normalised()
    expected = setup.losses(2, 2)
    setup.traffic = Wired()
    assert setup.losses(2, 2) == expected


def test_links_of_a_shared_gpu_and_rounded_sums_stay_with_the_host() -> None:
    setup = Setup(build=SmallLanguage, rounds=True, global_batch=12)
    expected = setup.losses(3, 2)
    setup.traffic = wired = Wired("a", "b", "c", "d", "d", "e")
    assert setup.losses(3, 2) == expected
    calls = [set(calls) for calls in wired.calls]
    assert len(calls) == 8  # both ends of four directions
    assert {"send"} in calls
    assert {"receive"} in calls
    assert {"sum"} not in calls


def test_sums_leave_behind_their_last_backward_and_not_behind_what_follows() -> None:
    """Two replicas; the computation is late."""
    groups, fabric, streams = connected(2), Wire(), [LateStreams() for _ in range(2)]
    identity = fabric.new_identity()
    inboxes, reducers, sums = [Inbox(Patience(last_s=20)) for _ in range(2)], list[Reducer](), list[torch.Tensor]()
    channels = []
    for rank in range(2):
        streams[rank].compute = LateStream()
        sums.append(torch.zeros(5))
        job = SimpleNamespace(traffic=traffic_over(streams[rank], fabric), bf16_reduction=False)
        statistics = SimpleNamespace(has=lambda _section: False)
        buckets, volatile = (
            [SimpleNamespace(flat=sums[rank])],
            SimpleNamespace(overwriting=lambda _section: nullcontext()),
        )
        parts = {"buckets": buckets, "statistics": statistics, "sums": volatile}
        stage: Any = SimpleNamespace(job=job, index=0, is_last=False, sections=range(1), **parts)
        mine = Groups(groups[rank], sums={0: groups[rank]})
        mine.direct.sums = GpuChannel(fabric.connect(identity, rank, 2), 0, streams[rank], lambda: False)
        channels.append(mine.direct.sums)
        reducers.append(Reducer(stage, plan_of(1, 2), rank, mine, inboxes[rank]))
    run_all([channel.connected for channel in channels])
    for rank in range(2):
        compute = streams[rank].compute
        assert compute is not None
        compute.put(partial(sums[rank].fill_, 2.0 + rank))
        reducers[rank].section_done(0, 0)
        compute.put(lambda: None)  # a later section's backward, which need not be waited for
    for rank in range(2):
        inboxes[rank].take(("reduced", 0, 0), nothing)
        compute = streams[rank].compute
        assert compute is not None
        assert compute.passed == 1
        reducers[rank].close()
        fabric.made[rank].abort()
    assert [values.tolist() for values in sums] == [[5.0] * 5] * 2


# -- one link ------------------------------------------------------------------------------------------------------

HIDDEN = Crossing("hidden", torch.float32, (0, 3), (1, 0), differentiable=True)
LAYOUT = Layout((HIDDEN,), 2, digests=True, apart=True)
VALUE = torch.arange(6.0).view(2, 3)


def nothing() -> Awaited:
    return Awaited("a message")


class Pair:
    """Rank 0 sends to rank 1, over real groups and the stand-in."""

    def __init__(self) -> None:
        self.groups, self.fabric = connected(2), Wire()
        identity = self.fabric.new_identity()
        self.communicators = [self.fabric.connect(identity, rank, 2) for rank in range(2)]
        self.inboxes = [Inbox(Patience(last_s=20)) for _ in range(2)]
        self.streams = [LateStreams() for _ in range(2)]
        self.traffic = [DirectCopies(streams) for streams in self.streams]
        ends = zip(self.communicators, self.streams, self.inboxes, strict=True)
        self.channels = [
            GpuChannel(communicator, 1 - rank, streams, lambda inbox=inbox: inbox.ended)  # type: ignore[misc]
            for rank, (communicator, streams, inbox) in enumerate(ends)
        ]
        run_all([channel.connected for channel in self.channels])

    def receive(self) -> None:
        expected = [(("message", number), LAYOUT.size_bytes, LAYOUT.body_bytes) for number in range(3)]
        Receiver(self.groups[1], 0, 1, self.inboxes[1], "in", expected, channel=self.channels[1])

    def sender(self) -> Sender:
        return Sender(self.groups[0], 1, 1, self.inboxes[0], "out", self.channels[0])

    def take(self, number: int) -> list[list[float]]:
        arrived = self.inboxes[1].take(("message", number), nothing)
        assert isinstance(arrived, DeviceMessage)
        assert LAYOUT.digests_of(arrived) == [4, 5 + number]
        values: list[list[float]] = LAYOUT.unpack(arrived, self.traffic[1])["hidden"].tolist()
        return values


def pack(pair: Pair, number: int, value: torch.Tensor = VALUE) -> Any:
    return LAYOUT.pack({"hidden": value}, [4, 5 + number], pair.traffic[0])


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for inbox, communicator in zip(made.inboxes, made.communicators, strict=True):
        inbox.abort(GenerationEnded(0))
        communicator.abort()


def test_bodies_follow_their_headers_in_order_and_come_whole(pair: Pair) -> None:
    sender = pair.sender()
    pair.receive()
    for number in range(3):
        sender.send(pack(pair, number, VALUE + number))
    assert [pair.take(number) for number in (2, 0, 1)] == [(VALUE + number).tolist() for number in (2, 0, 1)]
    sender.close()


def test_a_wait_that_is_left_out_would_be_seen(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of whole runs rest on this: for the transfer at its receiver, and for the tensors at their sender."""
    sender = pair.sender()
    pair.receive()
    with monkeypatch.context() as patch:
        patch.setattr(pair.streams[1], "record_event", lambda stream: LateEvent(None))
        sender.send(pack(pair, 0))
        assert pair.take(0) != VALUE.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(Packed, "whole", lambda packed: packed.buffer)
        sender.send(pack(pair, 1))
        assert pair.take(1) != VALUE.tolist()
    sender.close()


def test_no_device_is_asked_to_wait_for_a_peer_that_is_not_there(pair: Pair) -> None:
    pair.receive()
    assert not pair.inboxes[1].has(("message", 0))
    assert pair.communicators[1].calls == []  # no header, no receive


def test_a_sender_calls_only_once_the_receiver_has_taken_its_header(pair: Pair) -> None:
    sender = pair.sender()
    sender.send(pack(pair, 0))
    time.sleep(0.05)
    assert pair.communicators[0].calls == []
    pair.receive()
    assert pair.take(0) == VALUE.tolist()
    assert pair.communicators[0].calls == ["send"]
    sender.close()


def test_a_missing_gradient_is_sent_as_zeros(pair: Pair) -> None:
    sender = pair.sender()
    pair.receive()
    sender.send(LAYOUT.pack({}, [4, 5], pair.traffic[0]))
    assert pair.take(0) == [[0.0] * 3] * 2
    sender.close()


def test_a_peer_that_dies_between_header_and_body_breaks_the_link(pair: Pair) -> None:
    pair.receive()
    header = torch.zeros(LAYOUT.size_bytes, dtype=torch.uint8)
    pair.groups[0].send(header, 1, 1).wait()
    pair.communicators[0].abort()  # its process is gone
    with pytest.raises(LinkError, match=r"the link in broke while receiving: NCCL: remote process exited"):
        pair.inboxes[1].take(("message", 0), nothing)


def test_a_transfer_with_a_frozen_peer_ends_with_the_generation_and_has_a_bound(pair: Pair) -> None:
    body = pair.channels[1].room(8)
    with pytest.raises(RuntimeError, match=r"waited 0 s for a transfer by NCCL"):
        pair.channels[1].receive(body, bound_s=0.05)
    errors: list[str] = []

    def receive() -> None:
        try:
            pair.channels[1].receive(body)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    pair.inboxes[1].abort(GenerationEnded(0))
    thread.join(10)
    assert errors == ["the generation ended"]


def test_an_abort_ends_a_wait_too(pair: Pair) -> None:
    timer = threading.Timer(0.05, pair.communicators[1].abort)
    timer.start()
    with pytest.raises(RuntimeError, match=r"the communicator was aborted"):
        pair.channels[1].receive(pair.channels[1].room(8))
    timer.join()


# -- forming and leaving -------------------------------------------------------------------------------------------


class Grid:
    """Ranks that connect to each other."""

    def __init__(self, stages: int, replicas: int) -> None:
        self.plan, self.store = plan_of(stages, replicas), local_store()
        size = stages * replicas
        self.votes, self.fabrics = connected(size), [Wire() for _ in range(size)]
        self.ended, self.directs = threading.Event(), [GpuLinks() for _ in range(size)]

    def connect(self, rank: int) -> None:
        streams = LateStreams()
        streams.device = own_gpu()
        connect(
            self.directs[rank],
            self.fabrics[rank],
            streams,
            plan=self.plan,
            rank=rank,
            group=self.votes[rank],
            store=InterruptibleStore(self.store, self.ended.is_set),
            sums=True,
            ended=self.ended.is_set,
        )


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (1, 4), *nightly_rows((4, 3), (5, 2))])
def test_all_ranks_connect_with_all_peers_and_nobody_else(stages: int, replicas: int) -> None:
    grid = Grid(stages, replicas)
    run_all([partial(grid.connect, rank) for rank in range(stages * replicas)])
    for rank, direct in enumerate(grid.directs):
        stage = grid.plan.place_of(rank).stage
        peers = {rank - 1} if stage else set()
        peers |= {rank + 1} if stage + 1 < stages else set()
        assert direct.sends.keys() == direct.receives.keys() == peers
        assert (direct.sums is not None) == (replicas > 1)
        direct.abort()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_member_that_freezes_while_forming_fails_the_others_within_the_bound(
    frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORMING_BOUND_S", 0.2)
    grid = Grid(2, 1)
    if frozen == 0:  # before it says how to reach it
        monkeypatch.setattr(grid.fabrics[0], "new_identity", partial(_never, grid.ended))
    else:
        monkeypatch.setattr(grid.fabrics[1], "connect", partial(_never, grid.ended))
    thread = threading.Thread(target=_quietly, args=(partial(grid.connect, frozen),), daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match=r"waited 0 s for a member to connect by NCCL|it has not set 0>1"):
        grid.connect(1 - frozen)
    grid.ended.set()
    thread.join(10)
    for direct in grid.directs:
        direct.abort()
    assert all(made.aborted for fabric in grid.fabrics for made in fabric.made)


def _never(ended: threading.Event, *_: object) -> None:
    ended.wait(20)
    raise RuntimeError("thawed")


def _quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):
        work()


def test_the_end_of_a_generation_ends_its_forming_at_once() -> None:
    grid = Grid(2, 1)
    thread = threading.Thread(target=_quietly, args=(partial(grid.votes[1].all_reduce, torch.tensor([0, 5])),))
    thread.start()
    threading.Timer(0.05, grid.ended.set).start()
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the generation ended"):
        grid.connect(0)
    thread.join(10)
    assert time.monotonic() - begin_s < FORMING_BOUND_S / 2
    grid.directs[0].abort()


def test_abandoned_groups_abort_what_they_have_and_what_comes_too_late() -> None:
    made, late = (WireCommunicator(0, 1, 0, None) for _ in range(2))
    groups = Groups(connected(1)[0])
    groups.direct.abort_with_others(made)
    groups.abandon()
    for thread in threading.enumerate():
        if thread.name == "varuna-abort":
            thread.join(10)
    assert made.aborted
    with pytest.raises(RuntimeError, match="abandoned while it formed"):
        groups.direct.abort_with_others(late)
    assert late.aborted
