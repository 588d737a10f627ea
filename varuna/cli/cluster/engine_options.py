"""``varuna run`` with the options of the engine that ``--on`` names, in its help and in what it accepts."""

import re
from collections.abc import Sequence
from typing import Any

from typer._click import Context, Parameter
from typer._coercion import TypeDescriptor
from typer.core import TyperCommand, TyperOption
from typer.models import OptionInfo

from varuna.core.errors import UsageError

_ENGINE, _VALUES = "varuna.engine", "varuna.engine.values"


class EngineCommand(TyperCommand):
    """A command whose options depend on ``--on``."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Look for the engine's name first."""
        ctx.meta[_ENGINE] = _named(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Context) -> list[Parameter]:
        """The command's own options, and the engine's."""
        own = super().get_params(ctx)
        return [*own[:-1], *_options_of(ctx.meta.get(_ENGINE, "")), own[-1]]  # --help stays last


def engine_values(context: Context) -> dict[str, str]:
    """What was given of the engine's own options, by name."""
    return dict(context.meta.get(_VALUES, {}))


def nodes_of(text: str) -> tuple[int, int]:
    """Least and most nodes of ``--nodes``.

    Raises:
        UsageError: it is missing, or something else.
    """
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    if found is None:
        raise UsageError(f"--on needs --nodes LEAST:MOST, such as --nodes 4:32, and not {text!r}")
    return int(found[1]), int(found[2] or found[1])


def _named(args: Sequence[str]) -> str:
    """What ``--on`` names; options end where the script begins."""
    for at, word in enumerate(args):
        if word == "--" or word.endswith(".py"):
            break
        if word.startswith("--on="):
            return word.partition("=")[2]
        if word == "--on" and at + 1 < len(args):
            return args[at + 1]
    return ""


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
