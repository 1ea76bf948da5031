"""What clients get back. Written for the OpenAPI document; the answers themselves are built as plain objects."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer that is an error."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SpeculativeDecoding(BaseModel):
    """What was drafted for one answer and what became of it, named as in vLLM."""

    num_drafts: int
    """Rounds with a draft."""
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    mean_acceptance_length: float
    """Tokens a drafted round brought, the target's own included."""
    draft_acceptance_rate: float
    acceptance_rate_per_pos: list[float]
    acceptance_histogram: list[int]
    """Drafted rounds by how many tokens were accepted, from 0."""
    num_target_passes: int
    drafters: dict[str, int]
    """Accepted tokens of each drafter."""


class Metrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


class TokenOrigin(BaseModel):
    """Who brought a token."""

    token: str
    token_id: int
    origin: Literal["accepted", "recovered", "bonus", "plain"]
    drafter: str
    position: int
    round: int
    drafted: int
    """Tokens drafted in that round."""
    target_prob: float | None
    draft_prob: float | None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    provenance: list[TokenOrigin] | None = None


class Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Metrics


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    provenance: list[TokenOrigin] | None = None


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    drafter: str
    """Who drafts for it, where a request does not say otherwise."""


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ready"]


class Version(BaseModel):
    version: str
