"""A request's body as JSON, read strictly: what cannot be meant, or cannot be handled, is refused here."""

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

from outrider.server.problems import Problem

MAX_DEPTH = 64
MAX_INT = 1 << 64
MAX_VALUES = (1 << 20) + (1 << 16)  # all prompts as ids, and what comes beside them
LARGE = 1 << 16  # bytes that take long enough to read for others to notice
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(raw: bytes) -> Any:
    """The value, made of plain numbers and whole characters, or a Problem."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"the body is not UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _malformed(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _malformed("the body holds a number that is too long") from error
    _check(value, surrogates=_SURROGATE.search(raw) is not None)
    return value


def _check(value: Any, *, surrogates: bool) -> None:
    """Walk the value without recursion; its own depth is what is in question."""
    level, values = [value], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        values += len(level)
        if values > MAX_VALUES:
            raise _malformed(f"the body holds more than {MAX_VALUES} values")
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
    raise _malformed(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_leaf(value: Any, surrogates: bool) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _malformed("the body holds a number too large for any field")
    if isinstance(value, int) and abs(value) >= MAX_INT:
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


def _malformed(message: str) -> Problem:
    return Problem(400, f"{message}; send a JSON object", code="invalid_json")


class StrictRequest(Request):
    async def json(self) -> Any:
        """A large body is read in a thread, so that nobody else's stream stands still meanwhile."""
        raw = await self.body()
        return parse(raw) if len(raw) < LARGE else await asyncio.to_thread(parse, raw)


class StrictRoute(APIRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strict
