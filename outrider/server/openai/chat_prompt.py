"""From a client's messages to the prompt, rendered by the model's chat template."""

from __future__ import annotations

import secrets
from typing import Any

from outrider.core.prompt import RenderedChat
from outrider.engine.client import EngineTokenizer
from outrider.server.http.body import parse_json
from outrider.server.http.errors import APIError
from outrider.server.openai.request_schema import ChatRequest, MessageParam, TokenizeRequest


def chat_prompt(
    body: ChatRequest | TokenizeRequest,
    tokenizer: EngineTokenizer,
    tools: list[dict[str, Any]] | None = None,
    *,
    allow_special_tokens: bool,
) -> RenderedChat:
    """The prompt that the template renders from the messages. RequestError or APIError where it does not take them."""
    options = {"tools": tools, "allow_special_tokens": allow_special_tokens}
    messages = [template_message(message) for message in body.messages or ()]
    if not body.continue_final_message:
        return tokenizer.render_chat(messages, add_generation_prompt=body.add_generation_prompt is not False, **options)
    if body.add_generation_prompt:
        raise _cannot_continue("with add_generation_prompt a new message begins; send one of the two")
    mark = secrets.token_hex(16)  # the prompt is cut here, whatever the template adds after the text
    messages[-1] = _with_mark(messages[-1], mark)
    rendered = tokenizer.render_chat(messages, add_generation_prompt=False, **options)
    end = rendered.text.rfind(mark)
    if end < 0:
        raise _cannot_continue("the model's chat template leaves the text of the last message out")
    return rendered.first(end)


def _with_mark(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with the mark at the end of its text."""
    content = message.get("content")
    if message.get("tool_calls") or not isinstance(content, str | list) or content == []:
        raise _cannot_continue("the last message must have text, and no tool calls")
    if isinstance(content, str):
        return message | {"content": content + mark}
    return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + mark}]}


def _cannot_continue(why: str) -> APIError:
    return APIError(400, f"continue_final_message: {why}", param="continue_final_message", code="invalid_value")


def template_message(message: MessageParam) -> dict[str, Any]:
    """A message as chat templates expect it. `developer` is OpenAI's newer name for `system`."""
    given = message.model_dump(exclude_none=True)
    if message.role == "developer":
        given["role"] = "system"
    for call in given.get("tool_calls", ()):
        call["function"]["arguments"] = _as_object(call["function"]["arguments"])
    if message.content is None and not message.tool_calls:
        raise APIError(400, "a message has no content; send a string, an empty one at least", param="messages")
    return given


def _as_object(arguments: str) -> Any:
    """A call's arguments as an object, which templates write out as JSON themselves; unchanged if they are not one."""
    try:
        value = parse_json(arguments.encode())
    except APIError:
        return arguments
    return value if isinstance(value, dict) else arguments
