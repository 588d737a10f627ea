"""Ranks as forks of one process that has imported and captured everything: a start costs one import, not one each."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run_ranks(size: int, work: Callable[[], Any], *, limit_s: float = 600.0) -> Any:
    """Run ``work`` in ``size`` forks with torchrun's variables; returns what rank 0 returns.

    Fork before anything has run a backward, or started threads.

    Raises:
        SystemExit: a rank failed, or took longer than ``limit_s``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    ranks = [context.Process(target=_rank, args=(rank, size, port, work, theirs)) for rank in range(size)]
    for process in ranks:
        process.start()
    deadline_s = time.monotonic() + limit_s
    try:
        while not mine.poll(0.2):
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
            if failed:
                raise SystemExit(f"rank {failed[0]} failed: see above")
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the ranks did not finish within {limit_s:.0f} s")
        return mine.recv()
    finally:
        for process in ranks:
            process.join(max(0.0, min(10.0, deadline_s - time.monotonic())))
            process.kill()


def _rank(rank: int, size: int, port: int, work: Callable[[], Any], results: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        result = work()
        if rank == 0:
            results.send(result)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # groups and threads of a finished run are not worth waiting for
