"""Every error a client sees, in OpenAI's shape: what, where, and what would work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from outrider.core.errors import RequestError
from outrider.server.ops.logs import LOGGER
from outrider.server.queue.jobs import QueueFull, Unavailable

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
"""OpenAI's error type for each status; any other status is a server_error."""
MAX_ERROR_CHARS = 600  # what a client sent is never sent back at length


class APIError(HTTPException):
    """A response that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.message, self.code, self.param = message[:MAX_ERROR_CHARS], code, param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object; also the last event of a stream that fails."""
        kind = ERROR_TYPES.get(self.status_code, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def to_api_error(error: BaseException) -> APIError:
    """The error a client sees for an exception. An unexpected one is logged, and shown without detail."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, Unavailable):
        status = 429 if isinstance(error, QueueFull) else 503
        return APIError(status, str(error), code=error.code, headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, RequestError):
        return APIError(400, str(error), code="invalid_value")
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return _http_error(error)
    LOGGER.error("unforeseen", exc_info=error)
    return internal_error()


def internal_error() -> APIError:
    return APIError(500, "an unforeseen fault; the server's log has the details", code="internal_error")


def error_response(error: BaseException) -> JSONResponse:
    """The response to a request that failed before its response began."""
    answer = to_api_error(error)
    return JSONResponse(answer.body(), answer.status_code, answer.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception with its error response."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    for kind in (APIError, HTTPException, RequestValidationError, RequestError, Unavailable, Exception):
        app.add_exception_handler(kind, handle)


def _validation_error(error: RequestValidationError) -> APIError:
    """The first field pydantic rejects, as `field: message`, with the index in a list where one entry is wrong."""
    found = error.errors() or [{"loc": ("body",), "msg": "the request is malformed", "type": ""}]
    same = [each for each in found if _place(each)[:1] == _place(found[0])[:1]]
    # a field of several types has an error for each type: prefer an error about the value, where the type fits,
    # then an error about one entry of a list
    useful = [each for each in same if not str(each["type"]).endswith("_type")]
    useful = useful or [each for each in same if _index(each)] or same
    fields = {_field(each) for each in useful}
    field = fields.pop() if len(fields) == 1 else "".join(map(str, _place(found[0])[:1]))
    message = ", or: ".join(dict.fromkeys(str(each["msg"]) for each in useful))
    return APIError(400, f"{field or 'the body'}: {message}", code="invalid_value", param=field or None)


def _place(found: Mapping[str, Any]) -> list[Any]:
    return [part for part in found["loc"] if part != "body"]


def _index(found: Mapping[str, Any]) -> list[int]:
    """The index in a list, if the field is one; pydantic may name a type, `list[...]`, before it."""
    inside = _place(found)[1:]
    inside = inside[1:] if inside and "[" in str(inside[0]) else inside
    return [part for part in inside[:1] if isinstance(part, int)]


def _field(found: Mapping[str, Any]) -> str:
    """The request's field, with the index in a list, or the inner name in `speculation` and `stream_options`."""
    place = _place(found)
    named = place[:1] in (["speculation"], ["stream_options"])  # elsewhere a client or pydantic chose the name
    return ".".join(str(part) for part in (*place[:1], *(place[1:2] if named else _index(found))))


def _http_error(error: HTTPException) -> APIError:
    known = {
        404: ("no such route; see /openapi.json", "not_found"),
        405: ("this route does not take that method; see /openapi.json", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (str(error.detail), None))
    return APIError(error.status_code, message, code=code, headers=error.headers)
