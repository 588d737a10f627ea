"""One step of a run, measured and simulated, as the panels of a Gantt picture over one time axis."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median

from varuna.core.clock_alignment import Alignment, align, in_words
from varuna.core.errors import FleetError
from varuna.core.plan import Plan
from varuna.core.times import Interval, RankTimeline, StepTimeline
from varuna.core.units import counted, format_duration
from varuna.extras.pictures.gantt import Panel, draw, simulated
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts
from varuna.simulator.step import simulate
from varuna.simulator.trace import StepTrace

MOST_ROWS = 48
"""Stages of replicas that one picture has room for."""
_ENDS = {"reduce": "reduce", "share": "vote", "vote": "vote", "apply": "optimizer", "gather": "optimizer"}


def begin_s(timeline: StepTimeline, alignment: Alignment) -> float:
    """Return the time at which the first rank began its first action, by the aligned clock."""
    return min(
        (_since(rank, alignment, 0.0) + did.begin_s for rank in timeline.ranks for did in rank.actions[:1]), default=0.0
    )


def picture(timeline: StepTimeline, trace: StepTrace | None) -> str:
    """Draw the whole sheet, as SVG.

    Args:
        timeline: what was measured.
        trace: the same step simulated, drawn below if there is one.
    """
    alignment, plan = align(timeline), timeline.plan
    zero_s = begin_s(timeline, alignment)
    by_rank = {rank.rank: rank for rank in timeline.ranks}
    rows_by = list(accumulate(plan.depths))
    shown = max(1, sum(rows <= MOST_ROWS for rows in rows_by))
    panels = []
    for replica in range(shown):
        numbers = plan.ranks_of(replica)
        rows = [by_rank.get(number) for number in numbers]
        bars = tuple(tuple(_bars(rank, alignment, zero_s)) for rank in rows)
        strips = tuple(tuple(_strips(rank, alignment, zero_s)) for rank in rows)
        ranks = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"
        name = "Measured" if plan.replicas == 1 else f"Replica {replica}, measured"
        panels.append(Panel(name, f"{ranks}; {_busy(bars)}", bars, strips))
    if trace is not None:
        below = simulated("Simulated", "", trace)
        panels.append(Panel("Simulated", f"{_CLAIM}; {_busy(below.rows)}", below.rows, _sends(trace)))
    title = f"Step {timeline.step}: {_sizes(plan)}, "
    title += f"{counted(len(plan.micro_batches_of(0)), 'micro-batch')} of {plan.micro_batch} each"
    is_short = max(panel.end_s for panel in panels) < 1
    if is_short:
        panels = [_in_ms(panel) for panel in panels]
    return draw(title, panels, notes=list(_notes(timeline, alignment, shown)), unit="ms" if is_short else "s")


def _sizes(plan: Plan) -> str:
    """``2 stages x 3 replicas``, or ``pipelines of 4, 3 stages``."""
    if not plan.is_uniform:
        return f"pipelines of {', '.join(map(str, plan.depths))} stages"
    return f"{counted(plan.stages, 'stage')} x {counted(plan.replicas, 'replica')}"


def _in_ms(panel: Panel) -> Panel:
    def scaled(rows: tuple[tuple[Interval, ...], ...]) -> tuple[tuple[Interval, ...], ...]:
        return tuple(tuple(bar.since(0.0, 1e-3) for bar in row) for row in rows)

    return replace(panel, rows=scaled(panel.rows), strips=scaled(panel.strips))


_CLAIM = "every action and message takes this step's median"


def _notes(timeline: StepTimeline, alignment: Alignment, shown: int) -> Iterator[str]:
    plan = timeline.plan
    expected = f" Its plan expected {format_duration(plan.step_s)} per step." if plan.step_s else ""
    yield f"Generation {timeline.generation}.{expected} {in_words(alignment)}"
    if shown < plan.replicas:
        yield f"The first {shown} of {plan.replicas} replicas are drawn; as JSON, all of them."
    for rank, why in list(timeline.missing.items())[:3]:
        yield f"Rank {rank} is missing: {why}."
    if len(timeline.missing) > 3:
        yield f"{len(timeline.missing) - 3} more ranks are missing."


def _since(rank: RankTimeline, alignment: Alignment, zero_s: float) -> float:
    """Return the seconds to add to a rank's times."""
    return rank.zero_s + alignment.added_s[rank.clock] - zero_s


def _bars(rank: RankTimeline | None, alignment: Alignment, zero_s: float) -> Iterator[Interval]:
    if rank is None:
        return
    add_s = _since(rank, alignment, zero_s)
    for did in rank.actions:
        yield did.since(-add_s)
    for end in rank.ends:
        if end.kind in _ENDS:
            yield end.since(-add_s)._replace(kind=_ENDS[end.kind])


