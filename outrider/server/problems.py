"""Every error a client sees, in OpenAI's shape, made in one place: what, where, and what would work."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from outrider.core.errors import RequestError
from outrider.server.jobs import QueueFull, Unavailable

log = logging.getLogger("outrider.server")

TYPES = {
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
"""OpenAI's word for each status; all else is a server_error."""
MAX_MESSAGE = 600  # characters; what a client sent is never sent back at length


class Problem(HTTPException):
    """An answer that is an error."""

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
        self.message, self.code, self.param = message[:MAX_MESSAGE], code, param

    def body(self) -> dict[str, Any]:
        """OpenAI's shape; also what a stream says before it ends early."""
        kind = TYPES.get(self.status_code, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def problem_of(error: BaseException) -> Problem:
    """What a client is told of an exception. What nobody foresaw is logged, and told without detail."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Unavailable):
        status = 429 if isinstance(error, QueueFull) else 503
        return Problem(status, str(error), code=error.code, headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, RequestError):
        return Problem(400, str(error), code="invalid_value")
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_http(error)
    log.error("unforeseen", exc_info=error)
    return Problem(500, "an unforeseen fault; the server's log has the details", code="internal_error")


def respond(error: BaseException) -> JSONResponse:
    """The answer to a request that failed before any of its answer was sent."""
    problem = problem_of(error)
    return JSONResponse(problem.body(), problem.status_code, problem.headers)


def install(app: FastAPI) -> None:
    """Let every exception end here."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return respond(error)

    for kind in (Problem, HTTPException, RequestValidationError, RequestError, Unavailable, Exception):
        app.add_exception_handler(kind, handle)


def _of_validation(error: RequestValidationError) -> Problem:
    """What pydantic found wrong with the first field it names, as `field: what`."""
    found = error.errors() or [{"loc": ("body",), "msg": "the request is malformed", "type": ""}]
    field = _field(found[0])
    same = [each for each in found if _field(each) == field]
    # a field of several forms fails as each of them: a form that fits but for its value says most
    telling = [each for each in same if not str(each["type"]).endswith("_type")] or same
    message = ", or: ".join(dict.fromkeys(str(each["msg"]) for each in telling))
    return Problem(400, f"{field or 'the body'}: {message}", code="invalid_value", param=field or None)


def _field(found: Mapping[str, Any]) -> str:
    """The request's own field, and the place in it where that is a list, or an object of fields of ours."""
    place = [part for part in found["loc"] if part != "body"]
    of_fields = place[:1] in (
        ["speculation"],
        ["stream_options"],
    )  # elsewhere names are clients', or of a field's forms
    inside = [part for part in place[1:2] if isinstance(part, int) or of_fields]
    return ".".join(str(part) for part in (*place[:1], *inside))


def _of_http(error: HTTPException) -> Problem:
    known = {
        404: ("no such route; see /openapi.json", "not_found"),
        405: ("this route does not take that method; see /openapi.json", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (str(error.detail), None))
    return Problem(error.status_code, message, code=code, headers=error.headers)
