"""``varuna open``: the status page of a run, by a link that works once."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from varuna.cli import options
from varuna.cli.run_commands import ask
from varuna.core.errors import UsageError
from varuna.process.console import say

_FILE = "open.html"
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


def open_page(
    run: options.RunDir = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the link instead of starting a browser.")] = False,
    void: Annotated[bool, typer.Option("--void", help="Revoke all links and all open pages; print no link.")] = False,
) -> None:
    """Open the status page of a run in a browser, or print a link to it.

    The link works once, within ten minutes. If the run is on another machine,
    forward its port first: ssh -L PORT:127.0.0.1:PORT HOST
    """
    from varuna.fleet.manager.logins import LINK_LIFE_S
    from varuna.fleet.run_folder.connection_file import find

    if void and only_print:
        raise UsageError("--void prints no link. Leave out --print.")
    folder, access = find(run)
    remote = access.remote()
    if void:
        print(f"{ask(remote, '/links/void', {})['void']} links and open pages were revoked")
        return
    code = ask(remote, "/links", {})["code"]
    scheme = "http" if access.certificate_pem is None else "https"
    host = f"[{access.host}]" if ":" in access.host else access.host
    link = f"{scheme}://{host}:{access.port}/#login={code}"
    if scheme == "https":
        say("the browser will warn about the certificate, which is the run's own")
    if only_print or not _show(folder, link):
        print(link)
        say(f"the link works once, within {LINK_LIFE_S / 60:.0f} minutes")


def _show(folder: Path, link: str) -> bool:
    """Open the link through a file that only this user can read: everybody can read a browser's arguments."""
    from varuna.fleet.net.ca import write_private

    if sys.platform.startswith("linux") and not any(os.environ.get(name) for name in _DISPLAYS):
        return False
    path = folder.absolute() / _FILE
    page = f'<!doctype html><meta charset="utf-8"><title>Varuna</title><script>location.replace("{link}")</script>'
    try:
        write_private(path, page.encode())
        return webbrowser.open(path.as_uri())
    except (OSError, webbrowser.Error):
        return False
