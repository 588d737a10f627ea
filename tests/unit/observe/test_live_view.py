"""The view of a run, as the lines that stand on a terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from tests.depth import by_depth
from varuna.observe.live_view import clock, live_view, rule, sparkline


def status_of(stages: int = 2, replicas: int = 2, **changes: Any) -> dict[str, Any]:
    names = [f"w{index}" for index in range(stages * replicas)]
    workers = [
        {"name": name, "node": name, "state": "joined", "condition": "ok", "words": "works"} for name in (*names, "w99")
    ]
    told = {
        "state": "training",
        "doing": "",
        "steps": 400,
        "step": 99,
        "loss": 2.5,
        "examples_per_s": 1234.0,
        "left_s": 90.0,
        "step_s": 0.125,
        "timed": {"generation": 3, "predicted_s": 0.1, "is_nominal": False, "stages": []},
        "generation": 3,
        "plan": {
            "stages": stages,
            "replicas": replicas,
            "micro_batch": 2,
            "global_batch": 15,
            "shape": f"{stages}x{replicas}",
            "depths": [stages] * replicas,
            "more": [],
        },
        "members": names,
        "workers": workers,
        "checkpoint_dir": "saved",
        "checkpoint": {"step": 90, "time_s": 0.0},
        "cost": {"words": "$1.00 spent"},
        "curve": [3.0, 2.75, 2.5],
        "marks": [
            {"kind": "begin", "text": "Training begins.", "time_s": 0.0, "step": None},
            {"kind": "checkpoint", "text": "The checkpoint of step 90 is complete.", "time_s": 1.0, "step": 90},
            {"kind": "lost", "text": "worker w3 was killed\nand more", "time_s": 2.0, "step": 95},
        ],
    }
    return {**told, **changes}


def drawn(status: dict[str, Any], width: int = 77, rows: int = 14, **more: Any) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, no_color=True).print(live_view(status, width, rows, **more))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_run_is_seen_whole() -> None:
    first, second = clock(0.0), clock(2.0)
    head, *lines = drawn(status_of())
    assert head.split("  ")[:2] == ["training", "step 100/400"]
    assert head.endswith("25 %  1m 30s left")
    assert lines == [
        "loss 2.5000  █▅▁   1.23k examples/s   a step takes 125 ms, predicted 100 ms",
        "plan 2x2: 2 stages x 2 replicas   8 micro-batches of 2   generation 3",
        f"checkpoint step 90, {first}   $1.00 spent",
        "           stage 0  stage 1",
        "replica 0  w0       w1",
        "replica 1  w2       w3",
        "spare: w99 (works)",
        f"{first}  Training begins.",
        f"{second}  worker w3 was killed",
    ]


def test_a_checkpoint_says_how_far_it_is() -> None:
    at = clock(0.0)

    def kept(**changes: Any) -> str:
        return next(line for line in drawn(status_of(cost=None, **changes), rows=4) if "checkpoint" in line)

    assert kept() == f"checkpoint step 90, {at}"
    saving = {"step": 95, "parts": 1, "of": None}
    assert kept(saving=saving) == f"checkpoint step 90, {at}   step 95: 1 part uploaded"
    assert kept(saving={**saving, "of": 8}).endswith("   step 95: 1 of 8 parts uploaded")
    assert kept(rescues=True) == "no checkpoints"
    resumed = {"step": 90, "time_s": 0.0, "resumed": True}
    assert kept(checkpoint=resumed) == "resumed from the checkpoint of step 90"


def test_without_colours_a_worker_says_in_words_how_it_is() -> None:
    status = status_of()
    status["workers"][1] |= {"condition": "slow", "words": "1.50 times the compute of its peers"}
    del status["workers"][3]
    lines = drawn(status)
    assert "replica 0  w0       w1 slow, 1.50 times" in lines
    assert "replica 1  w2       w3 lost" in lines


@pytest.mark.parametrize("width", by_depth([20, 77], [20, 33, 60, 77, 137]))
@pytest.mark.parametrize("rows", by_depth([1, 5, 14], [1, 2, 5, 9, 14, 24]))
@pytest.mark.parametrize("shape", by_depth([(3, 9), (12, 30)], [(1, 1), (2, 2), (8, 3), (3, 9), (12, 30)]))
def test_a_view_is_never_larger_than_its_room(width: int, rows: int, shape: tuple[int, int]) -> None:
    lines = drawn(status_of(*shape), width, rows, heads=(rule(plain=True),))
    assert len(lines) <= rows
    assert max(len(line) for line in lines) <= width


def test_many_workers_are_signs_and_those_that_do_not_work_are_named() -> None:
    status = status_of(12, 6)
    status["workers"][14] |= {"condition": "silent", "words": "silent for 4.0 s"}
    lines = drawn(status, rows=20, plain=True)
    assert "replica 0   oooooooooooo" in lines
    assert "replica 1   oo?ooooooooo" in lines
    assert "71 of 72 workers work   w14 silent for 4.0 s" in lines
    lines = drawn(status, rows=10)
    assert "71 of 72 workers work   w14 silent for 4.0 s" in lines
    assert not any(line.startswith("replica") for line in lines)


def test_little_room_is_for_the_state_and_the_numbers_first() -> None:
    assert drawn(status_of(), 40, 1) == ["training  step 100/400  1m 30s left"]
    assert drawn(status_of(), 40, 2)[1] == "loss 2.5000  █▅▁   1.23k examples/s"


def test_a_long_sentence_takes_two_lines_at_most() -> None:
    mark = {"kind": "morph", "text": "Morph: " + "a worker was lost and " * 20, "time_s": 0.0, "step": 1}
    lines = drawn(status_of(marks=[mark]), 60)[-2:]
    assert lines[0].startswith(f"{clock(0.0)}  Morph: a worker")
    assert lines[1].startswith("          ")
    assert lines[1].endswith("...")


def test_a_sentence_for_which_there_is_no_room_is_left_out_whole() -> None:
    long = {"kind": "lost", "text": "worker w1 was lost, " * 4, "time_s": 0.0, "step": 1}
    lines = drawn(status_of(marks=[long, long, long]), 60, rows=13)
    assert lines[-2].startswith(clock(0.0))  # the workers have left three lines
    assert lines[-3] == "spare: w99 (works)"
    assert drawn(status_of(marks=[long]), 60, rows=7)[-1].startswith(clock(0.0))


def test_before_the_first_step_a_run_says_what_it_does() -> None:
    status = status_of(
        state="starting",
        doing="starting 4 workers, 1 ready",
        steps=0,
        step=None,
        plan=None,
        members=[],
        workers=[],
        checkpoint_dir=None,
        checkpoint=None,
        cost=None,
        timed=None,
        step_s=None,
        left_s=None,
        marks=[],
    )
    assert drawn(status, doing_s=7.4) == ["starting 4 workers, 1 ready  7 s"]


@pytest.mark.parametrize("timed", [None, {"generation": 2, "is_nominal": False}, {"generation": 3, "is_nominal": True}])
def test_only_a_prediction_from_measured_times_of_this_plan_is_shown(timed: dict[str, Any] | None) -> None:
    lines = drawn(status_of(timed=None if timed is None else {"predicted_s": 0.1, "stages": [], **timed}))
    assert lines[1].endswith("a step takes 125 ms")


def test_a_loop_without_an_end_has_no_bar_and_no_time_left() -> None:
    assert drawn(status_of(steps=10**9, left_s=None))[0] == "training  step 100"


def test_a_loss_that_is_no_number_leaves_a_gap_in_its_curve() -> None:
    assert sparkline([1.0, None, 2.0]) == "▁ █"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([None, 1.0]) == ""
    assert "loss nan" in drawn(status_of(loss=None))[1]


def test_pipelines_of_different_depth_have_a_row_each() -> None:
    plan = {
        "stages": 3,
        "replicas": 2,
        "micro_batch": 2,
        "global_batch": 15,
        "shape": "3x1+2x1",
        "depths": [3, 2],
        "more": [{}],
        "classes": {"H100": 3, "T4": 2},
    }
    lines = drawn(status_of(3, 2, plan=plan, members=["w0", "w1", "w2", "w3", "w4"]))
    assert any(line.startswith("plan 3x1+2x1: 2 pipelines of 3, 2 stages   on 3 H100 and 2 T4") for line in lines)
    head = lines.index("           stage 0  stage 1  stage 2")
    assert lines[head : head + 3] == [
        "           stage 0  stage 1  stage 2",
        "replica 0  w0       w1       w2",
        "replica 1  w3       w4",
    ]
    signs = drawn(status_of(3, 2, plan=plan, members=["w0", "w1", "w2", "w3", "w4"]), width=20)
    assert any("5 of 5" in line for line in signs)
