"""Verdicts are kept in a file that several sweeps write to and a later one goes on from."""

import json
from pathlib import Path

from tests.field import judge, sweep


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


def test_a_reason_names_no_folder_of_this_machine() -> None:
    said = "no value at /home/me/.venv/lib/python3.11/site-packages/transformers/loss.py:7 (/data/x/.field/timm/a.py:2)"
    assert judge.placed(said) == "no value at site-packages/transformers/loss.py:7 (timm/a.py:2)"
