"""A measured step made from a simulated one: ranks on machines whose clocks differ."""

from collections.abc import Sequence

from varuna.core.plan import Pipeline, Plan
from varuna.core.times import Interval, RankTimeline, StepTimeline
from varuna.simulator.costs import LinkCosts, uniform
from varuna.simulator.step import simulate

LATENCY_S = 0.25
PLAN = Plan(
    micro_batch=1,
    global_batch=6,
    pipelines=(Pipeline(replicas=2, bounds=(0, 2, 4), stash_limits=(3, 3)),),
    policy="gpipe",
    step_s=20.0,
)


def a_step(ahead_s: Sequence[float], missing: int | None = None) -> StepTimeline:
    """Step 7 of ``PLAN``; each rank is a machine of its own, whose clock shows ``ahead_s`` more than the true time."""
    trace = simulate(uniform(2, link=LinkCosts(latency_s=LATENCY_S)), micro_batches=3, policy="gpipe")
    ranks = []
    for rank, error_s in enumerate(ahead_s):
        stage = PLAN.place_of(rank).stage
        row, before_s, waits = list(trace.rows[stage]), 0.0, []
        for action, begin_s, end_s in row:
            if begin_s > before_s:
                waits.append(Interval(action.kind.value, action.micro_batch, before_s, begin_s))
            before_s = end_s
        makes = ("activation", "F") if stage == 0 else ("gradient", "B")
        sent = [
            Interval(makes[0], action.micro_batch, end_s, end_s + LATENCY_S, 100)
            for action, _, end_s in row
            if action.kind.value == makes[1]
        ]
        gets = ("activation", "F") if stage == 1 else ("gradient", "B")
        came = [
            Interval(gets[0], action.micro_batch, end_s + LATENCY_S, end_s + LATENCY_S)
            for action, _, end_s in trace.rows[1 - stage]
            if action.kind.value == gets[1]
        ]
        done_s = row[-1][2]
        phases = (("reduce", done_s, 20.0), ("vote", 20.0, 20.5), ("apply", 20.5, 21.0))
        ranks.append(
            RankTimeline(
                generation=1,
                step=7,
                rank=rank,
                clock=f"machine {error_s}",
                zero_s=1000.0 + error_s,
                micro_batches=tuple(PLAN.micro_batches_of(PLAN.place_of(rank).replica)),
                actions=tuple(Interval(a.kind.value, a.micro_batch, begin_s, end_s) for a, begin_s, end_s in row),
                waits=tuple(waits),
                ends=tuple(Interval(name, -1, begin_s, end_s) for name, begin_s, end_s in phases),
                sent=tuple(sent),
                came=tuple(came),
                sums=(Interval("reduce", -1, done_s, 20.0, 400),),
            )
        )
    gone = {} if missing is None else {missing: "worker w9: killed by SIGKILL"}
    told = tuple(rank for rank in ranks if rank.rank != missing)
    return StepTimeline(step=7, generation=1, plan=PLAN, ranks=told, missing=gone)
