"""Training scripts, before they run."""

from pathlib import Path

from varuna.core.errors import UsageError


def check_script(script: Path) -> None:
    """Find out now, not after something was started for it.

    Raises:
        UsageError: there is no such file.
    """
    if not script.is_file():
        raise UsageError(f"no script at {script}. Name the Python file that you train with.")
