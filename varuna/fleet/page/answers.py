"""Common parts of all answers to people: headers, errors, and numbers that JSON has."""

import math

from starlette.responses import JSONResponse, Response

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def finite(value: object) -> object:
    """JSON has no NaN."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value


def error(status: int, text: str) -> Response:
    """An answer that says why not."""
    return JSONResponse({"error": text}, status_code=status)
