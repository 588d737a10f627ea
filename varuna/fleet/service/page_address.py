"""The address of a run's page, as its manager says it at the start."""

import sys

from varuna.fleet.page.logins import Logins


def page_address(scheme: str, host: str, port: int, logins: Logins) -> str:
    """The address of the page, on a terminal with a code that works once: what a build server keeps opens nothing."""
    page = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
    if sys.stderr.isatty():
        return f"{page}#login={logins.invite()} (works once; `varuna open` opens it again)"
    return f"{page} (`varuna open` prints a link)"
