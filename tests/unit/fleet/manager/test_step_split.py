import pytest

from tests.unit.extras.pictures.timelines import LATENCY_S, a_step
from varuna.core.times import Interval, StepTimeline
from varuna.fleet.manager.step_desk import split_waits
from varuna.simulator.costs import LinkCosts, uniform
from varuna.simulator.step import simulate


def with_rank(timeline: StepTimeline, rank: int, **changed: object) -> StepTimeline:
    ranks = [each.model_copy(update=changed) if each.rank == rank else each for each in timeline.ranks]
    return timeline.model_copy(update={"ranks": tuple(ranks)})


@pytest.mark.parametrize("ahead_s", [(0.0,) * 4, (0.0, 500.0, -3.0, 7.0)])
def test_waits_are_told_apart_as_the_simulator_does_whatever_clocks_show(ahead_s: tuple[float, ...]) -> None:
    trace = simulate(uniform(2, link=LinkCosts(latency_s=LATENCY_S)), micro_batches=3, policy="gpipe")
    split = split_waits(a_step(ahead_s))
    assert split is not None
    assert split.transfer_s == pytest.approx([times.transfer_s for times in trace.stage_times], abs=1e-6)
    assert sum(split.transfer_s) > 0
    for stage, row in enumerate(trace.rows):
        gaps_s = row.ends_s[-1] - sum(row.ends_s) + sum(row.starts_s)
        assert split.transfer_s[stage] + split.idle_s[stage] == pytest.approx(gaps_s)
    assert (split.uncertain_s == 0) == (len(set(ahead_s)) == 1)


def test_a_wait_for_samples_is_idle_though_the_message_is_here() -> None:
    whole = a_step((0.0,) * 4)
    rank = whole.ranks[1]
    forward = next(did for did in rank.actions if did.kind == "F")
    early = tuple(Interval(each.kind, each.micro_batch, -5.0, -5.0) for each in rank.came)  # long before the wait
    wait = (Interval("F", forward.micro_batch, 0.0, forward.begin_s),)
    split = split_waits(with_rank(whole, 1, waits=wait, came=early))
    other = split_waits(with_rank(whole, 1, waits=wait))
    assert split is not None
    assert other is not None
    assert other.transfer_s[1] - split.transfer_s[1] == pytest.approx(LATENCY_S / 2)  # a mean over two replicas


def test_where_a_rank_has_told_nothing_or_clocks_cannot_be_compared_there_is_no_share() -> None:
    assert split_waits(a_step((0.0,) * 4, missing=1)) is None
    apart = a_step((0.0, 500.0, 0.0, 0.0))
    lonely = with_rank(apart, 1, ends=(), sent=(), waits=())
    assert split_waits(lonely) is None


def test_workers_of_an_older_version_tell_of_no_arrivals_and_their_waits_are_no_transfers() -> None:
    split = split_waits(with_rank(with_rank(a_step((0.0,) * 4), 1, came=()), 3, came=()))
    assert split is not None
    assert split.transfer_s[1] == 0.0
