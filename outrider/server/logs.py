"""Logs: one line for each request and for each turn in the server's life; never the text of anyone's prompt."""

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


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write one line: what happened, and its figures."""
    LOGGER.log(level, event, extra={"fields": fields})


def log_error(event: str, error: BaseException, **fields: Any) -> None:
    """Write one line about something that went wrong, with where it did."""
    LOGGER.error(event, exc_info=(type(error), error, error.__traceback__), extra={"fields": fields})


class Lines(logging.Formatter):
    """One line for each record, as JSON or to read.

    The words of an exception are left out unless `texts` is set, since they may quote a
    prompt; its class and the places it passed through are told.
    """

    def __init__(self, form: Literal["json", "text"] = "text", *, texts: bool = False) -> None:
        super().__init__()
        self.form, self.texts = form, texts

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
        if self.form == "json":
            return json.dumps(fields, ensure_ascii=True, default=str)
        time, level, event = fields.pop("time"), fields.pop("level"), fields.pop("event")
        pairs = [f"{name}={_word(value)}" for name, value in fields.items()]
        return " ".join([time, level.upper(), _word(event, spaces=True), *pairs])

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name logging calls
        info: ExcInfo = ei
        if self.texts:
            return "".join(traceback.format_exception(*info))
        places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(info[2])]
        return f"{info[0].__name__ if info[0] else 'error'} at " + " < ".join(reversed(places))


def _word(value: Any, *, spaces: bool = False) -> str:
    """A value as it stands in a readable line; quoted where it would not be one word, or not one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, tuple)) else str(value)
    plain = text.isprintable() and '"' not in text and (spaces or " " not in text) and text != ""
    return text if plain or isinstance(value, (dict, list, tuple)) else json.dumps(text)


def set_up_logs(form: Literal["json", "text"] = "text", *, texts: bool = False, stream: TextIO | None = None) -> None:
    """Send the server's lines, and the warnings of what it stands on, to one place; uvicorn's request lines are off."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Lines(form, texts=texts))
    for name in (LOGGER.name, "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == LOGGER.name else logging.WARNING)
    errors = logging.getLogger("uvicorn.error")
    errors.handlers, errors.propagate = [], True
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate, access.disabled = [], False, True
