"""Checks that every server of a run makes of a request: its sender, its token, and a body of bounded size, in time."""

import asyncio
import secrets

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

BODY_S = 10.0


async def read_body(request: Request, limit_bytes: int, bound_s: float = BODY_S) -> bytes | None:
    """The body; None if it is larger than the limit, without reading more than that.

    Raises:
        HTTPException: it did not come in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(bound_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    return None
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {bound_s:g} s") from None
    return bytes(body)


def first_problem(error: ValidationError) -> str:
    """``uses: Input should be greater than 0``; nothing of the input is repeated."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def address_of(request: Request) -> str:
    """Return the address from which a request comes."""
    return request.client.host if request.client else "unknown"


def bearer(header: str) -> str:
    """The token of an ``Authorization`` header."""
    return header.removeprefix("Bearer ").strip()


def is_same_token(given: str, token: str) -> bool:
    """Compare without telling by the time it takes how much was right; an empty token opens nothing."""
    return bool(token) and secrets.compare_digest(given.encode(), token.encode())
