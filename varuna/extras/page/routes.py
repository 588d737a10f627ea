"""The web page's files, which say nothing of the run: its scripts ask for that with the session that a link gave."""

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from varuna.extras.page.files import ASSETS, PAGE, asset
from varuna.fleet.page.answers import HEADERS

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Browsers run scripts and take styles from this server's files alone, ask this server alone, and read no text as
markup. A picture may also be one that the page has asked for with its session, which an address cannot carry."""


def page_routes() -> list[Route]:
    """Return the routes of the page and its files."""
    return [Route("/", _page), Route("/page/{name}", _asset)]


async def _page(request: Request) -> Response:
    if not PAGE.exists():
        return PlainTextResponse("this installation does not include the web page; see /status\n", status_code=404)
    body = await asyncio.to_thread(PAGE.read_bytes)
    headers = {**HEADERS, "Content-Security-Policy": POLICY}
    return Response(body, media_type="text/html", headers=headers)


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        return PlainTextResponse("the page has no such file\n", status_code=404)
    body = await asyncio.to_thread(asset(name).read_bytes)
    return Response(body, media_type=ASSETS[name], headers=HEADERS)
