"""Events to /v1/chat/completions: whole answers and chunks of a stream. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.engine.events import Event
from outrider.grammar import ToolFormat, ToolParser, parse_tool_calls
from outrider.server.teller import AnswerTeller
from outrider.server.telling import Head, Told, Wishes, provenance
from outrider.server.tokens import TokenTexts
from outrider.server.translate import Asked


class ChatTeller(AnswerTeller):
    """Tells an answer as a message, tool calls apart from its text."""

    def __init__(
        self, head: Head, asked: Asked, wishes: Wishes, texts: TokenTexts, form: ToolFormat | None = None
    ) -> None:
        """form: how the answer writes tool calls; None: it is text throughout."""
        super().__init__(head, asked, wishes, texts)
        self.form: ToolFormat | None = form
        self._parsers = [ToolParser(form) for _ in asked.requests] if form else []

    def begin(self) -> Iterator[dict[str, Any]]:
        """The chunks before any text: each choice's role."""
        for index in range(len(self.told)):
            yield self._wrap(index, {"delta": {"role": "assistant", "content": "", "refusal": None}})

    def chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """The chunks of a stream that an event makes."""
        delta = self._delta(index, event)
        if delta or (event.tokens and (self.wishes.logprobs is not None or self.wishes.provenance)):
            yield self._wrap(index, {"delta": delta or {"content": ""}}, **self._extras([event]))
        if event.finish:
            called = bool(self._parsers) and self._parsers[index].calls > 0
            yield self._last(index, {"delta": {}}, _reason(event, called), event.stop_reason)

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        """What an event adds to the message."""
        if not self._parsers:
            return {"content": event.text} if event.text else {}
        parser = self._parsers[index]
        parts = [parser.push(event.text), *([parser.finish()] if event.finish else [])]
        content = "".join(part.content for part in parts)
        calls = [delta.as_delta() for part in parts for delta in part.calls]
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _choice(self, index: int, told: Told) -> dict[str, Any]:
        extras = self._extras(told.events)
        message: dict[str, Any] = {"role": "assistant", "content": told.text, "refusal": None}
        if self.form:
            parsed = parse_tool_calls(told.text, self.form)
            message["content"] = parsed.content or (None if parsed.calls else "")
            message |= {"tool_calls": [call.as_call() for call in parsed.calls]} if parsed.calls else {}
        return {
            "index": index,
            "message": message,
            "logprobs": extras.pop("logprobs", None),
            "finish_reason": _reason(told.events[-1], "tool_calls" in message),
            "stop_reason": told.events[-1].stop_reason,
            **extras,
        }

    def _extras(self, events: list[Event]) -> dict[str, Any]:
        """What is told of the tokens beside their text, as far as it is wanted."""
        out: dict[str, Any] = {}
        if self.wishes.logprobs is not None:
            content = [
                self.texts.top(each.token, each.logprob)
                | {"top_logprobs": [self.texts.top(*other) for other in each.top]}
                for event in events
                for each in event.logprobs
            ]
            out["logprobs"] = {"content": content, "refusal": None}
        if self.wishes.provenance:
            out["provenance"] = [each for event in events for each in provenance(event)]
        return out


def _reason(event: Event, called: bool) -> str | None:
    """Why a choice ended; an answer that ends of itself after a call ends for it."""
    return "tool_calls" if called and event.finish == "stop" else event.finish
