"""A request's body as JSON, parsed strictly: what is ambiguous or too large is refused here."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from outrider.server.http.errors import APIError

MAX_JSON_DEPTH = 64
MAX_JSON_INT = 1 << 64
MAX_JSON_VALUES = (1 << 20) + (1 << 16)  # prompts of a million token ids, and the other fields
LARGE_BODY = 1 << 16  # bytes; parsing more would block the event loop noticeably
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes) -> Any:
    """The parsed value. APIError for anything but strict JSON, or for too many, too deep or too large values."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"the body is not UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _malformed(f"the body is nested deeper than {MAX_JSON_DEPTH} levels") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _malformed("the body holds a number that is too long") from error
    _check_values(value, surrogates=_SURROGATE.search(raw) is not None)
    return value


def _check_values(value: Any, *, surrogates: bool) -> None:
    """Check the depth, the number of values, and each leaf. Not recursive: the depth is not known to be safe."""
    level, values = [value], 0
    for _ in range(MAX_JSON_DEPTH + 1):
        below: list[Any] = []
        values += len(level)
        if values > MAX_JSON_VALUES:
            raise _malformed(f"the body holds more than {MAX_JSON_VALUES} values")
        for each in level:
            if isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, list):
                below += each
            else:
                _check_leaf(each, surrogates)
        if not below:
            return
        level = below
    raise _malformed(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")


def _check_leaf(value: Any, surrogates: bool) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _malformed("the body holds a number too large for any field")
    if isinstance(value, int) and abs(value) >= MAX_JSON_INT:
        raise _malformed("the body holds a number too large for any field")
    if surrogates and isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _malformed("the body holds half of a surrogate pair; send whole characters") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise _malformed(f"the body names {name[:64]!r} more than once in one object")
    return made


def _no_constant(name: str) -> None:
    raise _malformed(f"the body holds {name}, which JSON does not have")


def _malformed(message: str) -> APIError:
    return APIError(400, f"{message}; send a JSON object", code="invalid_json")


class StrictRequest(Request):
    async def json(self) -> Any:
        """Parse the body; a large one in a thread, so that other streams go on."""
        raw = await self.body()
        return parse_json(raw) if len(raw) < LARGE_BODY else await asyncio.to_thread(parse_json, raw)


class StrictRoute(APIRoute):
    """A route whose body `parse_json` reads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict
