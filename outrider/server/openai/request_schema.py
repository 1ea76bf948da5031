"""What clients may send: OpenAI's requests and the engine's own options, every number bounded.

Null means absent. Fields not listed here are ignored; `ignored_fields` names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from outrider.core.sampling import MAX_TOKENS
from outrider.server.openai.field_types import (
    WHOLE,
    WHOLES,
    Content,
    ExtensibleModel,
    LogitBias,
    Penalty,
    Probability,
    PromptIds,
    StopString,
    StrictModel,
    TokenCount,
    TokenId,
    TokenIds,
)

MAX_CHOICES_PER_PROMPT = 128
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20

Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT), WHOLE]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE]
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1), WHOLE]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE]


class StreamOptions(ExtensibleModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Pad chunks so that their sizes do not reveal how many tokens a round accepted."""


class SpeculationOptions(StrictModel):
    """How drafts are made for this request. The output is the same in any case."""

    drafter: str | None = Field(None, max_length=256)
    """`none`, or the name of the server's drafter."""
    max_tokens: Annotated[int, Field(ge=0, le=1024), WHOLE] | None = None
    """Max tokens drafted in a round."""
    off: bool | None = None


class PredictionContent(StrictModel):
    """Text the output is expected to contain."""

    type: Literal["content"]
    content: Content


class CompletionFields(ExtensibleModel):
    """The fields that chat and text completions share."""

    model: str | None = Field(None, max_length=1024)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    """0 and -1 keep all."""
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: Probability | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    banned_token_ids: TokenIds | None = None
    min_tokens: CountOrZero | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    n: Choices | None = None
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


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=128, fail_fast=True)]


class AllowedToolsChoice(StrictModel):
    """Which of the tools may be called; the model is still shown all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


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
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolParam], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictionContent | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where the assistant's message begins. Default: unless the final message goes on."""
    continue_final_message: bool | None = None
    """The output continues the text of the last message."""


class CompletionRequest(CompletionFields):
    prompt: (
        str
        | PromptIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: CountOrZero | None = None
    """0 with echo scores the prompt alone."""
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
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
    """For messages, as in a chat."""
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ExtensibleModel):
    model: str | None = Field(None, max_length=1024)
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), WHOLES]
