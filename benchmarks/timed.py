"""Seconds of a session's steps, as whoever runs it sees them."""

import time
from collections.abc import Iterator

from varuna.engine.worker.session import Session


def step_times(session: Session) -> Iterator[float]:
    """Run all steps; after each one the seconds since the one before, or since the start."""
    last_s = time.perf_counter()
    for _ in session.steps():
        now_s = time.perf_counter()
        yield now_s - last_s
        last_s = now_s
