"""Pages hear everything once, then changes; after a break only what they missed."""

import asyncio
import json
from typing import Any

from starlette.types import Message

from varuna.core.plan import Pipeline, Plan
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.page.live_feed import EventStream, LiveFeed, difference, position
from varuna.fleet.state.run_events import (
    CheckpointCommitted,
    GenerationRecord,
    GenerationStarted,
    Morphed,
    Notice,
    RunEnded,
    StepRecorded,
    WorkerLost,
)

PLAN = Plan(micro_batch=2, global_batch=8, pipelines=(Pipeline(bounds=(0, 2, 4), stash_limits=(2, 1)),))


def step(number: int, loss: float = 1.5) -> StepRecorded:
    return StepRecorded(step=number, generation=0, loss=loss, examples_per_s=8.0, plan=PLAN)


def started(generation: int) -> GenerationStarted:
    record = GenerationRecord(
        generation=generation, plan=PLAN, members=("w0", "w1"), cause="<b>w2</b> was killed", first_step=generation
    )
    return GenerationStarted(record=record)


def heard(text: str) -> list[tuple[str, str, Any]]:
    found = []
    for frame in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in frame.split("\n"))
        found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


class Run:
    def __init__(self, changes_kept: int = 4096) -> None:
        self.chronicle = Chronicle(changes_kept=changes_kept)
        self.now_s = 0.0
        self.told: dict[str, Any] = {"state": "training", "workers": [{"name": "w0", "pid": 1}]}
        self.feed = LiveFeed(self.chronicle, lambda: self.told, lambda: self.now_s, tick_s=0.001, stall_s=0.01)

    def page(self, last: str = "") -> EventStream:
        return self.feed.stream(last, lambda: True)


def test_a_page_hears_everything_once_and_then_what_changes() -> None:
    run = Run()
    run.chronicle.add_event(started(0), 1.0)
    run.chronicle.add_event(step(0), 2.0)
    page = run.page()
    (_, kind, whole), (_, status, now) = heard(page.news())
    assert (kind, status) == ("whole", "status")
    assert whole["steps"]["recent"] == [[0, 2.0, 1.5, 8.0]]
    assert [(band["stages"], band["step"]) for band in whole["bands"]] == [(2, 0)]
    assert now == {**run.told, "all": True}
    assert page.news() == ""
    run.chronicle.add_event(step(1), 3.0)
    run.chronicle.add_event(step(2, float("nan")), 4.0)
    run.chronicle.add_event(Notice(text="two\nlines\n\n: and more", warning=True), 5.0)
    run.chronicle.add_event(CheckpointCommitted(step=3), 6.0)
    changes = heard(page.news())
    assert [kind for _, kind, _ in changes] == ["steps", "mark", "checkpoint", "mark"]
    assert changes[0][2] == [[1, 3.0, 1.5, 8.0], [2, 4.0, None, 8.0]]
    assert changes[1][2]["text"] == "two\nlines\n\n: and more"


def test_a_page_that_comes_back_hears_what_it_missed_and_everything_where_too_much_is_gone() -> None:
    run = Run(changes_kept=3)
    for number in range(4):
        run.chronicle.add_event(step(number), float(number))
    page = run.page()
    last = heard(page.news())[0][0]
    run.chronicle.add_event(step(4), 4.0)
    run.chronicle.add_event(step(5), 5.0)
    (said, kind, rows), _ = heard(run.page(last).news())
    assert (kind, [row[0] for row in rows]) == ("steps", [4, 5])
    assert (position(last, run.chronicle.life), position(said, run.chronicle.life)) == (4, 6)
    for later in range(6, 9):
        run.chronicle.add_event(step(later), float(later))
    assert heard(run.page(last).news())[0][1] == "whole"
    for strange in ("other-5", "", f"{run.chronicle.life}-99", f"{run.chronicle.life}--1", f"{run.chronicle.life}-x"):
        assert heard(run.page(strange).news())[0][1] == "whole"


