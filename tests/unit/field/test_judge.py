"""Verdicts follow from curves and failures alone."""

from typing import Any

import pytest

from tests.field import judge

CURVE = [[4.5, 1.0], [4.4, 0.9], [4.3, 0.8]]
PLAIN = {"curve": CURVE, "noise": 1e-7, "first_noise": 1e-7, "draws": False}


def found(**parts: Any) -> dict[str, Any]:
    same = {"curve": CURVE}
    return {"capture": {"seconds": 1.0}, "1x1": same, "3x1": same, "2x2": same, **parts}


def off(factor: float, *, step: int = 2) -> dict[str, Any]:
    return {"curve": [[x * factor, y] if number >= step else [x, y] for number, (x, y) in enumerate(CURVE)]}


def failed(message: str, *, kind: str = "ModelError", intended: bool = True) -> dict[str, Any]:
    return {"failure": {"kind": kind, "intended": intended, "message": message, "where": "engine/stage.py:7"}}


GOOD = "batch normalisation mixes the examples of a micro-batch (model.py:7): pass micro_batch=, which no plan changes"


@pytest.mark.parametrize(
    ("parts", "column"),
    [
        (found(), judge.RIGHT),
        (found(**{"2x2": off(1 + 3e-6)}), judge.RIGHT),
        (found(**{"2x2": off(1 + 3e-5)}), judge.WRONG),
        (found(**{"3x1": off(1 + 1e-9)}), judge.WRONG),  # P changes no bit
        (found(**dict.fromkeys(("1x1", "3x1", "2x2"), off(1 + 3e-5))), judge.WRONG),
        (found(**dict.fromkeys(("1x1", "3x1", "2x2"), off(float("nan")))), judge.WRONG),
        (found(capture=failed(GOOD)), judge.REFUSED),
        (found(capture=failed("the constant lifted_tensor_0 has no value; create it in the constructor")), judge.POOR),
        (found(capture=failed("Could not guard on data-dependent expression u0, see model.py:7")), judge.POOR),
        (found(capture=failed("This model cannot be trained by this program, which is a pity.")), judge.POOR),
        (found(capture=failed("net.encoder.layers writes net.encoder.layers.0.seed: return it")), judge.REFUSED),
        (found(capture=failed(GOOD, kind="KeyError", intended=False)), judge.CRASH),
        (found(**{"3x1": failed("no answer from rank 1 within 60 s", kind="LinkError")}), judge.HANG),
        (found(**{"3x1": {"stuck": 45.0}}), judge.HANG),
        ({"capture": {"seconds": 1.0}, "timeout": 120.0}, judge.HANG),
        ({"capture": {"seconds": 1.0}, "died": "SIGSEGV"}, judge.CRASH),
        ({}, judge.CRASH),
    ],
)
def test_columns(parts: dict[str, Any], column: str) -> None:
    assert judge.column_of(PLAIN, parts)[0] == column


def test_what_amplifies_rounding_has_more_room_but_not_in_its_first_loss() -> None:
    noisy = {**PLAIN, "noise": 1e-4}
    late, early = (dict.fromkeys(("1x1", "3x1", "2x2"), off(1 + 2e-4, step=step)) for step in (1, 0))
    assert judge.column_of(noisy, found(**late))[0] == judge.RIGHT
    assert judge.column_of(noisy, found(**early))[0] == judge.WRONG
    assert judge.column_of({**noisy, "first_noise": 1e-3}, found(**early))[0] == judge.RIGHT


def test_a_model_of_two_sections_is_judged_in_two_stages() -> None:
    same = {"curve": CURVE}
    told = {"capture": {"sections": 2, "plans": ["1x1", "2x1", "2x2"]}, "1x1": same, "2x1": same, "2x2": same}
    assert judge.column_of(PLAIN, told) == (judge.RIGHT, "has 2 sections: 2x1 in place of 3x1")
    assert judge.column_of(PLAIN, {**told, "2x1": off(1 + 1e-9)})[0] == judge.WRONG
    assert judge.number_named("cut", "only 4 places are there. Pass cut=4 or leave it out") == 4
    assert judge.number_named("cut", "pass cut=... or lower --stages") is None


def test_only_a_good_refusal_that_names_the_argument_asks_for_it() -> None:
    assert judge.asks_for("micro_batch", found(capture=failed(GOOD))) == GOOD
    assert not judge.asks_for("micro_batch", found(capture=failed(GOOD.replace("micro_batch=", "weight="))))
    assert not judge.asks_for("micro_batch", found(capture=failed(f"{GOOD} lifted_tensor_0")))
    assert not judge.asks_for("micro_batch", found(capture=failed(GOOD, kind="KeyError", intended=False)))
    assert not judge.asks_for("micro_batch", found())
