"""What clients may send: OpenAI's requests and the engine's own options, every number bounded.

Null means absent. Fields not listed here are ignored; `ignored_fields` names them.

Validation of a list stops at its first error (fail_fast): a client chooses how many there are, and each would be
written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.core.sampling import MAX_STOP_CHARS, MAX_TOKENS

MAX_CHOICES_PER_PROMPT = 128
MAX_PROMPTS = 1024
MAX_LISTED_IDS = 4096
MAX_TOP_LOGPROBS = 20
MAX_TOKEN_ID = (1 << 31) - 1  # no vocabulary is larger; the model's own is checked later

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_LISTED_IDS, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]


def _check_count(value: Any) -> Any:
    """Check the number of entries before pydantic reports an error for each of them."""
    if isinstance(value, dict) and len(value) > MAX_LISTED_IDS:
        raise ValueError(f"at most {MAX_LISTED_IDS} tokens can be given a bias")
    return value


LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_check_count),
    Field(max_length=MAX_LISTED_IDS, json_schema_extra={"additionalProperties": False}),
]
PromptIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class ExtensibleModel(BaseModel):
    """An object that may have other fields, which `ignored_fields` reports."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StrictModel(BaseModel):
    """An object that may have no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        """Refuse the first unknown field before pydantic reports an error for each of them."""
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            said = {"known": ", ".join(known), "name": repr(str(unknown)[:64])}  # the client's own text is put in last
            raise PydanticCustomError("extra_forbidden", "{name} is no field of it; it takes {known}", said)
        return value


class StreamOptions(ExtensibleModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Pad chunks so that their sizes do not reveal how many tokens a round accepted."""


class SpeculationOptions(StrictModel):
    """How drafts are made for this request. The output is the same in any case."""

    drafter: str | None = Field(None, max_length=256)
    """`none`, or the name of the server's drafter."""
    max_tokens: int | None = Field(None, ge=0, le=1024)
    """Max tokens drafted in a round."""
    off: bool | None = None


class TextPart(ExtensibleModel):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class PredictionContent(StrictModel):
    """Text the output is expected to contain."""

    type: Literal["content"]
    content: Content


class CompletionFields(ExtensibleModel):
    """The fields that chat and text completions share."""

    model: str | None = Field(None, max_length=1024)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: Probability | None = None
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """0 and -1 keep all."""
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: Probability | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    banned_token_ids: TokenIds | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES_PER_PROMPT)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=256)
    """Caches are shared only between requests of the same key and salt."""
    speculation: SpeculationOptions | None = None
    include_provenance: bool | None = None
    """Report where each token comes from."""


class FunctionParam(ExtensibleModel):
    name: str = Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(ExtensibleModel):
    type: Literal["function"]
    function: FunctionParam


class FunctionName(StrictModel):
    name: str = Field(min_length=1, max_length=64)


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionName


class FunctionCallParam(ExtensibleModel):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCallParam(ExtensibleModel):
    id: str | None = Field(None, max_length=256)
    type: Literal["function"] | None = None
    function: FunctionCallParam


class MessageParam(ExtensibleModel):
    """One message. Other keys are passed to the model's chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_call_id: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCallParam], Field(max_length=128, fail_fast=True)] | None = None


MessageParams = Annotated[list[MessageParam], Field(min_length=1, max_length=4096, fail_fast=True)]


class JsonSchema(StrictModel):
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's three types, and three of the engine's own, each with a field of its name."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None
    """In llguidance's Lark syntax."""
    choice: Annotated[list[str], Field(max_length=4096, fail_fast=True)] | None = None


class ChatRequest(CompletionFields):
    messages: MessageParams
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolParam], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictionContent | None = None


class CompletionRequest(CompletionFields):
    prompt: (
        str
        | PromptIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    """0 with echo scores the prompt alone."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES_PER_PROMPT)
    suffix: str | None = None
    prediction: PredictionContent | None = None


_PROMPT_OR_MESSAGES: dict[str, Any] = {
    "oneOf": [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
    ]
}


class TokenizeRequest(ExtensibleModel):
    """A prompt, or the messages of a conversation."""

    model_config = ConfigDict(json_schema_extra=_PROMPT_OR_MESSAGES)

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: MessageParams | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens: by default yes for a prompt, no for messages."""
    add_generation_prompt: bool | None = None
    """For messages: whether the text ends where the assistant's message begins. Default: yes."""
    return_token_strs: bool | None = None


class DetokenizeRequest(ExtensibleModel):
    model: str | None = Field(None, max_length=1024)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


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
    "service_tier": _one_of("auto", "default"),
    "modalities": _one_of(["text"]),
    "use_beam_search": _one_of(False),
    "length_penalty": _one_of(1.0),
    "skip_special_tokens": _one_of(True),
    "add_generation_prompt": _one_of(True),
}
"""Fields of OpenAI and vLLM that need no action where they have one of these values."""


REFUSED_FIELDS = {
    "chat_template": "the model's own template is used",
    "prompt_embeds": "send the prompt as text or token ids",
}
"""Fields that are refused, never ignored: their content would have to be run or unpacked, and without it the output
would answer another request."""


def refused_field(body: ExtensibleModel) -> str | None:
    """The first of REFUSED_FIELDS that a request has, if any."""
    return next((name for name in REFUSED_FIELDS if (body.model_extra or {}).get(name) is not None), None)


def ignored_fields(body: ExtensibleModel) -> list[str]:
    """The fields of a request that have no effect here; inner ones with a dot."""
    names = [
        name
        for name, value in (body.model_extra or {}).items()
        if value is not None and not (name in ACCEPTED_VALUES and ACCEPTED_VALUES[name](value))
    ]
    if isinstance(body, TokenizeRequest) and body.prompt is not None and body.add_generation_prompt:
        names.append("add_generation_prompt")  # it is for messages; a prompt has none
    if isinstance(body, CompletionFields) and body.stream_options is not None:
        names += [f"stream_options.{name}" for name in body.stream_options.model_extra or {}]
        if not body.stream:
            names.append("stream_options")
    return sorted(names)
