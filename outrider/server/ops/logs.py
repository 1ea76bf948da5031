"""Logs: one line for each request and for the server's start, drain, stop and faults; never the text of a prompt."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, TextIO

LOGGER = logging.getLogger("outrider.server")
ExcInfo = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


def log_event(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write one line: an event and its fields."""
    LOGGER.log(level, event, extra={"fields": fields})


def log_error(event: str, error: BaseException, **fields: Any) -> None:
    """Write one line about an exception: its class and where it was raised."""
    LOGGER.error(event, exc_info=(type(error), error, error.__traceback__), extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """One line for each log record, as JSON or as text.

    The message of an exception is left out unless `with_text` is set, since it may quote a prompt; its class and
    the lines it passed through are written.
    """

    def __init__(self, log_format: Literal["json", "text"] = "text", *, with_text: bool = False) -> None:
        super().__init__()
        self.log_format, self.with_text = log_format, with_text

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.name != LOGGER.name:
            fields["logger"] = record.name
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = self.formatException(record.exc_info)
        if self.log_format == "json":
            return json.dumps(fields, ensure_ascii=True, default=str)
        time, level, event = fields.pop("time"), fields.pop("level"), fields.pop("event")
        pairs = [f"{name}={_word(value)}" for name, value in fields.items()]
        return " ".join([time, level.upper(), _word(event, spaces=True), *pairs])

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name logging calls
        info: ExcInfo = ei
        if self.with_text:
            return "".join(traceback.format_exception(*info))
        places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(info[2])]
        return f"{info[0].__name__ if info[0] else 'error'} at " + " < ".join(reversed(places))


def _word(value: Any, *, spaces: bool = False) -> str:
    """A value in a line of text; quoted unless it is one word."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, tuple)) else str(value)
    plain = text.isprintable() and '"' not in text and (spaces or " " not in text) and text != ""
    return text if plain or isinstance(value, (dict, list, tuple)) else json.dumps(text)


def set_up_logs(
    log_format: Literal["json", "text"] = "text", *, with_text: bool = False, stream: TextIO | None = None
) -> None:
    """Send the server's log, and the warnings of uvicorn and OpenTelemetry, to one stream; no access log."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(log_format, with_text=with_text))
    for name in (LOGGER.name, "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == LOGGER.name else logging.WARNING)
    errors = logging.getLogger("uvicorn.error")
    errors.handlers, errors.propagate = [], True
    errors.setLevel(logging.NOTSET)  # that of uvicorn, whatever another server in this process has set
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate, access.disabled = [], False, True
