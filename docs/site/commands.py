"""A page with the help of every command, from the command line's own description of itself."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from varuna.cli.main import app
from varuna.fleet.engines.registry import kinds


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name as it is typed; groups are followed by their members."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for member, below in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {member}", below)

    program: Any = typer.main.get_command(app)
    for name, command in program.commands.items():
        yield from walk(f"varuna {name}", command)


def help_page(root: Path) -> str:
    """Markdown, with a section for each command, and one for each engine of ``varuna run --on``."""
    lines = [
        "# All help texts",
        "",
        "Made from the program itself. [Commands](../cli.md) says what each is for.",
        "",
    ]
    for name, command in commands():
        lines += [f"## {name}", "", *_usage(name, command), "", _plain(command.help), "", *_table(command.params)]
        if command.epilog:
            lines += ["```", _plain(command.epilog).removeprefix("Examples:").strip("\n"), "```", ""]
    for kind in kinds().values():
        rows = [f"| `--{option.name} {option.metavar}` | {_plain(option.help)} |" for option in kind.options]
        lines += [f"## varuna run --on {kind.name}", "", "| option | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def _usage(name: str, command: Any) -> list[str]:
    places = [each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"]
    return ["```", " ".join([name, "[OPTIONS]", *places]), "```"]


def _table(parameters: Sequence[Any]) -> list[str]:
    rows = [_row(each) for each in parameters if not getattr(each, "hidden", False) and each.name != "help"]
    return ["| argument or option | meaning |", "|---|---|", *rows, ""] if rows else []


def _row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = (
        [parameter.metavar or parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    )
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {_plain(parameter.help).replace('|', chr(92) + '|')} |"


def _plain(text: str | None) -> str:
    """Without the marks of rich and click."""
    return re.sub(r"\[/?[a-z ]+\]", "", (text or "").replace("\b\n", "").replace("\b", "")).strip("\n")
