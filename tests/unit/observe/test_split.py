"""The split of a step's time, as lines of a terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from tests.unit.observe.test_live_view import drawn, status_of
from varuna.observe.split import compression_line, relay_line, split_table

PREDICTED = {"compute_s": 0.8, "transfer_s": 0.08, "reduce_s": 0.04, "optimizer_s": 0.0, "idle_s": 0.08}


def stage(**seconds: float) -> dict[str, float]:
    return {"step_s": 1.0, "compute_s": 0.5, "waited_s": 0.0, "reduced_s": 0.1, "ending_s": 0.0, **seconds}


def timed(**changes: Any) -> dict[str, Any]:
    stages = [stage(waited_s=0.4), stage(compute_s=0.9)]
    return {"generation": 3, "predicted_s": 1.0, "is_nominal": False, "predicted": None, "stages": stages, **changes}


def lines(status: dict[str, Any], width: int = 80) -> list[str]:
    file = io.StringIO()
    for each in split_table(status, width):
        Console(file=file, width=width, no_color=True).print(each)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_waits_are_told_apart_once_a_step_was_looked_at() -> None:
    status = status_of(timed=timed(), waits=None)
    assert lines(status) == [
        "of a step  compute  all-reduce  optimizer  transfer or idle  whole",
        "measured      70 %        10 %        0 %              20 %  1.0 s",
    ]
    waits = {"generation": 3, "transfer_share": [0.25, 0.0]}
    assert lines({**status, "waits": waits}) == [
        "of a step  compute  transfer  all-reduce  optimizer  idle  whole",
        "measured      70 %       5 %        10 %        0 %  15 %  1.0 s",
    ]
    assert lines({**status, "waits": {**waits, "generation": 2}}) == lines(status)


def test_the_prediction_stands_below_in_the_same_parts() -> None:
    status = status_of(timed=timed(predicted=PREDICTED), waits=None)
    assert lines(status)[2] == "predicted     80 %         4 %        0 %              16 %  1.0 s"
    waits = {"generation": 3, "transfer_share": [0.25, 0.0]}
    assert lines({**status, "waits": waits})[2] == "predicted     80 %       8 %         4 %        0 %   8 %  1.0 s"


@pytest.mark.parametrize("changes", [{"generation": 4}, {"timed": None}, {"timed": timed(stages=[])}])
def test_nothing_is_told_of_another_generation_or_before_times_are_known(changes: dict[str, Any]) -> None:
    assert lines(status_of(**{"timed": timed(predicted=PREDICTED), **changes})) == []


def test_a_line_says_where_messages_are_compressed_and_what_that_saves() -> None:
    stages = [stage(compressed_bytes=3e6, sent_bytes=2e6), stage(compressed_bytes=0.0, sent_bytes=0.0)]
    said = compression_line(status_of(timed=timed(stages=stages)))
    assert said == "compressed     what stages send: 0 (1.50 times smaller); 977 KiB less in a step of each pipeline"
    for other in (timed(), timed(stages=stages[1:]), timed(stages=stages, generation=2), None):
        assert compression_line(status_of(timed=other)) == ""


def test_a_line_says_which_ranks_are_reached_through_another_machine() -> None:
    status = status_of(timed={**timed(), "relayed": [(1, 3), (), (0,)]})
    told = "relayed        through another machine: stage 0 to ranks 1, 3; stage 2 to rank 0"
    assert relay_line(status) == told
    assert relay_line({**status, "generation": 9}) == relay_line(status_of(timed=timed())) == ""


def test_a_low_or_narrow_view_has_no_room_for_it() -> None:
    status = status_of(timed=timed(predicted=PREDICTED), waits=None)
    assert lines(status, width=60) == []
    for rows in range(2, 30):
        found = drawn(status, rows=rows)
        assert len(found) <= rows
        assert any("measured" in line for line in found) == (rows >= 13)
        assert any("w0" in line for line in found) or rows < 13
