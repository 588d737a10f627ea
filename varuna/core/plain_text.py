"""Text of others without what a terminal would obey: escape sequences and control characters."""

import re

_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, cursor, clearing
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # title, clipboard, and other strings
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROLS_OF_A_LINE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def plain(text: str, *, returns: bool = False) -> str:
    """Return ``text`` with line feeds and tabs as its only control characters.

    Args:
        text: what a script, a library or another machine has said.
        returns: keep carriage returns too, with which progress bars begin their line anew.
    """
    return (_CONTROLS_OF_A_LINE if returns else _CONTROLS).sub("", _SEQUENCES.sub("", text))
