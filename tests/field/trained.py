"""The same job with Varuna: captured once, then run by forked ranks in every plan.

Runs in a process of its own that may hang, be killed or crash; what it found goes to a file line by line.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.field.catalogue import ways
from tests.field.jobs import CLIP, GLOBAL_BATCH, RATE, SEED, STEPS, Attempt, Prepared, patience
from varuna.job.options import Loss
from varuna.job.spec import JobSpec
from varuna.job.start import begin
from varuna.membership.detect import solo_from_environment

DEEPEST = 3
"""Stages of the deepest plan; fewer where the model has fewer sections."""
PLAN_S = 45.0
"""For three steps of a tiny model, of which one takes milliseconds; longer on a busy machine."""
_AFTER_FIRST_S = 10.0
"""Between the end of the first failing rank of a plan and the killing of the others."""
_LOOK_S, _COMPUTES_S, _MOST = 10.0, 0.5, 3.0
"""Ranks that used so many seconds of CPU since the last look get more time, up to so many times the bound."""


@dataclass(frozen=True)
class Failure:
    """The end of a run that did not train.

    Attributes:
        kind: the class of the exception, or "signal".
        intended: raised on purpose: a ``VarunaError``.
        message: what the user reads.
        where: the last line of code, where it is a crash.
    """

    kind: str
    intended: bool
    message: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def failure_of(error: BaseException) -> Failure:
    """Return the part of an exception that a user would see."""
    from varuna.core.errors import VarunaError

    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}varuna{os.sep}" in frame.filename]
    last = (ours or frames)[-1] if frames else None
    where = "" if last is None else f"{last.filename.rsplit('/varuna/', 1)[-1]}:{last.lineno}"
    return Failure(type(error).__name__, isinstance(error, VarunaError), str(error), where)


def _tell(folder: Path, name: str, value: Any) -> None:
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(value))
    temporary.replace(folder / name)


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=RATE)


def _spec(prepared: Prepared, attempt: Attempt) -> JobSpec:
    return JobSpec(
        model=prepared.build,
        dataset=prepared.dataset,
        optimizer=_sgd,
        loss=Loss(prepared.loss, per_micro_batch=attempt.per_micro_batch),
        global_batch=GLOBAL_BATCH,
        seed=SEED,
        clip_grad_norm=CLIP,
        micro_batch=attempt.micro_batch,
        cut=attempt.cut,
        device=torch.device("cpu"),
    )


def run(attempt: Attempt, folder: Path, dumps_after_s: float) -> None:
    """Capture, then train in every plan; results are files in ``folder``.

    ``capture``: seconds and the plans that follow, or a failure. Each plan, such as ``3x1``: a curve, or a failure.
    ``stacks``: where everything stood after ``dumps_after_s``.
    """
    stacks = (folder / "stacks").open("w")
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(dumps_after_s, file=stacks)
    began_s = time.monotonic()
    try:
        prepared = next(islice(ways(attempt), attempt.candidate or 0, None))
        spec = _spec(prepared, attempt)
        captured = spec.partitioned  # before the ranks fork
    except BaseException as error:
        _tell(folder, "capture", {"failure": vars(failure_of(error))})
        return
    faulthandler.cancel_dump_traceback_later()  # its thread is not in forks, which would wait for it
    sections = len(captured.facts.sections)
    plans = {f"{stages}x{replicas}": (stages, replicas) for stages, replicas in plans_of(sections, attempt.briefly)}
    seconds = time.monotonic() - began_s
    _tell(folder, "capture", {"seconds": seconds, "sections": sections, "plans": list(plans)})
    for number, (name, (stages, replicas)) in enumerate(plans.items()):
        found = _in_plan(spec, stages, replicas, folder)
        _tell(folder, name, found)
        if "failure" in found and number == 0:
            return


def plans_of(sections: int, briefly: bool) -> tuple[tuple[int, int], ...]:
    """Stages and replicas of each plan: alone, as deep as may be, and two stages twice; briefly, the last.

    A model that cannot be cut at all is asked for two stages nevertheless: that is a refusal to be seen.
    """
    return ((2, 2),) if briefly else ((1, 1), (max(2, min(DEEPEST, sections)), 1), (2, 2))


def _in_plan(spec: JobSpec, stages: int, replicas: int, folder: Path) -> dict[str, Any]:
    """Fork the ranks of a plan and wait for all of them."""
    size = stages * replicas
    port = _free_port()
    ranks: dict[int, int] = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _be_rank(spec, rank, size, stages, port, folder)
                code = 0
            finally:
                os._exit(code)
        ranks[pid] = rank
    ends: dict[int, int] = {}
    bound_s = PLAN_S * patience()
    began_s = time.monotonic()
    deadline_s, look_s, used_s = began_s + bound_s, began_s + bound_s - _LOOK_S, 0.0
    while len(ends) < size and time.monotonic() < deadline_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            if not ends and look_s < time.monotonic() < began_s + _MOST * bound_s:
                before_s, used_s, look_s = used_s, cpu_s_of(ranks), time.monotonic() + _LOOK_S
                if used_s - before_s > _COMPUTES_S:  # ranks that compute are slow; those that are stuck only wait
                    deadline_s = look_s + _LOOK_S
            continue
        ends[ranks.pop(pid)] = status
        if status != 0:
            deadline_s = min(deadline_s, time.monotonic() + _AFTER_FIRST_S)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not ends:
        return {"stuck": time.monotonic() - began_s}
    return _together(folder, size, ends)


def _together(folder: Path, size: int, ends: dict[int, int]) -> dict[str, Any]:
    """One result of all ranks': the failure of the first that has one of its own, else the curve that all have."""
    told = {rank: _read(folder / f"rank{rank}") for rank in range(size)}
    for rank in range(size):
        (folder / f"rank{rank}").unlink(missing_ok=True)
    failures = [each["failure"] for each in told.values() if each and "failure" in each]
    failures.sort(key=lambda failure: failure["kind"] in ("LinkError", "FleetError"))
    if failures:
        return {"failure": failures[0]}
    for rank, status in ends.items():
        if status != 0:
            kind = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
            return {"failure": vars(Failure(kind, False, f"rank {rank} died", ""))}
    curves = [each["curve"] for each in told.values() if each]
    if any(curve != curves[0] for curve in curves):
        return {"failure": vars(Failure("UnequalRanks", False, "ranks report different losses", ""))}
    return {"curve": curves[0], "micro_batch": next(iter(told.values()))["micro_batch"]}


def _be_rank(spec: JobSpec, rank: int, size: int, stages: int, port: int, folder: Path) -> None:
    os.environ["VARUNA_STAGES"] = str(stages)
    os.environ["VARUNA_CALIBRATION"] = "none"  # every plan has the same micro-batches, whatever is fastest today
    if size > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    stacks = (folder / f"stacks{size}.{rank}").open("w")
    faulthandler.dump_traceback_later(0.9 * PLAN_S * patience(), file=stacks)
    try:
        curve, micro_batch = [], 0
        for step in begin(spec, STEPS, solo_from_environment()).steps():
            curve.append((step.totals.loss, step.totals.grad_norm))
            micro_batch = step.plan.micro_batch
    except BaseException as error:
        _tell(folder, f"rank{rank}", {"failure": vars(failure_of(error))})
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)
    _tell(folder, f"rank{rank}", {"curve": curve, "micro_batch": micro_batch})
    if rank == 0 and size > 1:
        time.sleep(0.3)  # it hosts the store in which the others say good-bye


def cpu_s_of(pids: Iterable[int]) -> float:
    """Seconds of CPU that these processes have used so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
