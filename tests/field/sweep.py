"""Runs jobs one after another in forked processes, none of which can take the sweep with it.

Two processes have imported the libraries before: this one, which knows nothing of Varuna and forks the references, and
one that has imported Varuna, too, and forks what is judged.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.field import eager, judge
from tests.field.jobs import Attempt, Job, patience

REFERENCE_S, ATTEMPT_S = 60.0, 120.0
MOST_CPU_S = 600.0
"""Seconds of CPU up to which a job that computes beyond its bound may go on: it is slow, not stuck."""
_LOOK_S, _COMPUTES_S = 10.0, 0.5
CUT_POINTS = 12
MICRO_BATCH = 4
"""Micro-batch of a model whose refusal asks for ``micro_batch=``: batch statistics of two are all noise."""
_MEMORY_BYTES = 16 * 2**30
"""No job may take the machine's: an allocation beyond fails in its process."""
_ANSWER_BYTES = 2**20
_REASON = 600
"""Characters of it that are kept."""


def forked(work: Callable[[], Any], bound_s: float) -> tuple[Any, str]:
    """Compute in a child; return the result, as JSON, and why there is nothing if it is None."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reads)
        _silence()
        try:
            answer = json.dumps(work()).encode()
        except BaseException as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writes)
    deadline_s, data = time.monotonic() + bound_s, b""
    with os.fdopen(reads, "rb", buffering=0) as pipe:
        os.set_blocking(pipe.fileno(), False)
        while time.monotonic() < deadline_s:
            part = pipe.read(_ANSWER_BYTES)
            if part == b"":
                break
            if part is None:
                time.sleep(0.01)
            else:
                data += part
        timed_out = time.monotonic() >= deadline_s
    _end(pid)
    if timed_out:
        return None, f"not done after {bound_s:.0f} s"
    return (json.loads(data), "") if data else (None, "died")


def _end(pid: int) -> None:
    """Kill a child and all of its session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def reference(attempt: Attempt) -> dict[str, Any]:
    """Run eager in a child, and return its results; ``cannot`` if it fails."""

    def work() -> dict[str, Any]:
        try:
            return asdict(eager.reference(attempt))
        except eager.CannotTrain as error:
            return {"cannot": str(error)}

    found, why = forked(work, REFERENCE_S * patience())
    if found is None:
        return {"cannot": why}
    return {"cannot": found["error"]} if "error" in found else dict(found)


class Nursery:
    """A process with Varuna imported, which forks a child for each attempt."""

    def __init__(self, bound_s: float | None = None) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            try:
                _serve(theirs, bound_s)
            finally:
                os._exit(0)
        theirs.close()

    def run(self, attempt: Attempt, *, loud: bool = False) -> dict[str, Any]:
        """Everything that one attempt told before it ended or was ended."""
        order = {"attempt": asdict(attempt), "loud": loud}
        self._ours.send(json.dumps(order).encode())
        answer = self._ours.recv(_ANSWER_BYTES)
        if not answer:
            raise RuntimeError("the process that forks attempts is gone")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End it."""
        self._ours.close()
        os.waitpid(self._pid, 0)


def _serve(orders: socket.socket, bound_s: float | None) -> None:
    from tests.scenarios.warm import import_everything

    import_everything()
    while order := orders.recv(_ANSWER_BYTES):
        told = json.loads(order)
        fields = told["attempt"]
        attempt = Attempt(**{**fields, "job": Job(**fields["job"])})
        orders.send(json.dumps(_attempted(attempt, bound_s or ATTEMPT_S * patience(), loud=told["loud"])).encode())


def _attempted(attempt: Attempt, bound_s: float, *, loud: bool) -> dict[str, Any]:
    from tests.field import trained

    with tempfile.TemporaryDirectory(prefix="varuna-field-") as name:
        folder = Path(name)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if not loud:
                _silence()
            try:
                trained.run(attempt, folder, 0.9 * bound_s)
            finally:
                os._exit(0)
        status, cpu_s = _waited_for(pid, bound_s)
        found = _told(folder, ("capture",))
        found |= _told(folder, judge.parts_of(found))
        found["stack"] = "; ".join(_stacks(folder))
        if status is None:
            found["timeout"], found["cpu_s"] = bound_s, cpu_s
        elif os.WIFSIGNALED(status):
            found["died"] = f"{signal.Signals(os.WTERMSIG(status)).name} {found['stack']}"
        return found


def _told(folder: Path, parts: tuple[str, ...]) -> dict[str, Any]:
    """Read the results that an attempt has told of these parts."""
    return {part: json.loads((folder / part).read_text()) for part in parts if (folder / part).exists()}


def _waited_for(pid: int, bound_s: float) -> tuple[int | None, float]:
    """Status of a child, None where it had to be killed, and seconds of CPU of its session; none of that is left."""
    deadline_s, before_s = time.monotonic() + bound_s, 0.0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # ranks that outlived it
            return status, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline_s:
            cpu_s = _cpu_of_session(pid)
            if not before_s + _COMPUTES_S < cpu_s < MOST_CPU_S:
                break
            deadline_s, before_s = time.monotonic() + _LOOK_S, cpu_s
        time.sleep(0.02)
    _end(pid)
    return None, cpu_s


def _cpu_of_session(session: int) -> float:
    """Seconds of CPU of all living processes of a session."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stacks(folder: Path) -> list[str]:
    """Return the innermost line of Varuna's where the first thread of each process, which is told last, stood."""
    found = []
    for path in sorted(folder.glob("stacks*")):
        first = path.read_text().rsplit("most recent call first", 1)[-1]
        lines = [line.strip() for line in first.splitlines() if "/varuna/" in line]
        if lines:
            place = lines[0].split("/varuna/", 1)[-1].replace('", line ', ":").replace(" in ", " ")
            found.append(f"{path.name.removeprefix('stacks') or 'job'}: {place}")
    return found


