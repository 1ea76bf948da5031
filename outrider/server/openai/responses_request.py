"""The requests of /v1/responses, and their translation to chat requests. The client sends all previous turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from outrider.server.http.errors import APIError
from outrider.server.openai.field_types import ExtensibleModel, StrictModel, TokenCount, max_entries, text_parts
from outrider.server.openai.request_schema import (
    ChatRequest,
    CompletionFields,
    FunctionParam,
    PredictionContent,
    TopLogprobs,
)

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""


class InputTextPart(ExtensibleModel):
    type: Literal["input_text", "output_text"]
    text: str


ItemContent = (
    str
    | Annotated[list[InputTextPart], Field(fail_fast=True), BeforeValidator(text_parts("input_text", "output_text"))]
)


class MessageItem(ExtensibleModel):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(ExtensibleModel):
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class FunctionOutputItem(ExtensibleModel):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: ItemContent


def _item_type(item: Any) -> str | None:
    """An item without a type is a message."""
    kind = (item.get("type") or "message") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(
        _item_type,
        custom_error_type="item_kind",
        custom_error_message="an item is a message, a function_call or a function_call_output, sent whole: this server "
        "stores none to refer to, and runs no tools of its own",
    ),
]


def _check_tools(value: Any) -> Any:
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = "a tool of type {kind} is not offered here; send tools of type function"
            raise PydanticCustomError("function_only", message, {"kind": repr(kind[:64])})
    return value


class FunctionTool(FunctionParam):
    type: Literal["function"]


class FunctionChoice(StrictModel):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64)


class AllowedFunctions(StrictModel):
    """Which of the tools may be called; the model is still shown all of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=128, fail_fast=True)]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(ExtensibleModel):
    format: TextFormat | None = None


Metadata = Annotated[dict[str, str], max_entries(MAX_METADATA, "entries"), Field(max_length=MAX_METADATA)]


class ResponsesRequest(CompletionFields):
    """OpenAI's fields, and the engine's own options. A response has one output: n is 1."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    text: TextOptions | None = None
    tools: (
        Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True), BeforeValidator(_check_tools)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    metadata: Metadata | None = None
    """Sent back with the response."""
    prediction: PredictionContent | None = None


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat request. APIError where it cannot be one."""
    if body.n not in (None, 1):
        raise APIError(400, f"a response has one output: n ({body.n}) must be 1", param="n", code="invalid_value")
    same = {*CompletionFields.model_fields, "parallel_tool_calls", "top_logprobs", "prediction"}
    made: dict[str, Any] = {name: value for name, value in body if name in same and value is not None}
    made |= {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": True if body.top_logprobs is not None or LOGPROBS in (body.include or ()) else None,
        "response_format": _response_format(body.text.format) if body.text and body.text.format else None,
        "tools": [_named(tool.model_dump(exclude_none=True)) for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(body.tool_choice),
    }
    try:
        return ChatRequest.model_validate(made)
    except ValidationError as error:  # such as more calls in one turn than a message may have
        raise APIError(400, f"input: {error.errors()[0]['msg']}", param="input", code="invalid_value") from error


def renamed_error(error: APIError) -> APIError:
    """An error of the chat request, with the field's name in /v1/responses."""
    error.param = {"messages": "input", "response_format": "text"}.get(error.param or "", error.param)
    return error


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The items as messages. A function call is added to the assistant's message right before it, if there is one."""
    out: list[dict[str, Any]] = []
    if body.instructions is not None:
        out.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*out, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, MessageItem):
            out.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, FunctionOutputItem):
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        else:
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant"})
            function = {"name": item.name, "arguments": item.arguments}
            out[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return out


def _content(content: str | list[InputTextPart]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    given = wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": wanted.type} | ({"json_schema": given} if wanted.type == "json_schema" else {})


def _named(function: dict[str, Any]) -> dict[str, Any]:
    """A function as a chat request has it: {"type", "function": {"name", ...}} instead of {"type", "name", ...}."""
    kind = function.pop("type")
    return {"type": kind, "function": function}


def _tool_choice(choice: str | FunctionChoice | AllowedFunctions | None) -> Any:
    if isinstance(choice, AllowedFunctions):
        tools = [_named(tool.model_dump()) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return _named(choice.model_dump()) if isinstance(choice, FunctionChoice) else choice
