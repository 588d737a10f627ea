"""``varuna completion``: what a shell needs to complete commands, options and files."""

from typing import Annotated, Literal

import typer
from typer.completion import (  # type: ignore[attr-defined]  # it imports them for its own options
    completion_init,
    get_completion_script,
)

_VARIABLE = "_VARUNA_COMPLETE"

EXAMPLES = """Examples:

\b
varuna completion bash >> ~/.bashrc
varuna completion zsh >> ~/.zshrc
varuna completion fish > ~/.config/fish/completions/varuna.fish
"""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell to print for.")],
) -> None:
    """Print the lines that make a shell complete commands and options."""
    print(get_completion_script(prog_name="varuna", complete_var=_VARIABLE, shell=shell))


completion_init()  # a shell that completes runs the command itself, with the variable set
