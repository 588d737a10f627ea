"""Methods of an object that the running script may call: read from its source, before it comes there."""

import linecache
import re
from collections.abc import Iterable
from types import FrameType


def calls_of(subject: object, methods: Iterable[str], frame: FrameType | None) -> list[str]:
    """Find those of ``methods`` that the files of the running functions may call on ``subject``, by their name for it.

    What is called by another name, or from another file, is not seen; a call on another object of that name is. So this
    is a reason to prepare, or to warn, and none to refuse.

    Args:
        subject: the object.
        methods: their names.
        frame: the innermost function that may call them.
    """
    text: list[str] = []
    names: set[str] = set()
    while frame is not None:
        scopes = (frame.f_locals, frame.f_globals)
        found = {name for scope in scopes for name, value in scope.items() if value is subject}
        if found:
            names |= found
            text += linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        frame = frame.f_back
    called = rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\.({{}})\("
    return [method for method in methods if names and any(re.search(called.format(method), line) for line in text)]