def judged(nursery: Nursery, job: Job, *, loud: bool = False, briefly: bool = False) -> dict[str, Any]:
    """Return the verdict on a job, as it goes into the results."""
    began_s = time.monotonic()
    attempt, asked = Attempt(job, briefly=briefly), ""
    expected = reference(attempt)
    found: dict[str, Any] = {}
    if "cannot" not in expected:
        attempt = replace(attempt, candidate=expected["candidate"])
        found = nursery.run(attempt, loud=loud)
        while (as_told := _as_told(attempt, found)) != attempt:
            if as_told.even and not attempt.even:
                asked = judge.asks_for("micro_batch", found)
                if "cannot" in (expected := reference(as_told)):
                    break
            attempt, found = as_told, nursery.run(as_told, loud=loud)
    cannot = expected.get("cannot")
    column, reason = (judge.NOTHING, cannot) if cannot else judge.column_of(expected, found)
    return {
        "job": job.name,
        "column": column,
        "reason": judge.placed(reason)[:_REASON],
        "asked": judge.placed(asked),
        "seconds": round(time.monotonic() - began_s, 1),
        "sections": found.get("capture", {}).get("sections"),
        "noise": expected.get("noise"),
        "parameters": expected.get("parameters"),
        **({"curves": _curves(expected, found)} if column == judge.WRONG else {}),
    }


def _curves(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    plans = {plan: found.get(plan, {}).get("curve") for plan in judge.parts_of(found)[1:]}
    return {"plain": expected.get("curve"), **plans}


def _as_told(attempt: Attempt, found: dict[str, Any]) -> Attempt:
    """The next attempt, as a user would make it who does what a refusal says; the same where there is nothing to do."""
    if asked := judge.asks_for("cut", found):
        points = judge.number_named("cut", asked) or CUT_POINTS
        if attempt.cut is None or points < attempt.cut:
            return replace(attempt, cut=points)
    elif asked := judge.asks_for("micro_batch", found):
        within = attempt.per_micro_batch or "per_micro_batch=" in asked
        return replace(attempt, micro_batch=MICRO_BATCH, per_micro_batch=within, even=True)
    return attempt


def done(results: Path) -> dict[str, dict[str, Any]]:
    """The newest verdict of each job."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text().splitlines() if line.strip()]
    return {line["job"]: line for line in lines}


def compact(results: Path) -> None:
    """Keep the newest verdict of each job, in the order of names. No sweep may be running."""
    found = done(results)
    results.write_text("".join(json.dumps(found[name]) + "\n" for name in sorted(found)))


def in_parts(jobs: Sequence[Job], parts: int, sweep_part: Callable[[Sequence[Job]], None]) -> bool:
    """Sweep every N-th job in each of N processes at once; return whether all of them got to their end."""
    children = []
    for number in range(parts):
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                sweep_part(jobs[number::parts])
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        children.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in children]
    return ends == [0] * parts


def begun_within(jobs: Iterable[Job], most_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Job]:
    """The first of the jobs: none is begun after so many seconds, and the last may take longer."""
    began_s = clock()
    for job in jobs:
        if clock() - began_s > most_s:
            return
        yield job


def sweep(
    jobs: Iterable[Job], results: Path, *, commit: str, loud: bool = False, briefly: bool = False
) -> Iterator[dict[str, Any]]:
    """Judge jobs in order, each written to ``results`` as soon as it is known."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    nursery = Nursery()
    try:
        for job in jobs:
            verdict = {**judged(nursery, job, loud=loud, briefly=briefly), "commit": commit}
            with results.open("a") as file:
                file.write(json.dumps(verdict) + "\n")
            yield verdict
    finally:
        nursery.close()
