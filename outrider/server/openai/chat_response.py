"""From events to the responses of /v1/chat/completions. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.engine.events import Event
from outrider.grammar import ToolFormat, ToolParser, parse_tool_calls
from outrider.server.openai.response_builder import (
    ChoiceBuffer,
    ResponseBuilder,
    ResponseMeta,
    ResponseOptions,
    provenance_of_event,
)
from outrider.server.openai.token_texts import TokenTexts
from outrider.server.openai.translate import TranslatedRequest


class ChatResponseBuilder(ResponseBuilder):
    """Builds messages, with tool calls separated from the text."""

    def __init__(
        self,
        meta: ResponseMeta,
        request: TranslatedRequest,
        options: ResponseOptions,
        texts: TokenTexts,
        tool_format: ToolFormat | None = None,
    ) -> None:
        """tool_format: how the model writes tool calls; None: the output is all text."""
        super().__init__(meta, request, options, texts)
        self.tool_format: ToolFormat | None = tool_format
        self._parsers = [ToolParser(tool_format) for _ in request.requests] if tool_format else []

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """A chunk with the role, for each choice."""
        for index in range(len(self.buffers)):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}})

    def event_chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        delta = self._delta(index, event)
        if delta or (event.tokens and (self.options.logprobs is not None or self.options.provenance)):
            yield self._chunk(index, {"delta": delta or {"content": ""}}, **self._extras([event]))
        if event.finish:
            called = bool(self._parsers) and self._parsers[index].calls > 0
            yield self._final_chunk(index, {"delta": {}}, _finish_reason(event, called), event.stop_reason)

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        """What an event adds to the message."""
        if not self._parsers:
            return {"content": event.text} if event.text else {}
        parser = self._parsers[index]
        parts = [parser.push(event.text), *([parser.finish()] if event.finish else [])]
        content = "".join(part.content for part in parts)
        calls = [delta.as_delta() for part in parts for delta in part.calls]
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        extras = self._extras(buffer.events)
        message: dict[str, Any] = {"role": "assistant", "content": buffer.text, "refusal": None}
        if self.tool_format:
            parsed = parse_tool_calls(buffer.text, self.tool_format)
            message["content"] = parsed.content or (None if parsed.calls else "")
            message |= {"tool_calls": [call.as_call() for call in parsed.calls]} if parsed.calls else {}
        return {
            "index": index,
            "message": message,
            "logprobs": extras.pop("logprobs", None),
            "finish_reason": _finish_reason(buffer.events[-1], "tool_calls" in message),
            "stop_reason": buffer.events[-1].stop_reason,
            **extras,
        }

    def _extras(self, events: list[Event]) -> dict[str, Any]:
        """The log-probabilities and provenance of the tokens, where they are wanted."""
        out: dict[str, Any] = {}
        if self.options.logprobs is not None:
            content = [
                self.texts.top(each.token, each.logprob)
                | {"top_logprobs": [self.texts.top(*other) for other in each.top]}
                for event in events
                for each in event.logprobs
            ]
            out["logprobs"] = {"content": content, "refusal": None}
        if self.options.provenance:
            out["provenance"] = [each for event in events for each in provenance_of_event(event)]
        return out


def _finish_reason(event: Event, called: bool) -> str | None:
    """Why a choice ended; `tool_calls` where it has any and was not cut off."""
    return "tool_calls" if called and event.finish == "stop" else event.finish
