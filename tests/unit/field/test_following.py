"""A sweep does what a refusal asks for, one thing after another, and none twice."""

from typing import Any

from tests.field.jobs import Attempt, Job
from tests.field.samples import Shapes
from tests.field.sweep import CUT_POINTS, MICRO_BATCH, _as_told, begun_within


def refused(message: str) -> dict[str, Any]:
    failure = {"kind": "ModelError", "intended": True, "message": f"{message} (see model.py:7)", "where": ""}
    return {"capture": {"failure": failure}}


def test_refusals_are_followed_until_they_say_nothing_new() -> None:
    attempt = Attempt(Job("library", "family", "Model", "class"))
    attempt = _as_told(attempt, refused("one section is too few for two stages: pass cut=..."))
    assert attempt.cut == CUT_POINTS
    attempt = _as_told(attempt, refused("the model can be cut in 4 places. Pass cut=4"))
    assert attempt.cut == 4
    assert _as_told(attempt, refused("cut elsewhere with cut=[...]")) == attempt
    attempt = _as_told(attempt, refused("batch normalisation mixes examples: pass micro_batch="))
    assert (attempt.micro_batch, attempt.per_micro_batch, attempt.even) == (MICRO_BATCH, False, True)
    asked = refused("the loss mixes examples: pass micro_batch= and loss=varuna.Loss(..., per_micro_batch=True)")
    attempt = _as_told(attempt, asked)
    assert attempt.per_micro_batch
    assert _as_told(attempt, asked) == attempt


def test_no_job_is_begun_after_its_time() -> None:
    now_s = iter((0.0, 0.0, 90.0, 110.0))
    jobs = [Job("library", "family", name, "class") for name in "abcd"]
    assert [job.model for job in begun_within(jobs, 100.0, lambda: next(now_s))] == ["a", "b"]


def test_a_label_shorter_than_the_text_has_no_end_token() -> None:
    class Config:
        vocab_size, eos_token_id = 96, 1

    shapes = Shapes(Config(), frozenset(), "ctc", 16, False)
    assert len(shapes.tokens(0, 3)) == 3
    assert 1 in shapes.tokens(0, 16)
