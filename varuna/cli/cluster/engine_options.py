"""``varuna run`` with the options of the engine that ``--on`` names, in its help and in what it accepts.

``--on`` may be given several times. What follows one of them, and is an option of its engine, belongs to it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typer._click import Context, Parameter
from typer._coercion import TypeDescriptor
from typer.core import TyperCommand, TyperOption
from typer.models import OptionInfo

from varuna.core.errors import UsageError

if TYPE_CHECKING:
    from varuna.fleet.engines.engine import EngineOption

_ENGINE, _VALUES, _MORE = "varuna.engine", "varuna.engine.values", "varuna.engine.more"


@dataclass(frozen=True)
class EngineNodes:
    """Nodes of one ``--on``."""

    on: str
    nodes: str
    """of ``--nodes``"""
    options: Mapping[str, str] = field(repr=False)
    """the engine's own, by name"""


class EngineCommand(TyperCommand):
    """A command whose options depend on ``--on``."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Look for the engines' names first; all but the first engine's part is taken out of the words."""
        kept, engines = engine_groups(args)
        ctx.meta[_ENGINE], ctx.meta[_MORE] = engines[0].on if engines else "", engines[1:]
        return super().parse_args(ctx, kept)

    def get_params(self, ctx: Context) -> list[Parameter]:
        """The command's own options, and the engine's."""
        own = super().get_params(ctx)
        return [*own[:-1], *_options_of(ctx.meta.get(_ENGINE, "")), own[-1]]  # --help stays last


def engine_values(context: Context) -> dict[str, str]:
    """Return the values that the command line gives to the engine's own options, by name."""
    return dict(context.meta.get(_VALUES, {}))


def more_engines(context: Context) -> tuple[EngineNodes, ...]:
    """Return the engines of all ``--on`` after the first."""
    return tuple(context.meta.get(_MORE, ()))


def nodes_of(text: str, on: str) -> tuple[int, int]:
    """Least and most nodes of ``--nodes``, for this ``--on``.

    Raises:
        UsageError: it is missing, or something else.
    """
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    if found is None:
        raise UsageError(f"--on {on} needs --nodes LEAST:MOST after it, such as --nodes 4:32, and not {text!r}")
    return int(found[1]), int(found[2] or found[1])


def engine_groups(args: Sequence[str]) -> tuple[list[str], list[EngineNodes]]:
    """The words without those of further ``--on``; and all engines, the first one's words being those that stay.

    Raises:
        UsageError: an option of a further one is given twice.
    """
    kept: list[str] = []
    engines: list[EngineNodes] = []
    at = 0
    while at < len(args) and args[at] != "--" and not args[at].endswith(".py"):  # there the script begins
        name, has_value, value = args[at].removeprefix("--").partition("=")
        known = {"on", *(("nodes", *_engine_options(engines[-1].on)) if engines else ())}
        words = args[at : at + 1]
        if args[at].startswith("--") and name in known and not has_value:
            words, value = args[at : at + 2], "".join(args[at + 1 : at + 2])
        if args[at].startswith("--") and name in known:
            engines = _with_option(engines, name, value)
        if len(engines) < 2 or not args[at].startswith("--") or name not in known:
            kept += words
        at += len(words)
    return [*kept, *args[at:]], engines


def _with_option(engines: Sequence[EngineNodes], name: str, value: str) -> list[EngineNodes]:
    """Another engine, or one more option of the last one."""
    if name == "on":
        return [*engines, EngineNodes(value, "", {})]
    *others, last = engines
    given = last.nodes if name == "nodes" else last.options.get(name)
    if others and given:
        raise UsageError(f"--on {last.on}: --{name} is given twice. Leave one out.")
    options = last.options if name == "nodes" else {**last.options, name: value}
    return [*others, EngineNodes(last.on, value if name == "nodes" else last.nodes, options)]


def _engine_options(on: str) -> "dict[str, EngineOption]":
    """By name."""
    from varuna.fleet.engines.registry import kinds

    kind = kinds().get(on.partition(":")[0])
    return {} if kind is None else {option.name: option for option in kind.options}


def _options_of(on: str) -> list[TyperOption]:
    info = OptionInfo()
    return [
        TyperOption(
            param_decls=[_identifier(option.name), f"--{option.name}"],
            type_descriptor=TypeDescriptor(annotation=str, parameter_info=info, file_annotation=None),
            metavar=option.metavar,
            help=option.help,
            default=None,
            expose_value=False,
            callback=_keep,
            rich_help_panel=f"Options of --on {on.partition(':')[0]}",
        )
        for option in _engine_options(on).values()
    ]


def _identifier(name: str) -> str:
    return "engine_" + name.replace("-", "_")


def _keep(context: Context, parameter: Parameter, value: Any) -> Any:
    if value is not None:
        context.meta.setdefault(_VALUES, {})[parameter.opts[0].removeprefix("--")] = value
    return value
