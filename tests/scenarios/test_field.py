"""The harness of the field sorts what ends badly on purpose, and outlives it."""

from collections.abc import Iterator

import pytest

from tests.field import judge, provoked, sweep
from tests.field.jobs import Job

pytestmark = pytest.mark.nightly

_BOUND_S = 20.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[sweep.Nursery]:
    made = sweep.Nursery(bound_s=_BOUND_S)
    yield made
    made.close()


@pytest.mark.parametrize("job", provoked.jobs(), ids=lambda job: job.model)
def test_what_ends_badly_is_sorted(job: Job, nursery: sweep.Nursery) -> None:
    expected = {
        "Plain": judge.RIGHT,
        "Waits": judge.HANG,
        "Dies": judge.CRASH,
        "Refused": judge.REFUSED,
        "Strays": judge.WRONG,
        "Aimless": judge.NOTHING,
    }
    verdict = sweep.judged(nursery, job)
    assert verdict["column"] == expected[job.model], verdict["reason"]
