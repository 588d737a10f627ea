"""Training scripts, before they run."""

import re
import sysconfig
from pathlib import Path

from varuna.core.errors import UsageError

LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
"""In the path of a file that is no user's."""
_READS_ARGUMENTS = re.compile(
    r"\b(argv|argparse|ArgumentParser|parse_args|HfArgumentParser|click|typer|tyro|fire|absl|hydra|docopt|plac|cappa|"
    r"simple_parsing|jsonargparse|optparse|getopt)\b"
)


def check_script(script: Path) -> None:
    """Find out now, not after something was started for it.

    Raises:
        UsageError: there is no such file.
    """
    if script.is_dir():
        raise UsageError(f"{script} is a folder. Name the Python file that you train with.")
    if not script.is_file():
        raise UsageError(f"no script at {script}. Name the Python file that you train with.")


def may_read_arguments(script: Path, text: str) -> bool:
    """Return whether the script may read its arguments: it does itself, or imports a file beside it that could."""
    if _READS_ARGUMENTS.search(text):
        return True
    imported = re.findall(r"^\s*(?:from|import)\s+([A-Za-z_]\w*)", text, re.MULTILINE)
    return any((script.parent / name).is_dir() or (script.parent / f"{name}.py").is_file() for name in imported)
