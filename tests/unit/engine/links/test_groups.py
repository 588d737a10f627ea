"""Groups of a generation: formed with everybody, interrupted by its end, abandoned without waiting."""

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, local_store
from varuna.engine.links.gpu_links import GpuLinks
from varuna.engine.links.groups import Groups, form_groups
from varuna.engine.worker.forming import InterruptibleStore
from varuna.testing.threads import run_all

_formed: list[Groups] = []


def form_here(store: object, rank: int, *, members: int, stages: int, replicas: int, generation: int = 0) -> Groups:
    grid = stages * replicas
    homes = {rank % stages: range(rank % stages, grid, stages)} if rank < grid else {}
    groups = form_groups(
        store,
        generation=generation,
        rank=rank,
        members=members,
        grid=grid,
        homes=homes,
        endpoint=Endpoint("127.0.0.1"),
    )
    _formed.append(groups)
    return groups


@pytest.fixture(autouse=True)
def abandoned() -> Iterator[None]:
    """Leave no sockets behind."""
    yield
    while _formed:
        _formed.pop().abandon()


@pytest.mark.parametrize("missing", ["at the world", "behind the world"])
def test_forming_without_a_member_is_interrupted_by_the_end_of_the_generation(missing: str) -> None:
    store, ended = local_store(), threading.Event()
    failures: list[BaseException] = []

    def wait_for_the_other() -> None:
        try:
            form_here(InterruptibleStore(store, ended.is_set), 0, members=2, stages=2, replicas=1)
        except RuntimeError as error:
            failures.append(error)

    def join_the_world_only() -> None:
        form_here(store, 1, members=2, stages=1, replicas=1)  # a spare: no vote

    works = [wait_for_the_other, join_the_world_only][: 1 + (missing == "behind the world")]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for other in threads[1:]:
        other.join(40)
        assert not other.is_alive()
    threads[0].join(0.3)
    assert threads[0].is_alive()
    ended.set()
    threads[0].join(5)
    assert len(failures) == 1


def test_a_store_whose_generation_goes_on_waits_until_the_key_is_there() -> None:
    inner = local_store()
    store = InterruptibleStore(inner, lambda: False)
    thread = threading.Timer(0.05, partial(inner.set, "key", b"value"))
    thread.start()
    assert store.get("key") == b"value"
    assert store.check(["key"])
    assert not store.check(["key", "other"])
    thread.join(5)


def test_a_store_whose_generation_is_over_still_gives_what_it_has() -> None:
    inner = local_store()
    inner.set("key", b"value")
    store = InterruptibleStore(inner, lambda: True)
    assert store.get("key") == b"value"
    with pytest.raises(RuntimeError, match="it has not set other"):
        store.get("other")


def test_spares_share_the_world_only_and_each_stage_has_its_own_ring() -> None:
    store = local_store()
    groups: dict[int, Groups] = {}
    replicas, stages, members = 2, 2, 5

    def work(rank: int) -> None:
        groups[rank] = form_here(store, rank, members=members, stages=stages, replicas=replicas)

    run_all([partial(work, rank) for rank in range(members)])
    assert [groups[rank].grid is None for rank in range(members)] == [False] * 4 + [True]
    assert all(groups[rank].gradients is not groups[rank].world for rank in range(4)), "what comes is asked for apart"
    assert [list(groups[rank].sums) for rank in range(members)] == [[0], [1], [0], [1], []]
    sums: dict[int, list[float]] = {}

    def reduce(rank: int) -> None:
        mine = groups[rank]
        world, ring = torch.tensor([10.0**rank]), torch.tensor([10.0**rank])
        mine.world.all_reduce(world)
        for group in mine.sums.values():
            group.all_reduce(ring)
        sums[rank] = [world.item(), ring.item()]

    run_all([partial(reduce, rank) for rank in range(members)])
    assert sums == {0: [11111, 101], 1: [11111, 1010], 2: [11111, 101], 3: [11111, 1010], 4: [11111, 10000]}


