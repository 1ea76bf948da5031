"""Server-sent events from bytes that arrive in any pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_EVENT_BYTES = 64 << 20
"""A longer event is malformed: a whole response with all log-probabilities is shorter."""


class MalformedEventError(ValueError):
    """The bytes are not a stream of server-sent events."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event."""

    data: str
    name: str = ""
    """What its `event:` line says."""


class EventReader:
    """Collects bytes and returns the events that are complete."""

    def __init__(self) -> None:
        self.rest = b""
        """The bytes of an event that is not complete."""

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """The events that these bytes complete. MalformedEventError for malformed ones, after the events before."""
        *blocks, self.rest = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            if (event := _parse(block)) is not None:
                yield event
        if len(self.rest) > MAX_EVENT_BYTES:
            raise MalformedEventError(f"an event of more than {MAX_EVENT_BYTES} bytes")


def _parse(block: bytes) -> ServerEvent | None:
    """The event of a block of lines; None for a comment, which keeps a connection alive."""
    name, data = "", []
    try:
        lines = block.decode().split("\n")
    except UnicodeDecodeError as error:
        raise MalformedEventError("an event is not UTF-8") from error
    for line in lines:
        field, colon, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif line and field not in ("", "id", "retry"):
            raise MalformedEventError(f"{line[:40]!r} is no line of an event{'' if colon else ': it has no colon'}")
    return ServerEvent("\n".join(data), name) if data else None
