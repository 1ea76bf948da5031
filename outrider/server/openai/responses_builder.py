"""From events to the responses of /v1/responses, whole or streamed. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.engine.events import Event
from outrider.grammar import ToolFormat
from outrider.server.http.errors import APIError
from outrider.server.openai.response_builder import (
    ChoiceBuffer,
    ResponseBuilder,
    ResponseMeta,
    ResponseOptions,
    provenance_of_event,
)
from outrider.server.openai.responses_output import OutputItems
from outrider.server.openai.responses_request import ResponsesRequest
from outrider.server.openai.token_texts import TokenTexts
from outrider.server.openai.translate import DEFAULT_TEMPERATURE, TranslatedRequest


class ResponsesBuilder(ResponseBuilder):
    """Builds output items, and the fields of the request that a response repeats."""

    named_events = True

    def __init__(
        self,
        meta: ResponseMeta,
        request: TranslatedRequest,
        options: ResponseOptions,
        texts: TokenTexts,
        body: ResponsesRequest,
        tool_format: ToolFormat | None = None,
    ) -> None:
        super().__init__(meta, request, options, texts)
        self._output = OutputItems(texts, tool_format)
        self._repeated = repeated_fields(body)
        self._new: list[dict[str, Any]] = []
        """The stream events for the engine event that was added last."""
        self._sent = 0

    def add(self, index: int, event: Event) -> None:
        super().add(index, event)
        self._new = list(self._output.push(event))

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        begun = self._response("in_progress", usage=None)
        yield self._numbered({"type": "response.created", "response": begun})
        yield self._numbered({"type": "response.in_progress", "response": begun})

    def event_chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        yield from map(self._numbered, self._new)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        response = self.response()
        yield self._numbered({"type": f"response.{response['status']}", "response": response})

    def error_chunk(self, error: APIError) -> dict[str, Any]:
        return self._numbered({"type": "error", "code": error.code, "message": error.message, "param": error.param})

    def response(self) -> dict[str, Any]:
        return self._choice(0, self.buffers[0])

    def _choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        cut = buffer.finish == "length"
        out = self._response("incomplete" if cut else "completed", usage=responses_usage(self._usage()))
        out["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        out["metrics"] = self._metrics()
        if self.options.provenance:
            out["provenance"] = [each for event in buffer.events for each in provenance_of_event(event)]
        return out

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.meta.id,
            "object": "response",
            "created_at": self.meta.created,
            "model": self.meta.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output.items),
            "usage": usage,
            **self._repeated,
        }

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._sent += 1
        return event | {"sequence_number": self._sent - 1}


def repeated_fields(body: ResponsesRequest) -> dict[str, Any]:
    """The fields of a request that its response repeats, with the values that apply."""
    choice, text = body.tool_choice, body.text.format if body.text else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "background": False,
        "temperature": DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": text.model_dump(by_alias=True, exclude_none=True) if text else {"type": "text"}},
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "truncation": "disabled",
    }


def responses_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """A chat's usage in the names of /v1/responses. Writing to the cache costs nothing, so no tokens count for it."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
