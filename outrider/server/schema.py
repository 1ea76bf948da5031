"""What clients may send: OpenAI's requests, the engine's own options beside them, every number bounded.

Null means absent. Fields not named here are not honoured; `unhonoured` says which a request has.

A refusal tells of the first fault alone: every list stops at it (fail_fast), for a client chooses how many there are
and each would be written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.core.sampling import MAX_STOP_CHARS, MAX_TOKENS

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_IDS = 4096
MAX_TOP = 20
MAX_ID = (1 << 31) - 1  # no vocabulary is larger; the model's own is looked at later

TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
Ids = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(gt=0, le=1)]


def _few(value: Any) -> Any:
    """Before the entries are looked at: of each that is wrong there would be an error to write."""
    if isinstance(value, dict) and len(value) > MAX_IDS:
        raise ValueError(f"at most {MAX_IDS} tokens can be given a bias")
    return value


Bias = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_few),
    Field(max_length=MAX_IDS, json_schema_extra={"additionalProperties": False}),
]
PromptIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class Open(BaseModel):
    """An object that may hold more than is named; what more there is, is never dropped without a word."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class Closed(BaseModel):
    """An object that may hold nothing but what is named."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Before pydantic looks: of each field that is not known there would be an error to write."""
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            said = {"known": ", ".join(known), "name": repr(str(unknown)[:64])}  # the client's own word put in last
            raise PydanticCustomError("extra_forbidden", "{name} is no field of it; it takes {known}", said)
        return value


class StreamOptions(Open):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Pad chunks so that their sizes do not tell how many tokens a round accepted."""


class Speculation(Closed):
    """How this request is drafted for. The text is the same whatever it says."""

    drafter: str | None = Field(None, max_length=256)
    """`none`, or the name of the server's drafter."""
    max_tokens: int | None = Field(None, ge=0, le=1024)
    """Most tokens drafted a round."""
    off: bool | None = None


class TextPart(Open):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class Prediction(Closed):
    """Text the answer is expected to hold."""

    type: Literal["content"]
    content: Content


class Common(Open):
    """What both kinds of completion take."""

    model: str | None = Field(None, max_length=1024)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: Share | None = None
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """0 and -1 keep all."""
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: Share | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    allowed_token_ids: Annotated[Ids, Field(min_length=1)] | None = None
    banned_token_ids: Ids | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=256)
    """Caches are shared only between requests of the same key and salt."""
    speculation: Speculation | None = None
    include_provenance: bool | None = None
    """Tell of each token who brought it."""


class Function(Open):
    name: str = Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Open):
    type: Literal["function"]
    function: Function


class NamedFunction(Closed):
    name: str = Field(min_length=1, max_length=64)


class ToolChoice(Closed):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Open):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Open):
    id: str | None = Field(None, max_length=256)
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Open):
    """One turn. Keys beside these are handed to the model's template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


class JsonSchema(Closed):
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Closed):
    """OpenAI's three, and three of the engine's own, each with a field of its name."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None
    """In llguidance's Lark syntax."""
    choice: Annotated[list[str], Field(max_length=4096, fail_fast=True)] | None = None


class ChatRequest(Common):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None


class CompletionRequest(Common):
    prompt: (
        str
        | PromptIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    """0 with echo scores the prompt alone."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: str | None = None
    prediction: Prediction | None = None


_EITHER: dict[str, Any] = {
    "oneOf": [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
    ]
}


class TokenizeRequest(Open):
    """A prompt, or the messages of a conversation."""

    model_config = ConfigDict(json_schema_extra=_EITHER)

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """What the tokenizer puts around a text: yes for a prompt, no for messages, whose template writes its own."""
    add_generation_prompt: bool | None = None
    """Of messages: end where the answer begins, which is so unless told otherwise."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Open):
    model: str | None = Field(None, max_length=1024)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


def _anything(value: Any) -> bool:
    return True


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


HARMLESS: dict[str, Callable[[Any], bool]] = {
    "user": _anything,
    "safety_identifier": _anything,
    "metadata": _anything,
    "prompt_cache_key": _anything,
    "store": _one_of(False),
    "service_tier": _one_of("auto", "default"),
    "modalities": _one_of(["text"]),
    "use_beam_search": _one_of(False),
    "length_penalty": _one_of(1.0),
    "skip_special_tokens": _one_of(True),
    "add_generation_prompt": _one_of(True),
}
"""Fields of OpenAI's and vLLM's that need nothing done where they hold one of these values."""


REFUSED = {
    "chat_template": "the model's own template is used",
    "prompt_embeds": "send the prompt as text or token ids",
}
"""Fields that are never only named: what they bring would have to be run or unpacked, and without it the answer is to
another question."""


def refused(body: Open) -> str | None:
    """The field of REFUSED that a request has, if any."""
    return next((name for name in REFUSED if (body.model_extra or {}).get(name) is not None), None)


def unhonoured(body: Open) -> list[str]:
    """The fields of a request that change nothing here though they ask for something, inner ones with a dot."""
    names = [
        name
        for name, value in (body.model_extra or {}).items()
        if value is not None and not (name in HARMLESS and HARMLESS[name](value))
    ]
    if isinstance(body, TokenizeRequest) and body.prompt is not None and body.add_generation_prompt:
        names.append("add_generation_prompt")  # of a conversation; a prompt has none
    options = getattr(body, "stream_options", None)
    if options is not None:
        names += [f"stream_options.{name}" for name in options.model_extra or {}]
        if not getattr(body, "stream", None):
            names.append("stream_options")
    return sorted(names)
