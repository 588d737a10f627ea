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
        first, more = engine_groups(args)
        ctx.meta[_ENGINE], ctx.meta[_MORE] = _named(first), more
        return super().parse_args(ctx, first)

    def get_params(self, ctx: Context) -> list[Parameter]:
        """The command's own options, and the engine's."""
        own = super().get_params(ctx)
        return [*own[:-1], *_options_of(ctx.meta.get(_ENGINE, "")), own[-1]]  # --help stays last


def engine_values(context: Context) -> dict[str, str]:
    """What was given of the engine's own options, by name."""
    return dict(context.meta.get(_VALUES, {}))


def more_engines(context: Context) -> tuple[EngineNodes, ...]:
    """What was given after the first ``--on``."""
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


def _named(args: Sequence[str]) -> str:
    """What the first ``--on`` names."""
    return next((value for name, value, _ in _given(args) if name == "on"), "")


def _given(args: Sequence[str]) -> list[tuple[str, str, range]]:
    """Name, value and place of each ``--name value`` and ``--name=value``; options end where the script begins."""
    found: list[tuple[str, str, range]] = []
    for at, word in enumerate(args):
        if word == "--" or word.endswith(".py"):
            break
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and equals:
            found.append((name, value, range(at, at + 1)))
        elif word.startswith("--") and at + 1 < len(args):
            found.append((name, args[at + 1], range(at, at + 2)))
    return found


def engine_groups(args: Sequence[str]) -> tuple[list[str], list[EngineNodes]]:
    """The words without those of further ``--on``, and these."""
    taken: set[int] = set()
    more: list[EngineNodes] = []
    known: set[str] = set()
    is_first = True
    for name, value, places in _given(args):
        if name == "on" and is_first:
            is_first = False
        elif name == "on":
            more.append(EngineNodes(value, "", {}))
            known = {"nodes", *(option.name for option in _engine_options(value))}
            taken.update(places)
        elif name in known:
            last = more[-1]
            if last.nodes if name == "nodes" else name in last.options:
                raise UsageError(f"--on {last.on}: --{name} is given twice. Leave one out.")
            is_nodes = name == "nodes"
            options = last.options if is_nodes else {**last.options, name: value}
            more[-1] = EngineNodes(last.on, value if is_nodes else last.nodes, options)
            taken.update(places)
    return [word for at, word in enumerate(args) if at not in taken], more


def _engine_options(on: str) -> "tuple[EngineOption, ...]":
    from varuna.fleet.engines.registry import KINDS

    kind = KINDS.get(on.partition(":")[0])
    return () if kind is None else kind.options


def _options_of(on: str) -> list[TyperOption]:
    from varuna.fleet.engines.registry import KINDS

    kind = KINDS.get(on.partition(":")[0])
    if kind is None:
        return []
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
            rich_help_panel=f"Options of --on {kind.name}",
        )
        for option in kind.options
    ]


def _identifier(name: str) -> str:
    return "engine_" + name.replace("-", "_")


def _keep(context: Context, parameter: Parameter, value: Any) -> Any:
    if value is not None:
        context.meta.setdefault(_VALUES, {})[parameter.opts[0].removeprefix("--")] = value
    return value
