"""Fields of a request that are refused, and those that have no effect here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.server.openai.field_types import ExtensibleModel
from outrider.server.openai.request_schema import CompletionFields, TokenizeRequest
from outrider.server.openai.responses_request import LOGPROBS, ResponsesRequest


def _anything(value: Any) -> bool:
    return True


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


ACCEPTED_VALUES: dict[str, Callable[[Any], bool]] = {
    "user": _anything,
    "safety_identifier": _anything,
    "metadata": _anything,
    "prompt_cache_key": _anything,
    "store": _one_of(False),
    "background": _one_of(False),
    "truncation": _one_of("disabled"),
    "service_tier": _one_of("auto", "default"),
    "modalities": _one_of(["text"]),
    "use_beam_search": _one_of(False),
    "length_penalty": _one_of(1.0),
    "skip_special_tokens": _one_of(True),
    "add_generation_prompt": _one_of(True),
    "continue_final_message": _one_of(False),
}
"""Fields of OpenAI and vLLM that need no action where they have one of these values."""


REFUSED_FIELDS = {
    "chat_template": "the model's own template is used",
    "prompt_embeds": "send the prompt as text or token ids",
}
"""Fields that are refused, never ignored: their content would have to be run or unpacked, and without it the output
would answer another request."""
STORED_FIELDS = {
    "previous_response_id": "no response is stored here; send the previous turns as items of input",
    "conversation": "no conversation is stored here; send its turns as items of input",
    "prompt": "no prompt is stored here; send instructions and input",
    "store": "no response is stored here; leave it out, and keep the output to send it as items of input",
    "background": "no response is stored here, to be fetched later; stream it instead",
}
"""Fields of /v1/responses that are refused unless they are false: a server would have to store something."""


def refused_field(body: ExtensibleModel) -> tuple[str, str] | None:
    """The first field of a request that is refused, if any, and why."""
    given = body.model_extra or {}
    refused = {name: why for name, why in REFUSED_FIELDS.items() if given.get(name) is not None}
    if isinstance(body, ResponsesRequest):
        refused |= {name: why for name, why in STORED_FIELDS.items() if given.get(name) not in (None, False)}
    return next(iter(refused.items()), None)


def ignored_fields(body: ExtensibleModel) -> list[str]:
    """The fields of a request that have no effect here; inner ones with a dot."""
    names = [
        name
        for name, value in (body.model_extra or {}).items()
        if value is not None and not (name in ACCEPTED_VALUES and ACCEPTED_VALUES[name](value))
    ]
    if isinstance(body, TokenizeRequest) and body.prompt is not None:  # these are for messages; a prompt has none
        names += ["add_generation_prompt"] if body.add_generation_prompt else []
        names += ["continue_final_message"] if body.continue_final_message else []
    if isinstance(body, CompletionFields) and body.stream_options is not None:
        names += [f"stream_options.{name}" for name in body.stream_options.model_extra or {}]
        if not body.stream:
            names.append("stream_options")
    if isinstance(body, ResponsesRequest):
        names += ["include"] if set(body.include or ()) - {LOGPROBS} else []
        names += [f"text.{name}" for name in (body.text and body.text.model_extra) or {}]
    return sorted(names)
