"""A streaming client of OpenAI-compatible servers that notes when each piece of an answer came."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from outrider.bench.prompts import Message

TIMEOUT_SECONDS = 600


@dataclass(slots=True)
class Outcome:
    """One request and what came of it. Seconds are by `time.perf_counter`."""

    prompt: str
    turn: int
    started: float = 0.0
    started_ns: int = 0
    """The wall-clock time of the start, in nanoseconds."""
    waited: float = 0.0
    """Seconds by which the client started its conversation late, in an open loop."""
    pieces: list[float] = field(default_factory=list[float])
    """When each chunk with text came."""
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens found in the cache; None where the server does not tell."""
    spec: dict[str, Any] | None = None
    """vLLM's record of the request's speculation, where the server tells."""
    error: str = ""
    status: int = 0

    @property
    def latency(self) -> float:
        return self.ended - self.started

    @property
    def first(self) -> float:
        """Seconds to the first chunk with text; to the end where none had any."""
        return (self.pieces[0] if self.pieces else self.ended) - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks: one chunk may hold several tokens."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Client:
    """Asks one server. url: its address, ending in /v1. options: fields of every request."""

    url: str
    model: str | None
    options: dict[str, Any]
    key: str = field(default="", repr=False)

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def ask(self, messages: Seq[Message], outcome: Outcome, **more: Any) -> Outcome:
        """Send the messages and read the answer to its end; a failure is noted, not raised."""
        body = {"model": self.model, "messages": list(messages), "stream": True} | self.options | more
        body["stream_options"] = {"include_usage": True}
        headers = {"Content-Type": "application/json"} | self.authorization
        asked = Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310 - http(s), see Api
        outcome.started, outcome.started_ns = time.perf_counter(), time.time_ns()
        try:
            with urlopen(asked, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - the same
                outcome.status = response.status
                read_stream(response, outcome)
        except HTTPError as error:
            outcome.status, outcome.error = error.code, error.read(500).decode(errors="replace")
        except (URLError, HTTPException, TimeoutError, ConnectionError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = time.perf_counter()
        return outcome


def read_stream(lines: Iterable[bytes], outcome: Outcome) -> None:
    """Read a stream of server-sent events into the outcome. ValueError where it ends without [DONE]."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(str(chunk["error"]))
        _note(chunk, outcome)
    else:
        raise ValueError("the stream ended early")
    if not outcome.output_tokens:  # the server tells no usage: chunks are all there is to count
        outcome.output_tokens = len(outcome.pieces)


def _note(chunk: dict[str, Any], outcome: Outcome) -> None:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        if text:
            outcome.pieces.append(time.perf_counter())
            outcome.text += text
    usage, metrics = chunk.get("usage") or {}, chunk.get("metrics") or {}
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens") or 0
        outcome.output_tokens = usage.get("completion_tokens") or 0
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if metrics.get("speculative_decoding"):
        outcome.spec = metrics["speculative_decoding"]
