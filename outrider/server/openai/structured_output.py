"""`response_format`, `tools` and `tool_choice`, compiled into a constraint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.core.sequence import Constraint
from outrider.grammar import (
    CompilerUnavailableError,
    GrammarSpec,
    ToolFormat,
    compile_constraint,
    read_response_format,
    tool_constraint,
)
from outrider.server.http.errors import APIError
from outrider.server.openai.request_schema import ChatRequest, NamedToolChoice
from outrider.server.queue.jobs import Unavailable


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the output must match, and how tool calls are written in it."""

    constraint: Constraint | None = None
    tool_format: ToolFormat | None = None
    """None: the output has no tool calls."""


UNCONSTRAINED = StructuredOutput()
FORMAT_FIELDS = ("json_schema", "regex", "grammar", "choice")


def needs_structured_output(body: ChatRequest) -> bool:
    return bool(body.tools) or body.tool_choice not in (None, "none", "auto") or body.response_format is not None


def compile_structured_output(body: ChatRequest, tokenizer: Any, salt: str = "") -> StructuredOutput:
    """Compile what a request asks for, within the grammar package's bounds; call it off the event loop.

    A grammar compiled before is used again for the same salt only. RequestError or APIError where
    it cannot be compiled, Unavailable where the compiler cannot be used now.
    """
    try:
        return _compile(body, tokenizer, salt)
    except CompilerUnavailableError as error:
        raise Unavailable(str(error), "compiler_unavailable", error.retry_after) from error


def _compile(body: ChatRequest, tokenizer: Any, salt: str) -> StructuredOutput:
    spec = _read_format(body)
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise APIError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
    if not body.tools or body.tool_choice == "none":
        return StructuredOutput(compile_constraint(spec, tokenizer, salt)) if spec is not None else UNCONSTRAINED
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedToolChoice) else body.tool_choice
    parallel = body.parallel_tool_calls is not False
    constraint, tool_format = tool_constraint(tools, choice, tokenizer, parallel=parallel, content=spec, salt=salt)
    return StructuredOutput(constraint, tool_format)


def _read_format(body: ChatRequest) -> GrammarSpec | None:
    wanted = body.response_format.model_dump(by_alias=True, exclude_none=True) if body.response_format else None
    misplaced = [name for name in FORMAT_FIELDS if wanted and name in wanted and name != wanted["type"]]
    if wanted and misplaced:
        message = (
            f"response_format of type {wanted['type']} has no {misplaced[0]}; its type would have to be {misplaced[0]}"
        )
        raise APIError(400, message, param="response_format", code="invalid_value")
    return read_response_format(wanted)
