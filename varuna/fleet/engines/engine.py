"""The interface between a run and an engine that starts its agents: Slurm, an autoscaling group, ...

How a node ends is the agent's to tell: SIGTERM to an agent is a notice of 25 s, and one that falls silent loses its
lease. An engine keeps the number of agents, starts each anew where it can, and gives all of them back at the end.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from varuna.core.errors import UsageError
from varuna.fleet.engines.growth import GrowthConfig
from varuna.fleet.engines.provider import Provider
from varuna.fleet.net.join_string import JOIN_VARIABLE, parse_invitation


@dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """The agent that an engine starts on each of its places.

    Args:
        join: JOIN string that admits every machine of the run, also those to come. It is a secret: it belongs into the
            environment (``environ``) or a private file (``keep_join``), never into ``argv``, which others can see.
        script: training script; an absolute path.
        args: its arguments.
        workers: per agent; None: one per GPU, or one.
        environment: more variables for the agent and its workers; no secrets.
    """

    join: str = field(repr=False)
    script: Path
    args: tuple[str, ...] = ()
    workers: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """Eight hexadecimal digits that name the run's folder: the same for each of its managers, and no secret."""
        return parse_invitation(self.join).fingerprint[:8]

    def argv(self, *, python: str = sys.executable, join_file: str = "", state_dir: str = "") -> list[str]:
        """The command line of an agent.

        Args:
            python: the interpreter there, with the same version of Varuna.
            join_file: private file with the JOIN string; empty: it is in the environment.
            state_dir: where the agent keeps its identity, so that a restarted one is the same machine.
        """
        flags: list[str] = []
        for name, value in (("--join-file", join_file), ("--state-dir", state_dir), ("--workers", self.workers)):
            flags += [name, str(value)] if value else []
        return [python, "-m", "varuna", "agent", *flags, "--", str(self.script), *self.args]

    def environ(self) -> dict[str, str]:
        """Variables for the agent, with the JOIN string: for engines that keep a process's environment private."""
        return {**self.environment, JOIN_VARIABLE: self.join}


class Engine(Provider, Protocol):
    """A provider of agents. One thread uses it at a time; no call takes longer than about half a minute.

    ``resize`` and ``size`` may raise ``CancelledThere`` when a person has ended the run with the engine's own tools.
    ``close`` gives everything back that this run has there, also what a manager before this one asked for.
    """

    def start(self, command: AgentCommand) -> None:
        """Learn what to start, once, before the first ``resize``; finds what a manager before this one has started.

        Raises:
            FleetError: the engine cannot be used.
        """
        ...

    def describe(self) -> str:
        """One line for the user, after ``start``: where agents run, and how to look at them there."""
        ...


@runtime_checkable
class Rehearsing(Protocol):
    """An engine that can say what it would do."""

    def rehearse(self, nodes: int) -> list[str]:
        """The calls that asking for so many nodes would make now: nothing is changed.

        Raises:
            FleetError: the engine cannot be used.
        """
        ...


@dataclass(frozen=True)
class EngineOption:
    """An option of ``varuna run`` that one engine adds: ``--NAME METAVAR``. Values are checked by the engine."""

    name: str
    metavar: str
    help: str
    default: str = ""


@dataclass(frozen=True)
class EnginePlace:
    """Facts that an engine may know before there is a run.

    Args:
        run_dir: the run's folder, absolute; it may not exist before ``start``.
        most: nodes that will be asked for, at most.
        number: 1 for the first engine of its kind in the run, 2 for the second one, ...
    """

    run_dir: Path
    most: int
    number: int = 1


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine before it is used: what the command line must know of it. It imports nothing that is not installed.

    Args:
        name: of ``--on``.
        summary: a few words, for lists.
        options: its own options. The first one may also follow the name and a colon: ``--on aws:trainers``.
        make: from the place and all options' values; raises UsageError with the next move, such as what to install.
        elsewhere: has the command line's words run where the engine keeps a manager, and returns the exit code in the
            end; None: this process is that manager. Engines without it have the manager in the user's own process.
        every_s: seconds between two looks at an engine that has the requested size.
        most_backoff_s: the same, at most, while it has fewer.
    """

    name: str
    summary: str
    options: tuple[EngineOption, ...]
    make: Callable[[EnginePlace, Mapping[str, str]], Engine]
    elsewhere: Callable[[EnginePlace, Mapping[str, str], Sequence[str]], int | None] | None = None
    every_s: float = 30.0
    most_backoff_s: float = 300.0

    def growth(self, least: int, most: int) -> GrowthConfig:
        """Return the bounds and the patience with which the engine is asked."""
        return GrowthConfig(
            least=least,
            most=most,
            every_s=self.every_s,
            first_backoff_s=min(15.0, self.most_backoff_s),
            most_backoff_s=self.most_backoff_s,
        )

    def values(self, where: str, given: Mapping[str, str]) -> dict[str, str]:
        """All options' values, by name: ``where`` is what followed the colon.

        Raises:
            UsageError: it followed a colon and was given as an option too, or the engine has none.
        """
        values = {option.name: given.get(option.name) or option.default for option in self.options}
        if not where:
            return values
        first = self.options[0].name if self.options else ""
        if not first or given.get(first):
            why = f"--{first} is given twice" if first else f"{self.name} needs nothing after its name"
            raise UsageError(f"--on {self.name}:{where}: {why}. Leave one out.")
        return {**values, first: where}
