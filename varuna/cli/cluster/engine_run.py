"""``varuna run --on ENGINE``: a manager in this process, and agents that the engine starts for it."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from varuna.cli.cluster.engine_options import nodes_of
from varuna.cli.cluster.managing import ClusterRun, manage_cluster
from varuna.core.errors import UsageError
from varuna.process.console import say
from varuna.process.scripts import check_script

if TYPE_CHECKING:
    from varuna.calibration.format import Calibration
    from varuna.fleet.clouds.grower import Grower
    from varuna.fleet.engines.engine import Engine
    from varuna.fleet.service.cluster_workers import ClusterWorkers
    from varuna.fleet.service.service import ManagerService
    from varuna.fleet.state.run_events import Priced

_TOKEN_USES, _TOKEN_LIFE_S = 1_000_000, 365 * 24 * 3600.0  # machines come and go for as long as the run lasts
_PASSED_ON = ("OMP_NUM_THREADS", "VARUNA_PATIENCE")
_PASSED_ON_PREFIXES = ("NCCL_", "GLOO_")


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What the command line says of a run on an engine; see there."""

    on: str
    nodes: str
    options: Mapping[str, str] = field(repr=False)
    script: Path
    args: tuple[str, ...]
    workers: int | None
    run_dir: Path
    port: int
    advertise: str
    stages: int | None
    memory_bytes: int | None
    given: "Calibration | None"
    price: "Priced | None"
    json_log: Path | None
    new: bool
    overwrite: bool
    dry_run: bool


def manage_on_engine(run: EngineRun) -> int:
    """Manage to the end; returns the exit code.

    Raises:
        UsageError: no such engine, or a value that it does not accept.
        FleetError: the engine cannot be used, or the port or the folder.
    """
    from varuna.fleet.clouds.grower import Grower
    from varuna.fleet.engines.engine import AgentCommand, EnginePlace
    from varuna.fleet.engines.registry import engine_of, kind_of
    from varuna.fleet.service.service import ServiceConfig
    from varuna.fleet.state.inputs import FinishRequested
    from varuna.fleet.state.run_events import Notice

    kind, where = kind_of(run.on)
    least, most = nodes_of(run.nodes)
    growth = kind.growth(least, most)
    check_script(run.script)
    engine_place = EnginePlace(run_dir=run.run_dir.absolute(), most=most)
    engine = engine_of(run.on, engine_place, run.options)
    if run.dry_run:
        return _rehearse(engine, run.on, most)
    if kind.elsewhere is not None:
        code = kind.elsewhere(engine_place, kind.values(where, run.options), sys.argv[1:])
        if code is not None:
            return code

    def attach(service: "ManagerService[ClusterWorkers]") -> "Grower":
        def end(reason: str, exit_code: int) -> None:
            if exit_code:
                service.stop(reason, exit_code)
            else:
                service.mailbox.post(Notice(text=f"{reason}: ending the run after the current step"))
                service.mailbox.post(FinishRequested(reason))

        join = service.workers.invite(uses=_TOKEN_USES, life_s=_TOKEN_LIFE_S)
        engine.start(
            AgentCommand(
                join=str(join),
                script=run.script.absolute(),
                args=run.args,
                workers=run.workers,
                environment=_passed_on(is_planned=run.given is not None),
            )
        )
        say(engine.describe())
        say(f"`varuna status --run {run.run_dir}` shows the run; the same command again continues it")
        grower = Grower(engine, growth, warn=service.mailbox.warn, end=end, machines=lambda: service.workers.machines)
        grower.want(most)
        return grower

    place = ServiceConfig(
        run_dir=run.run_dir,
        host="0.0.0.0",
        port=run.port,
        json_log=run.json_log,
        new=run.new,
        overwrite=run.overwrite,
        price=run.price,
    )
    managed = ClusterRun(
        place=place,
        advertise=run.advertise,
        workers=max(1, least) * (run.workers or 1),
        stages=run.stages,
        memory_bytes=run.memory_bytes,
        given=run.given,
    )
    return manage_cluster(managed, attach, "start the same command again")


def _rehearse(engine: "Engine", on: str, nodes: int) -> int:
    """Show what would be asked for, and change nothing."""
    from varuna.fleet.engines.engine import Rehearsing

    if not isinstance(engine, Rehearsing):
        raise UsageError(f"--dry-run: --on {on} cannot say what it would do. Leave out --dry-run.")
    for call in engine.rehearse(nodes) or ["nothing: the group has this size, or the one that its own bounds allow"]:
        print(call)
    return 0


def _passed_on(*, is_planned: bool) -> dict[str, str]:
    """Variables of this shell that workers elsewhere must have too; their plans come from the manager."""
    passed = {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    return {**passed, **({"VARUNA_CALIBRATION": "none"} if is_planned else {})}
