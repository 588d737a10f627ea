"""The environment of ``python train.py`` and ``torchrun train.py``."""

import pytest

from varuna.core.errors import UsageError
from varuna.membership.detect import solo_from_environment


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VARUNA_STAGES", "abc", "VARUNA_STAGES=abc must be a number of stages, at least 1"),
        ("VARUNA_STAGES", "0", "VARUNA_STAGES=0 must be a number of stages, at least 1"),
        ("VARUNA_MEMORY_PER_WORKER", "lots", "VARUNA_MEMORY_PER_WORKER=lots is not a size. Write a number with a unit"),
        ("VARUNA_NEW", "yes", "VARUNA_NEW=yes must be 1 .start afresh. or overwrite"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        solo_from_environment()


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VARUNA_STAGES", "VARUNA_MEMORY_PER_WORKER", "VARUNA_NEW"):
        monkeypatch.setenv(name, "")
    assert solo_from_environment().world.size == 1