def test_sections_that_the_same_ranks_run_are_summed_in_one_group() -> None:
    """Three pipelines over six sections: of three stages (ranks 0 to 2), two (3 and 4) and one (5)."""
    store = local_store()
    stages = [range(2), range(2, 4), range(4, 6), range(3), range(3, 6), range(6)]
    groups: dict[int, Groups] = {}
    sums: dict[tuple[int, int], float] = {}

    def work(rank: int) -> None:
        homes = {s: [each for each, run in enumerate(stages) if s in run] for s in stages[rank]}
        groups[rank] = form_groups(
            store, generation=0, rank=rank, members=6, grid=6, homes=homes, endpoint=Endpoint("127.0.0.1")
        )
        _formed.append(groups[rank])
        for section in reversed(stages[rank]):
            value = torch.tensor([10.0**rank])
            groups[rank].sums[section].all_reduce(value)
            sums[rank, section] = value.item()

    run_all([partial(work, rank) for rank in range(6)])
    by_section = [{value for (_, section), value in sums.items() if section == each} for each in range(6)]
    assert by_section == [{101001}, {101001}, {101010}, {110010}, {110100}, {110100}]
    assert [len({*map(id, groups[rank].sums.values())}) for rank in range(6)] == [1, 2, 1, 2, 2, 4]


def test_generations_do_not_meet_in_the_same_store() -> None:
    store = local_store()
    values: dict[tuple[int, int], float] = {}

    def work(generation: int, rank: int) -> None:
        groups = form_here(store, rank, members=2, stages=1, replicas=2, generation=generation)
        value = torch.tensor([float(generation)])
        groups.world.all_reduce(value)
        values[generation, rank] = value.item()

    run_all([partial(work, generation, rank) for generation in (1, 2) for rank in range(2)])
    assert values == {(1, 0): 2.0, (1, 1): 2.0, (2, 0): 4.0, (2, 1): 4.0}


def test_a_group_that_is_dropped_or_abandoned_again_is_no_error_and_its_peer_is_told() -> None:
    store = local_store()
    groups: dict[int, Groups] = {}

    def work(rank: int) -> None:
        groups[rank] = form_here(store, rank, members=2, stages=2, replicas=1)

    run_all([partial(work, rank) for rank in range(2)])
    waits = blocked_in_receive(groups[0].world)
    _formed.clear()
    del groups[1]  # nobody abandons it
    waits.join(20)
    assert not waits.is_alive()
    groups[0].abandon(exiting=True)
    groups[0].abandon()


def blocked_in_receive(group: Group) -> threading.Thread:
    def receive() -> None:
        with contextlib.suppress(RuntimeError):
            group.receive(torch.empty(8, dtype=torch.uint8), 1, 1).wait()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread


def test_a_rank_that_is_a_thread_is_freed_by_what_it_abandons_and_the_others_are_not() -> None:
    store, groups = local_store(), dict[int, Groups]()

    def work(rank: int) -> None:
        groups[rank] = form_here(store, rank, members=3, stages=3, replicas=1)

    run_all([partial(work, rank) for rank in range(3)])
    freed, waits = blocked_in_receive(groups[0].world), blocked_in_receive(groups[2].world)
    groups[0].abandon()
    freed.join(20)
    assert not freed.is_alive()
    assert waits.is_alive()
    groups[1].world.send(torch.zeros(8, dtype=torch.uint8), 2, 1).wait()
    waits.join(20)
    assert not waits.is_alive()


@pytest.mark.parametrize("tags", [(1, 1), (1, 2)])
def test_a_large_message_that_is_half_way_ends_at_both_ends(tags: tuple[int, int]) -> None:
    store, groups = local_store(), dict[int, Groups]()

    def work(rank: int) -> None:
        groups[rank] = form_here(store, rank, members=2, stages=2, replicas=1)

    run_all([partial(work, rank) for rank in range(2)])
    works = [
        groups[0].world.send(torch.zeros(2**26), 1, tags[0]),
        groups[1].world.receive(torch.zeros(2**26), 0, tags[1]),
    ]
    groups[0].abandon()
    for each in works:
        with pytest.raises(RuntimeError, match=r"abandoned|closed|broke"):
            each.wait(20)


def test_what_gpus_of_a_session_that_ended_hold_goes_when_the_next_one_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    first = form_here(local_store(), 0, members=1, stages=1, replicas=1)
    abandoned: list[GpuLinks] = []
    monkeypatch.setattr(GpuLinks, "abandon", lambda direct: abandoned.append(direct))
    first.abandon(exiting=True)
    assert not abandoned  # the process may be about to end
    form_here(local_store(), 0, members=1, stages=1, replicas=1)
    assert any(each is first.direct for each in abandoned)
