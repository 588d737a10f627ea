"""One step as a trace for ui.perfetto.dev and chrome://tracing: the JSON of their "Trace Event Format".

A process for each rank; in it a track for actions, one for waits, one for the end of the step, and asynchronous ones
for messages and all-reduces, of which several may be under way. Arrows lead from a message to the action that needs it.
"""

from collections.abc import Iterator
from typing import Any

from varuna.core.clock_alignment import NEEDS, Alignment, align, in_words, receiver_of
from varuna.core.times import RankTimeline, StepTimeline
from varuna.extras.pictures.step_picture import begin_s
from varuna.simulator.trace import StepTrace

Event = dict[str, Any]
_ACTIONS, _WAITS, _END = 1, 2, 3
_TRACKS = {_ACTIONS: "actions", _WAITS: "waits", _END: "end of the step"}
_NAMES = {"F": "forward", "R": "recompute", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_SIMULATED = 1_000_000
"""Numbers of simulated processes begin here: no run has as many ranks."""


def chrome_trace(timeline: StepTimeline, trace: StepTrace | None) -> dict[str, Any]:
    """Return the whole document; times in microseconds from the first action.

    Args:
        timeline: what was measured.
        trace: the same step simulated, as further processes, if there is one.
    """
    alignment = align(timeline)
    zero_s = begin_s(timeline, alignment)
    events = [event for rank in timeline.ranks for event in _rank(timeline, rank, alignment, zero_s)]
    if trace is not None:
        events += _simulated(trace)
    missing = {f"rank {rank} is missing": why for rank, why in timeline.missing.items()}
    told = {"step": timeline.step, "generation": timeline.generation, "plan": timeline.plan.model_dump(mode="json")}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**told, "clocks": in_words(alignment), **missing},
    }


def _rank(timeline: StepTimeline, rank: RankTimeline, alignment: Alignment, zero_s: float) -> Iterator[Event]:
    plan, pid = timeline.plan, rank.rank
    replica, stage = plan.place_of(pid)
    mine = rank.micro_batches
    add_s = rank.zero_s + alignment.added_s[rank.clock] - zero_s
    yield from _named(pid, f"rank {pid}: replica {replica}, stage {stage}", _TRACKS)
    for track, word, rows in ((_ACTIONS, "", rank.actions), (_WAITS, "waits for ", rank.waits)):
        for did in rows:
            args = {"micro_batch": did.micro_batch, "of_global_batch": mine[did.micro_batch]}
            name = f"{word}{did.kind}{did.micro_batch}"
            kind = _NAMES[did.kind] if track == _ACTIONS else "wait"
            yield _whole(pid, track, name, kind, did.begin_s + add_s, did.end_s + add_s, args)
    for end in rank.ends:
        yield _whole(pid, _END, end.kind, "end", end.begin_s + add_s, end.end_s + add_s, {})
    for sent in rank.sent:
        name, args = f"{sent.kind} {sent.micro_batch}", {"bytes": sent.size_bytes}
        key = f"{pid} {name}"
        yield from _asynchronous(pid, f"{sent.kind}s", name, key, sent.begin_s + add_s, sent.end_s + add_s, args)
        yield from _arrow(timeline, rank, sent.kind, sent.micro_batch, key, alignment, zero_s)
    for number, each in enumerate(rank.sums):
        key, args = f"{pid} sum {number}", {"bytes": each.size_bytes}
        yield from _asynchronous(pid, "all-reduces", "all-reduce", key, each.begin_s + add_s, each.end_s + add_s, args)


def _arrow(
    timeline: StepTimeline,
    rank: RankTimeline,
    kind: str,
    micro_batch: int,
    key: str,
    alignment: Alignment,
    zero_s: float,
) -> Iterator[Event]:
    """Draw an arrow from the action that sent a message to the one that needs it."""
    to = receiver_of(timeline.plan, rank.rank, kind)
    receiver = next((each for each in timeline.ranks if each.rank == to), None)
    if receiver is None:
        return
    made = next(
        (did for did in rank.actions if (did.micro_batch, did.kind in NEEDS[kind]) == (micro_batch, True)), None
    )
    used = next(
        (did for did in receiver.actions if (did.micro_batch, did.kind in NEEDS[kind]) == (micro_batch, True)), None
    )
    if made is None or used is None:
        return
    for phase, who, at_s in (("s", rank, made.end_s), ("f", receiver, used.begin_s)):
        since_s = who.zero_s + alignment.added_s[who.clock] - zero_s
        event: Event = {"ph": phase, "cat": "message", "name": kind, "id": key, "pid": who.rank, "tid": _ACTIONS}
        # An arrow ends at the slice that encloses its end, and begins within the one that sends.
        yield event | {"ts": _us(at_s + since_s) - (phase == "s") * 0.001} | ({"bp": "e"} if phase == "f" else {})


def _simulated(trace: StepTrace) -> Iterator[Event]:
    for stage, row in enumerate(trace.rows):
        pid = _SIMULATED + stage
        yield from _named(pid, f"simulated: stage {stage}", {_ACTIONS: "actions", _END: "end of the step"})
        for action, start_s, end_s in row:
            args = {"micro_batch": action.micro_batch}
            name = f"{action.kind.value}{action.micro_batch}"
            yield _whole(pid, _ACTIONS, name, _NAMES[action.kind.value], start_s, end_s, args)
        yield _whole(pid, _END, "reduce", "end", trace.ends_s[stage], trace.reduced_s[stage], {})
        yield _whole(pid, _END, "apply", "end", trace.step_s - trace.costs.optimizer_s, trace.step_s, {})


def _named(pid: int, process: str, tracks: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _whole(pid: int, tid: int, name: str, kind: str, start_s: float, end_s: float, args: Event) -> Event:
    start_us = _us(start_s)
    length_us = round(max(0.0, _us(end_s) - start_us), 3)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": kind,
        "ts": start_us,
        "dur": length_us,
        "args": args,
    }


def _asynchronous(
    pid: int, kind: str, name: str, key: str, start_s: float, end_s: float, args: Event
) -> Iterator[Event]:
    for phase, at_s in (("b", start_s), ("e", end_s)):
        yield {"ph": phase, "pid": pid, "tid": 0, "cat": kind, "name": name, "id": key, "ts": _us(at_s), "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