def test_of_workers_only_those_that_changed_are_told() -> None:
    before = {"state": "training", "workers": [{"name": name, "s": 1, "node": "n"} for name in "abc"]}
    changed, new = {"name": "b", "s": 2, "node": "n"}, {"name": "d", "s": 1, "node": "n"}
    after = {"state": "training", "workers": [{"name": "a", "s": 1, "node": "n"}, changed, new]}
    assert difference(before, after) == {"workers": [{"name": "b", "s": 2}, new], "gone": ["c"]}


def test_the_story_is_told_in_sentences_and_bands_are_bounded() -> None:
    chronicle = Chronicle(most_bands=8)
    for generation in range(40):
        begun = started(generation)
        chronicle.add_event(begun, float(generation))
        done = begun.record.model_copy(update={"recovery_seconds": 0.4, "steps_redone": 1})
        chronicle.add_event(Morphed(record=done, old_plan=PLAN), generation + 0.5)
    chronicle.add_event(WorkerLost(worker="w1", rank=1, cause="worker w1 killed by SIGKILL"), 50.0)
    chronicle.add_event(RunEnded(exit_code=1, text="x" * 5000, worker="w1"), 51.0)
    _, whole = chronicle.describe()
    bands, marks = whole["bands"], whole["marks"]
    assert isinstance(bands, list)
    assert isinstance(marks, list)
    assert len(bands) <= 8
    assert (bands[0]["time_s"], bands[-1]["generation"], bands[-1]["recovery_s"]) == (0.0, 39, 0.4)
    assert marks[1]["text"] == "Morph: <b>w2</b> was killed. Plan still 2x1 after 400 ms; 1 step redone."
    assert marks[-2]["text"] == "worker w1 killed by SIGKILL"
    assert len(marks[-1]["text"]) < 700


async def serve(stream: EventStream, feed: LiveFeed, reads: bool) -> tuple[str, int]:
    """A page that reads until it is told that there is no more, or one that does not read at all."""
    body, pages = bytearray(), []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if not reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        pages.append(feed.pages)
        body.extend(message.get("body", b""))
        if body and not feed.closing:
            feed.closing = True

    await stream({"type": "http"}, receive, send)
    return body.decode(), max(pages)


def test_a_page_that_does_not_read_is_dropped_and_the_others_hear_the_end() -> None:
    run = Run()
    assert asyncio.run(serve(run.page(), run.feed, reads=False)) == ("", 1)
    run.chronicle.add_event(RunEnded(exit_code=0, text="done"), 1.0)
    text, _ = asyncio.run(serve(run.page(), run.feed, reads=True))
    assert heard(text)[0][2]["ended"]["exit_code"] == 0
    assert run.feed.pages == 0
    assert not run.feed.has_room
    assert asyncio.run(serve(run.feed.stream("", lambda: False), run.feed, reads=True))[0] == ""


def test_a_run_that_goes_on_from_a_checkpoint_has_that_until_the_next_one() -> None:
    chronicle = Chronicle()
    record = started(0).record.model_copy(update={"first_step": 40})
    chronicle.add_event(GenerationStarted(record=record), 1.0)
    told = chronicle.newest(100, 2.0)
    assert told["checkpoint"] == {"step": 40, "time_s": 1.0, "resumed": True}
    assert chronicle.describe()[1]["marks"] == told["marks"]
    assert "Training goes on at step 40 on 2 workers" in str(told["marks"])
    chronicle.add_event(CheckpointCommitted(step=60), 3.0)
    assert chronicle.newest(100, 4.0)["checkpoint"] == {"step": 60, "time_s": 3.0}


def test_a_notice_that_a_machine_will_leave_is_a_mark_of_its_own() -> None:
    chronicle = Chronicle()
    chronicle.add_event(Notice(text="node n3 will leave in 30 s (preemption notice)", departs=True), 1.0)
    marks = chronicle.newest(10, 2.0)["marks"]
    assert isinstance(marks, list)
    assert [mark["kind"] for mark in marks] == ["leaving"]
