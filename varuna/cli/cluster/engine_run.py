"""``varuna run --on ENGINE``: a manager in this process, and agents that one engine starts for it, or several."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from varuna.cli.cluster.engine_options import EngineNodes, nodes_of
from varuna.cli.shared.managing import cluster_run, manage
from varuna.cli.shared.run_options import RunOptions
from varuna.core.errors import UsageError
from varuna.process.console import say
from varuna.process.scripts import check_script

if TYPE_CHECKING:
    from varuna.fleet.engines.engine import Engine, EngineKind, EnginePlace
    from varuna.fleet.engines.growers import Growers
    from varuna.fleet.engines.growth import GrowthConfig
    from varuna.fleet.service.cluster_workers import ClusterWorkers
    from varuna.fleet.service.service import ManagerService

_TOKEN_USES, _TOKEN_LIFE_S = 1_000_000, 365 * 24 * 3600.0  # machines come and go for as long as the run lasts
_PASSED_ON = ("OMP_NUM_THREADS", "VARUNA_PATIENCE")
_PASSED_ON_PREFIXES = ("NCCL_",)


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """A run on an engine, as the options of the command line describe it."""

    how: RunOptions
    engines: tuple[EngineNodes, ...]
    script: Path
    args: tuple[str, ...]
    workers: int | None
    run_dir: Path
    port: int
    advertise: str
    dry_run: bool


def manage_on_engine(run: EngineRun) -> int:
    """Manage to the end; returns the exit code.

    Raises:
        UsageError: no such engine, or a value that it does not accept.
        FleetError: the engine cannot be used, or the port or the folder.
    """
    from varuna.fleet.engines.engine import AgentCommand
    from varuna.fleet.engines.growers import Growers, Source
    from varuna.fleet.state.inputs import FinishRequested
    from varuna.fleet.state.run_events import Notice

    check_script(run.script)
    parts = _parts(run)
    if run.dry_run:
        return _rehearse(parts)
    if (code := _elsewhere(parts)) is not None:
        return code

    def attach(service: "ManagerService[ClusterWorkers]") -> "Growers":
        def end(reason: str, exit_code: int) -> None:
            if exit_code:
                service.stop(reason, exit_code)
            else:
                service.mailbox.post(Notice(text=f"{reason}: ending the run after the current step"))
                service.mailbox.post(FinishRequested(reason))

        join = service.workers.invite(uses=_TOKEN_USES, life_s=_TOKEN_LIFE_S)
        command = AgentCommand(
            join=str(join),
            script=run.script.absolute(),
            args=run.args,
            workers=run.workers,
            environment=_passed_on(is_planned=run.how.given is not None),
        )
        for part in parts:
            part.engine.start(command)
            say(part.engine.describe())
        say(f"`varuna status --run {run.run_dir}` shows the run; the same command again continues it")
        sources = [Source(part.asked.on, part.engine, part.growth) for part in parts]
        return Growers(sources, warn=service.mailbox.warn, end=end, machines=lambda: service.workers.machines)

    managed = cluster_run(
        run.how,
        run.how.settings(run.run_dir, host="0.0.0.0", port=run.port),
        advertise=run.advertise,
        workers=max(1, sum(part.growth.least for part in parts)) * (run.workers or 1),
        again="start the same command again",
    )
    return manage(managed, attach)


@dataclass(frozen=True)
class _Part:
    """One engine of a run."""

    asked: EngineNodes
    kind: "EngineKind"
    place: "EnginePlace"
    values: Mapping[str, str] = field(repr=False)
    engine: "Engine"
    growth: "GrowthConfig"


def _parts(run: EngineRun) -> list[_Part]:
    """All engines, each checked.

    Raises:
        UsageError: no such engine, or a value that it does not accept; or two of them cannot be in one run.
        FleetError: an engine cannot be used.
    """
    from varuna.fleet.engines.engine import EnginePlace
    from varuna.fleet.engines.registry import kind_of

    known = []
    for asked in run.engines:
        kind, where = kind_of(asked.on)
        known.append((asked, kind, kind.values(where, asked.options), kind.growth(*nodes_of(asked.nodes, asked.on))))
    times = Counter(asked.on for asked in run.engines)
    for asked, kind, _, _ in known:
        if times[asked.on] > 1:
            raise UsageError(f"--on {asked.on} is given twice. Give its nodes once, as --nodes LEAST:MOST.")
        if kind.elsewhere is not None and len(known) > 1:
            raise UsageError(
                f"--on {asked.on} keeps the manager itself: no other --on can be given beside it. Leave one out."
            )
    parts = []
    seen: Counter[str] = Counter()
    for asked, kind, values, growth in known:
        seen[kind.name] += 1
        place = EnginePlace(run_dir=run.run_dir.absolute(), most=growth.most, number=seen[kind.name])
        parts.append(_Part(asked, kind, place, values, kind.make(place, values), growth))
    return parts


def _elsewhere(parts: Sequence[_Part]) -> int | None:
    """The exit code of a run whose only engine has the manager; None: this process is the manager."""
    part = parts[0]
    return None if part.kind.elsewhere is None else part.kind.elsewhere(part.place, part.values, sys.argv[1:])


def _rehearse(parts: Sequence[_Part]) -> int:
    """Show what would be asked for, and change nothing."""
    from varuna.fleet.engines.engine import Rehearsing

    for part in parts:
        if not isinstance(part.engine, Rehearsing):
            raise UsageError(f"--dry-run: --on {part.asked.on} cannot say what it would do. Leave out --dry-run.")
        calls = part.engine.rehearse(part.growth.most)
        for call in calls or ["nothing: the group has this size, or the one that its own bounds allow"]:
            print(f"{part.asked.on}: {call}" if len(parts) > 1 else call)
    return 0


def _passed_on(*, is_planned: bool) -> dict[str, str]:
    """Variables of this shell that workers elsewhere must have too; their plans come from the manager."""
    passed = {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    return {**passed, **({"VARUNA_CALIBRATION": "none"} if is_planned else {})}