def _strips(rank: RankTimeline | None, alignment: Alignment, zero_s: float) -> Iterator[Interval]:
    if rank is None:
        return
    add_s = _since(rank, alignment, zero_s)
    for each in (*rank.sent, *rank.sums):
        yield each.since(-add_s)


def _sends(trace: StepTrace) -> tuple[tuple[Interval, ...], ...]:
    """Return the messages of a simulated step: each leaves as its action ends, or a little earlier."""
    last, found = len(trace.rows) - 1, []
    for stage, row in enumerate(trace.rows):
        bars = []
        for action, _, end_s in row:
            kind = action.kind.value
            if kind == "F" and stage < last:
                link = trace.costs.links[stage]
                bars.append(_message("activation", action.micro_batch, end_s, link, link.activation_s))
            elif kind in "BI" and stage:
                link = trace.costs.links[stage - 1]
                bars.append(_message("gradient", action.micro_batch, end_s, link, link.gradient_s))
        found.append(tuple(bars))
    return tuple(found)


def _message(kind: str, micro_batch: int, end_s: float, link: LinkCosts, serialisation_s: float) -> Interval:
    begin_s = end_s - link.early_s
    return Interval(kind, micro_batch, begin_s, begin_s + link.latency_s + serialisation_s)


def _busy(rows: Sequence[Sequence[Interval]]) -> str:
    """Say for which share of the pipeline's time its stages computed."""
    actions = [bar for row in rows for bar in row if bar.kind in "FRBIW"]
    end_s = max((bar.end_s for bar in actions), default=0.0)
    if not end_s:
        return "nothing ran"
    return f"stages compute {sum(bar.seconds for bar in actions) / (end_s * len(rows)):.0%} of the time"


def simulation_of(timeline: StepTimeline) -> StepTrace:
    """Simulate the step, each action and message with the median of what it took.

    Raises:
        FleetError: no rank of some stage has told anything.
    """
    plan = timeline.plan
    micro_batches = max(len(rank.micro_batches) for rank in timeline.ranks) or 1
    return simulate(
        _costs(timeline),
        micro_batches=micro_batches,
        policy=plan.policy,
        stash_limits=plan.first.stash_limits,
        split_last=min(plan.first.split_last, micro_batches),
        empties=plan.first.empties,
    )


def _costs(timeline: StepTimeline) -> PipelineCosts:
    plan = timeline.plan
    by_stage = [[rank for rank in timeline.ranks if plan.slot_of(rank.rank) == k] for k in range(plan.stages)]
    for stage, ranks in enumerate(by_stage):
        if not ranks:
            raise FleetError(
                f"step {timeline.step} cannot be simulated: no rank of stage {stage} has told what it did. Leave out "
                "--simulated, or name another step"
            )
    links = []
    for stage in range(plan.stages - 1):
        activation_s = _median_s(_seconds(by_stage[stage], "activation"))
        gradient_s = _median_s(_seconds(by_stage[stage + 1], "gradient"))
        latency_s = min(activation_s, gradient_s)  # what one direction takes longer counts as its serialisation
        links.append(
            LinkCosts(latency_s=latency_s, activation_s=activation_s - latency_s, gradient_s=gradient_s - latency_s)
        )
    ending_s = min((_after(rank, "reduce") for rank in timeline.ranks), default=0.0)
    stages = tuple(_stage(ranks, keeps_all=plan.first.keeps_all(stage)) for stage, ranks in enumerate(by_stage))
    return PipelineCosts(stages=stages, links=tuple(links), optimizer_s=ending_s)


def _stage(ranks: Sequence[RankTimeline], *, keeps_all: bool) -> StageCosts:
    def of(kind: str) -> float:
        return _median_s([did.seconds for rank in ranks for did in rank.actions if did.kind == kind])

    input_s, weight_s = of("I"), of("W")
    is_split = bool(input_s + weight_s)
    return StageCosts(
        forward_s=of("F"),
        recompute_s=of("R") or of("F"),
        backward_s=of("B") or input_s + weight_s,
        input_s=input_s if is_split else -1.0,
        weight_s=weight_s if is_split else -1.0,
        allreduce_s=min(_reduced_s(rank) for rank in ranks),
        keeps_all=keeps_all,
    )


def _seconds(ranks: Sequence[RankTimeline], kind: str) -> list[float]:
    return [sent.seconds for rank in ranks for sent in rank.sent if sent.kind == kind]


def _median_s(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _reduced_s(rank: RankTimeline) -> float:
    """Return the seconds from the last action to the last sum."""
    last: Sequence[Interval] = rank.actions[-1:]
    return max((end.end_s - did.end_s for did in last for end in rank.ends if end.kind == "reduce"), default=0.0)


def _after(rank: RankTimeline, name: str) -> float:
    """Return the seconds from the end of a part of the step to the end of the step."""
    ended_s = next((end.end_s for end in rank.ends if end.kind == name), rank.end_s)
    return max(0.0, rank.end_s - ended_s)
