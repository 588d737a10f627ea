import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleet.support import make_job, make_plan
from varuna.core.messages import PROFILE_STEPS, ProfilePart, ProfileSteps, ShowStep, StepShown, ToWorker
from varuna.core.times import Interval, RankTimeline
from varuna.fleet.manager.step_desk import StepRecorder
from varuna.fleet.page.step_sheet import DeskAnswer
from varuna.fleet.run_folder.timelines import kept_steps, read_timeline
from varuna.fleet.state.run_events import GenerationRecord, GenerationStarted, StepRecorded, WaitsSplit, WorkerLost

STEPS = 100
PLAN = make_plan(make_job(steps=STEPS), 2, None, stages=2)


class Desk:
    """A desk with workers that answer when they are told to."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[tuple[str, ToWorker]] = []
        self.now_s, self.folder = 0.0, folder
        self.errors: list[BaseException] = []
        self.splits: list[WaitsSplit] = []
        self.desk = StepRecorder(
            folder,
            lambda worker, message: self.sent.append((worker, message)),
            steps=lambda: STEPS,
            fail=self.errors.append,
            told=self.splits.append,
            now_s=lambda: self.now_s,
        )

    def begin(self, generation: int, *members: str, first_step: int = 0) -> None:
        record = GenerationRecord(generation=generation, plan=PLAN, members=members, cause="", first_step=first_step)
        self.desk.add_event(GenerationStarted(record=record))

    def record(self, step: int) -> None:
        self.desk.add_event(StepRecorded(step=step, generation=0, loss=1.0, plan=PLAN, examples_per_s=1.0))

    def tell(self, worker: str, step: int, rank: int, generation: int = 0) -> None:
        did = (Interval("F", 0, 0.0, 1.0),)
        shown = RankTimeline(
            generation=generation, step=step, rank=rank, clock="c", zero_s=0.0, micro_batches=(0,), actions=did
        )
        self.desk.add_shown(worker, StepShown(step=step, timeline=shown))

    def asked(self, step: int) -> list[str]:
        return [worker for worker, message in self.sent if message == ShowStep(step=step)]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def words(answer: DeskAnswer) -> str:
    text: str = json.loads(answer.body)["error"]
    return text


def whole(desk: Desk, step: int) -> Any:
    """The answer once it is on disk."""
    desk.desk._disk.wait_for(lambda: None, 10.0)
    answer = desk.desk.timeline(step)
    assert answer.status == 200
    return json.loads(answer.body)


def test_a_typical_step_and_the_last_ones_are_kept_without_being_asked_for(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    assert desk.asked(4) == desk.asked(STEPS - 1) == ["a", "b"]
    desk.desk.add_event(WorkerLost(worker="a", rank=0, cause="worker a froze"))
    desk.begin(1, "c", "d", "b", first_step=50)  # b is a spare now, but knows the last step
    assert (desk.asked(49), desk.asked(54)) == (["b"], ["c", "d"])
    desk.tell("b", 49, 1)
    desk.desk.close()
    assert kept_steps(desk.folder) == [49]
    assert [path.stat().st_mode & 0o077 for path in desk.folder.glob("timelines/*")] == [0], "for their owner alone"
    found = read_timeline(desk.folder, 49)
    assert found is not None
    assert [rank.rank for rank in found.ranks] == [1]
    assert desk.errors == []


def test_a_step_that_lies_ahead_is_waited_for(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.record(10)
    for _ in range(2):
        assert json.loads(desk.desk.timeline(20).body) == {"step": 20, "newest": 10}
    assert desk.asked(20) == ["a", "b"]  # once each
    desk.tell("a", 20, 0)
    assert desk.desk.timeline(20).status == 202
    desk.tell("b", 20, 1)
    assert [rank["rank"] for rank in whole(desk, 20)["ranks"]] == [0, 1]


def test_whoever_died_in_the_middle_is_named_with_the_cause(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.desk.timeline(20)
    desk.tell("a", 20, 0)
    desk.desk.add_event(WorkerLost(worker="b", rank=1, cause="worker b killed by SIGKILL"))
    assert whole(desk, 20)["missing"] == {"1": "worker b killed by SIGKILL"}


def test_a_worker_that_does_not_answer_is_not_waited_for_beyond_a_bound(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.desk.timeline(20)
    desk.tell("a", 20, 0)
    desk.now_s = 11.0
    assert desk.desk.timeline(20).status == 202  # it is being written
    assert whole(desk, 20)["missing"] == {"1": "worker b: it did not answer within 10 s"}


def test_those_who_join_later_are_asked_too_and_a_step_that_ran_again_counts_once(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.desk.timeline(20)
    desk.tell("a", 20, 0)
    desk.begin(1, "c", "a", first_step=20)
    assert "c" in desk.asked(20)
    desk.tell("c", 20, 0, generation=1)
    desk.tell("a", 20, 1, generation=1)
    desk.tell("b", 20, 1)
    found = whole(desk, 20)
    assert (found["generation"], [rank["rank"] for rank in found["ranks"]]) == (1, [0, 1])


def test_a_step_that_nobody_remembers_is_an_error_that_says_what_there_is(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.record(90)
    desk.tell("a", 4, 0)
    desk.tell("b", 4, 1)
    whole(desk, 4)
    assert desk.desk.timeline(30).status == 202
    for worker in "ab":
        desk.desk.add_shown(worker, StepShown(step=30, timeline=None))
    assert words(desk.desk.timeline(30)) == (
        "step 30 is over and was not recorded: workers remember only their newest steps. Recorded: 4. Name one of "
        "these, or a step that lies ahead: the newest is 90"
    )
    assert desk.desk.timeline(30).status == 202  # asked again, looked for again


def test_steps_that_cannot_be_are_refused_at_once(desk: Desk) -> None:
    assert words(desk.desk.timeline(None)).startswith("no step is over yet")
    desk.begin(0, "a", "b")
    assert words(desk.desk.timeline(STEPS)) == f"there is no step {STEPS}: the run has steps 0 to {STEPS - 1}"
    answers = [desk.desk.timeline(step).status for step in range(10, 40)]
    assert set(answers) == {202, 429}


def test_a_profile_comes_in_pieces_or_with_the_reason_why_not(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.record(10)
    assert words(desk.desk.profile(2, 20, 22)) == "there is no rank 2: ranks are 0 to 1"
    assert "step 10 is over" in words(desk.desk.profile(1, 10, 12))
    assert desk.desk.profile(1, 20, 20 + PROFILE_STEPS).status == 422
    assert desk.desk.profile(1, 20, 22).status == 202
    assert desk.sent[-1] == ("b", ProfileSteps(first=20, last=22))
    desk.desk.add_shown("a", ProfilePart(first=20, number=0, count=1, data=b"not asked"))
    desk.desk.add_shown("b", ProfilePart(first=20, number=1, count=2, data=b"two"))
    assert desk.desk.profiled(1, 20).status == 202
    desk.desk.add_shown("b", ProfilePart(first=20, number=0, count=2, data=b"one"))
    assert desk.desk.profiled(1, 20) == DeskAnswer(200, b"onetwo")
    desk.desk.profile(0, 30, 30)
    desk.desk.add_event(WorkerLost(worker="a", rank=0, cause="killed by SIGKILL"))
    assert words(desk.desk.profiled(0, 30)) == "rank 0 made no profile: its worker is gone: killed by SIGKILL"
    assert desk.desk.profiled(0, 40).status == 404


def test_once_a_minute_a_step_is_looked_at_for_what_waits_are_for_and_not_kept(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.record(10)
    assert desk.asked(12) == []
    desk.now_s = 61.0
    desk.record(11)
    desk.record(12)
    assert (desk.asked(13), desk.asked(14)) == (["a", "b"], [])
    desk.tell("a", 13, 0)
    desk.tell("b", 13, 1)
    desk.desk._disk.wait_for(lambda: None, 10.0)
    assert [(split.step, split.generation, split.transfer_s) for split in desk.splits] == [(13, 0, (0.0, 0.0))]
    assert kept_steps(desk.folder) == []
    desk.now_s = 100.0
    desk.record(14)
    assert desk.asked(16) == []
    desk.now_s = 122.0
    desk.record(15)
    assert desk.asked(17) == ["a", "b"]
    assert desk.desk.timeline(17).status == 202  # somebody wants it: it is kept after all
    desk.tell("a", 17, 0)
    desk.tell("b", 17, 1)
    assert whole(desk, 17)["step"] == 17
    assert kept_steps(desk.folder) == [17]


def test_a_step_that_a_worker_has_not_told_of_says_nothing_of_waits(desk: Desk) -> None:
    desk.begin(0, "a", "b")
    desk.desk.add_event(WorkerLost(worker="b", rank=1, cause="gone"))
    desk.tell("a", 4, 0)
    desk.desk._disk.wait_for(lambda: None, 10.0)
    assert kept_steps(desk.folder) == [4]
    assert desk.splits == []
