"""Relays the events of one stream from a replica to the client: figures are read, and the model is renamed."""

from __future__ import annotations

import json
from typing import Any

from outrider.remote.figures import Figures
from outrider.remote.plain_chunks import PlainChunks, plain_chunks
from outrider.remote.sse_reader import EventReader, MalformedEventError, ServerEvent
from outrider.remote.upstream import ReplicaError, refusal
from outrider.server.http.errors import APIError
from outrider.server.http.sse import DONE_EVENT, encode_event
from outrider.server.openai.request_schema import CompletionFields
from outrider.server.openai.responses_request import ResponsesRequest

DONE = "[DONE]"
MAX_TEMPLATES = 4
"""Times that a stream's `PlainChunks` are made anew; from then on, chunks that do not match them are parsed."""
_LAST_TYPES = ("response.completed", "response.incomplete", "response.failed", "error")
_EMPTY_TYPES = (
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
)


class Relay:
    """Relays the bytes of one response. Plain chunks are passed on unparsed, once something was generated."""

    def __init__(
        self, body: CompletionFields, served_name: str, figures: Figures, max_templates: int = MAX_TEMPLATES
    ) -> None:
        """max_templates: 0 parses every chunk."""
        options = body.stream_options
        self.named = isinstance(body, ResponsesRequest)
        """Whether the events have names, and the type of the last event ends the stream, not [DONE]."""
        self.served_name, self.figures = served_name, figures
        self.shows = False
        """Whether the replica has generated something."""
        self.ended = False
        """Whether the last event has come."""
        self.error: Exception | None = None
        """The error behind the bytes that were returned: ReplicaError, or APIError where the request was refused."""
        self._usage = bool(options and options.include_usage)
        self._obfuscate = bool(options and options.include_obfuscation)
        self._sent = 0
        self._reader = EventReader()
        self._plain: PlainChunks | None = None
        self._templates = 0 if self.named or self._obfuscate else max_templates

    def feed(self, data: bytes) -> bytes:
        """The bytes to send to the client for these, up to an error or the last event."""
        if self._plain is not None and not self._reader.rest:
            passed = self._plain.passed(data)
            if passed is not None:
                return passed
        return b"".join(self._parsed(data))

    def error_event(self, error: APIError) -> bytes:
        """The last event of a stream that fails."""
        if not self.named:
            return encode_event(error.body())
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\n" + encode_event(told | {"sequence_number": self._sent + 1})

    def _parsed(self, data: bytes) -> list[bytes]:
        out: list[bytes] = []
        try:
            for event in self._reader.feed(data):
                out.append(self._event(event))
                if self.ended:
                    break
        except MalformedEventError as error:
            self.error = ReplicaError(f"its stream is malformed: {error}")
        except (ReplicaError, APIError) as error:
            self.error = error
        return out

    def _event(self, event: ServerEvent) -> bytes:
        """Read an event; returns its bytes for the client: none for a usage that it did not ask for."""
        if event.data == DONE:
            self.shows = self.ended = True
            return b"" if self.named else DONE_EVENT
        value = self._value(event)
        self.figures.read(value)
        self.ended = value.get("type") in _LAST_TYPES
        self.shows = self.shows or self.ended or _shows(value)
        if not self.named and not value.get("choices") and not self._usage:
            return b""
        self._sent = value.get("sequence_number", self._sent) if self.named else 0
        if self.shows and self._templates and not event.name:
            self._templates -= 1
            self._plain = plain_chunks(event.data, value, self.served_name)
        name = f"event: {event.name}\n".encode() if event.name else b""
        if renamed(value, self.served_name) or self._obfuscate:
            return name + encode_event(value, obfuscate=self._obfuscate)
        return name + f"data: {event.data}\n\n".encode()

    def _value(self, event: ServerEvent) -> dict[str, Any]:
        try:
            value = json.loads(event.data)
        except ValueError as error:
            raise ReplicaError("an event of its stream is not JSON") from error
        if not isinstance(value, dict):
            raise ReplicaError("an event of its stream is no JSON object")
        if isinstance(told := value.get("error"), dict) and not self.named:
            raise refusal(told["code"] if isinstance(told.get("code"), int) else 500, event.data.encode())
        return value


def renamed(value: dict[str, Any], name: str) -> bool:
    """Write the served name of the model in place of another one; returns whether there was another one."""
    response = value.get("response")
    inner = response if isinstance(response, dict) else value
    if inner.get("model") in (None, name):
        return False
    inner["model"] = name
    return True


def _shows(value: dict[str, Any]) -> bool:
    """Whether a chunk has output, not only the frame of a response: part of a text or a call, or the end."""
    if "type" in value:
        return value["type"] not in _EMPTY_TYPES
    choices: list[dict[str, Any]] = value.get("choices") or [{"finish_reason": "none"}]
    for choice in choices:
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(delta[name] for name in delta if name != "role"):
            return True
    return False
