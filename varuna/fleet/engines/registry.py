"""All engines by name: what ``varuna run --on`` accepts."""

from collections.abc import Mapping
from functools import cache

from varuna.core.errors import UsageError
from varuna.core.extras import extras
from varuna.fleet.engines.engine import EngineKind
from varuna.fleet.engines.slurm import SLURM

LOCAL = "local"
"""This machine alone: no engine, and the default."""


@cache
def kinds() -> Mapping[str, EngineKind]:
    """Return all engines, by name."""
    return {kind.name: kind for kind in (SLURM, *extras("engines"))}


def kind_of(on: str) -> tuple[EngineKind, str]:
    """The engine that ``--on NAME`` or ``--on NAME:WHERE`` names, and what follows the colon.

    Raises:
        UsageError: there is no such engine.
    """
    name, _, where = on.partition(":")
    known = kinds()
    if name not in known:
        listed = "".join(f"\n  {kind.name:<8}{kind.summary}" for kind in known.values())
        raise UsageError(f"--on {on}: no engine is called {name!r}. There are:\n  {LOCAL:<8}this machine{listed}")
    return known[name], where
