import json
from collections import Counter
from itertools import pairwise
from typing import Any

from tests.unit.extras.pictures.timelines import a_step
from varuna.extras.pictures.chrome_trace import chrome_trace
from varuna.extras.pictures.step_picture import simulation_of

Event = dict[str, Any]
NEEDED = {
    "M": {"name", "args"},
    "X": {"name", "ts", "dur"},
    "b": {"name", "cat", "id", "ts"},
    "e": {"name", "cat", "id", "ts"},
    "s": {"name", "cat", "id", "ts"},
    "f": {"name", "cat", "id", "ts", "bp"},
}
"""By phase: what the published format asks for, besides pid and tid."""


def check_format(document: dict[str, Any]) -> list[Event]:
    """Refuse what a reader of the Trace Event Format would drop, nest wrongly or join wrongly."""
    events: list[Event] = json.loads(json.dumps(document, allow_nan=False))["traceEvents"]
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in events:
        assert NEEDED[event["ph"]] | {"pid", "tid", "ph"} <= event.keys()
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert all(isinstance(event[key], int | float) for key in ("ts", "dur") if key in event)
        assert event.get("dur", 0) >= 0
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for (pid, tid), slices in tracks.items():
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
        slices.sort(key=lambda each: each["ts"])
        for before, after in pairwise(slices):  # one after another: a reader would nest or drop others
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002
    pairs = Counter((e["cat"], e["id"], e["ph"]) for e in events if e["ph"] in "besf")
    assert set(pairs.values()) <= {1}
    for cat, key, phase in pairs:
        assert (cat, key, {"b": "e", "e": "b", "s": "f", "f": "s"}[phase]) in pairs
    for event in (e for e in events if e["ph"] in "sf"):  # an arrow is bound to the slice that encloses its end
        around = tracks[event["pid"], event["tid"]]
        assert any(each["ts"] <= event["ts"] <= each["ts"] + each["dur"] for each in around)
    return events


def test_a_trace_is_of_the_published_format_and_has_a_track_per_rank_and_kind() -> None:
    step = a_step((0.0, 5.0, -5.0, 0.0))
    events = check_format(chrome_trace(step, None))
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert {"rank 3: replica 1, stage 1", "actions", "waits", "end of the step"} <= names
    for rank in range(4):
        done = Counter(e["name"] for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", rank, 1))
        assert {f"{kind}{number}": 1 for kind in "FB" for number in range(3)}.items() <= done.items()
    of_all = {e["args"]["of_global_batch"] for e in events if e["pid"] == 3 and e["name"] == "F0"}
    assert of_all == {3}
    assert min(e["ts"] for e in events if "ts" in e) == 0.0
    assert sum(e["ph"] == "s" for e in events) == 4 * 3


def test_a_simulated_step_is_further_processes_and_missing_ranks_are_named() -> None:
    step = a_step((0.0, 0.0, 0.0, 0.0), missing=2)
    document = chrome_trace(step, simulation_of(step))
    events = check_format(document)
    assert document["otherData"]["rank 2 is missing"] == "worker w9: killed by SIGKILL"
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        *(f"rank {rank}: replica {rank // 2}, stage {rank % 2}" for rank in (0, 1, 3)),
        "simulated: stage 0",
        "simulated: stage 1",
    }
