"""Verdicts are kept in a file that several sweeps write to and a later one goes on from."""

import json
from pathlib import Path

from tests.field import sweep


def test_the_newest_verdict_of_each_job_is_kept_in_the_order_of_names(tmp_path: Path) -> None:
    results = tmp_path / "verdicts.jsonl"
    told = [("b", "crash"), ("a", "right"), ("b", "right")]
    results.write_text("".join(json.dumps({"job": job, "column": column}) + "\n" for job, column in told))

    sweep.compact(results)

    assert [json.loads(line) for line in results.read_text().splitlines()] == [
        {"job": "a", "column": "right"},
        {"job": "b", "column": "right"},
    ]


def test_nothing_is_known_before_the_first_sweep(tmp_path: Path) -> None:
    assert sweep.done(tmp_path / "verdicts.jsonl") == {}
