"""``varuna open``: the status page of a run, by a link that works once; of a run that is over, from its folder."""

import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from varuna.cli.run_commands import ask
from varuna.cli.shared import options
from varuna.core.errors import UsageError
from varuna.process.console import say

_FILE = "open.html"
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_MOST_BODY_BYTES = 4096


def open_page(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of the run: the same as --run.", show_default=False)
    ] = None,
    run: options.RunDir = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the link instead of starting a browser.")] = False,
    token: Annotated[
        bool, typer.Option("--token", help="Print the operator's token, which the page's actions ask for; no link.")
    ] = False,
    void: Annotated[bool, typer.Option("--void", help="Revoke all links and all open pages; print no link.")] = False,
) -> None:
    """Open the status page of a run in a browser, or print a link to it.

    The link works once, within ten minutes. If the run is on another machine,
    forward its port first: ssh -L PORT:127.0.0.1:PORT HOST

    The page of a run that is over is served from its folder until Ctrl-C.
    """
    from varuna.fleet.net.client import UnreachableError
    from varuna.fleet.run_folder.connection_file import find

    if void + only_print + token > 1:
        raise UsageError("--print, --token and --void each do one thing. Give one of them.")
    if folder is not None and run is not None and folder != run:
        raise UsageError(f"two folders were given: {folder} and --run {run}. Give one of them.")
    folder, access = find(folder or run)
    if token:
        print(access.token)
        return
    remote = access.remote()
    try:
        if void:
            print(f"{ask(remote, '/links/void', {})['void']} links and open pages were revoked")
            return
        code = ask(remote, "/links", {})["code"]
    except UnreachableError as error:
        if void:
            raise
        _serve(folder, only_print, error)
        return
    scheme = "http" if access.certificate_pem is None else "https"
    if scheme == "https":
        say("the browser will warn about the certificate, which is the run's own")
    _tell(folder, f"{scheme}://{_in_brackets(access.host)}:{access.port}/#login={code}", only_print)


def _serve(folder: Path, only_print: bool, error: Exception) -> None:
    """Serve the page of a run whose manager does not answer, from its folder alone, until Ctrl-C.

    Raises:
        UsageError: the folder keeps no run.
    """
    from starlette.applications import Starlette

    from varuna.fleet.manager.kept_run import KeptRun, kept_api
    from varuna.fleet.net.serving import Serving
    from varuna.fleet.page.live_feed import LiveFeed
    from varuna.fleet.page.logins import Logins

    kept, logins = KeptRun(folder), Logins()
    feed = LiveFeed(kept.chronicle, kept.status)
    serving = Serving(port=0, max_frame_bytes=_MOST_BODY_BYTES)
    serving.start(Starlette(routes=kept_api(kept, feed, logins).routes()))
    try:
        if not kept.has_ended:
            say(f"{error} The page shows what {folder} keeps.")
        _tell(folder, f"http://{serving.host}:{serving.port}/#login={logins.invite()}", only_print)
        say("Ctrl-C ends the page")
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        feed.close()
        serving.stop()


def _tell(folder: Path, link: str, only_print: bool) -> None:
    from varuna.fleet.page.logins import LINK_LIFE_S

    if only_print or not _show(folder, link):
        print(link, flush=True)
        say(f"the link works once, within {LINK_LIFE_S / 60:.0f} minutes")


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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
