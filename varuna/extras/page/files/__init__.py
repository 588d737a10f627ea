"""The web page: static files, served by the manager."""

from pathlib import Path

_FOLDER = Path(__file__).parent
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

PAGE = _FOLDER / "index.html"
ASSETS = {
    path.name: _TYPES[path.suffix] for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES and path != PAGE
}
"""Media type of each file that the page asks for, by name; there are no others."""


def asset(name: str) -> Path:
    """Return the path of a file of ``ASSETS``.

    Raises:
        KeyError: it is none of them.
    """
    if name not in ASSETS:
        raise KeyError(name)
    return _FOLDER / name
