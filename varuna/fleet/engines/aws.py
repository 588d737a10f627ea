"""AWS Auto Scaling as an engine: the group's launch template starts an agent as each machine boots."""

from collections.abc import Mapping
from pathlib import Path

from varuna.core.errors import UsageError
from varuna.fleet.clouds.aws import AutoScalingProvider
from varuna.fleet.clouds.original_size import OriginalSize
from varuna.fleet.engines.engine import AgentCommand, EngineKind, EngineOption, EnginePlace, keep_join


class AutoScalingEngine(AutoScalingProvider):
    """A group whose machines read the JOIN string from where their boot script finds it.

    Args:
        group: its name.
        run_dir: keeps the group's size before the run, and the JOIN string.
    """

    def __init__(self, group: str, run_dir: Path) -> None:
        super().__init__(group, before=OriginalSize(run_dir, group))
        self._run_dir, self._name = run_dir, group

    def start(self, command: AgentCommand) -> None:
        """Keep the JOIN string for whoever gives it to the machines."""
        keep_join(self._run_dir, command.join)

    def describe(self) -> str:
        """Where machines come from."""
        return (
            f"machines come from Auto Scaling group {self._name}; their boot script needs the JOIN string in "
            f"{self._run_dir / 'join'}"
        )


def _make(place: EnginePlace, options: Mapping[str, str]) -> AutoScalingEngine:
    if not options["group"]:
        raise UsageError("--on aws needs the name of an Auto Scaling group: --on aws:GROUP")
    return AutoScalingEngine(options["group"], place.run_dir)


AWS = EngineKind(
    name="aws",
    summary="an AWS Auto Scaling group, whose machines start agents as they boot",
    options=(EngineOption("group", "GROUP", "Auto Scaling group to ask for machines; its VMs must start agents."),),
    make=_make,
)
