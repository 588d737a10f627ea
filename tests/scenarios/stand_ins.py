"""Runs what a page or a job's file tells a shell, with stand-ins for programs that need a cloud; ``varuna`` only notes.

What ``varuna`` would have been called with is then started as tests start processes (``warm``).
"""

import os
import subprocess
from pathlib import Path

_VARUNA = '#!/bin/sh\nprintf \'%s\\0\' "$@" >"$WORDS.new" && mv "$WORDS.new" "$WORDS"\n'


class StandIns:
    """Programs that come first in the PATH of the shells.

    Args:
        folder: for them; it is made.
        programs: texts by name.
    """

    def __init__(self, folder: Path, programs: dict[str, str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for name, text in {**programs, "varuna": _VARUNA}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def shell(self, script: str, folder: Path, **variables: str) -> str:
        """Run a script in a folder, and return its output; it must end well."""
        own = {"BIN": str(self.folder), "WORDS": str(_words(folder)), "PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", script],
            env={**own, **variables},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def varuna(self, script: str, folder: Path, **variables: str) -> list[str]:
        """The arguments with which such a script becomes ``varuna`` in the end."""
        _words(folder).unlink(missing_ok=True)
        self.shell(script, folder, **variables)
        return _words(folder).read_text().split("\0")[:-1]


def _words(folder: Path) -> Path:
    return folder / "varuna.words"
