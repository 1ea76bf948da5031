"""The shapes of responses, for the OpenAPI document; the responses themselves are built as plain objects."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error."""

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


class ChosenLength(BaseModel):
    drafter: str
    """`none`: a round without a draft."""
    length: int
    rounds: int


class PassLoad(BaseModel):
    """What the passes of one response were bound by: the time to read the weights, or to compute with them."""

    rows: float
    """Rows of a pass, of all responses together: the mean."""
    bound: Literal["memory", "compute"]
    reading_seconds: float
    """To read the weights at the device's bandwidth."""
    computing_seconds: float
    """To multiply by them at the speed of a large product."""
    bandwidth: float
    """Bytes a second."""
    arithmetic: float
    """Operations a second."""


class DraftDecisions(BaseModel):
    """What the controller decided for one response."""

    rounds: int
    chosen: list[ChosenLength]
    saved_seconds: float
    """What drafting is believed to have saved, by measured costs; negative where it cost time."""
    load: PassLoad | None = None
    """None where it is not known what the device can do."""


class SpeculativeDecoding(BaseModel):
    """What was drafted for one response and how much was accepted, named as in vLLM."""

    mean_acceptance_length: float
    """Tokens of a round with a draft, the target's own included."""
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """Rounds with a draft by the number of tokens accepted, from 0."""
    num_spec_steps: int
    """Rounds with a draft."""
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_accepted_tokens_per_pos: list[int]
    acceptance_rate_per_pos: list[float]
    num_target_passes: int
    drafters: dict[str, int]
    """Accepted tokens of each drafter."""
    decisions: DraftDecisions | None = None
    """None where drafts are of a fixed length."""


class ResponseMetrics(BaseModel):
    speculative_decoding: SpeculativeDecoding


class TokenProvenance(BaseModel):
    """Where a token comes from."""

    token: str
    token_id: int
    origin: Literal["accepted", "recovered", "bonus", "plain"]
    drafter: str
    position: int
    round: int
    drafted: int
    """Tokens drafted in that round."""
    target_prob: float | None
    """Null unless the request asks for logprobs."""
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


class ChatFunctionCall(BaseModel):
    name: str
    arguments: str


class ChatToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    provenance: list[TokenProvenance] | None = None


class CompletionBase(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: ResponseMetrics


class ChatCompletion(CompletionBase):
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
    provenance: list[TokenProvenance] | None = None


class Completion(CompletionBase):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[ChatLogprob]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputFunctionCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(PromptDetails):
    cache_write_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The response of /v1/responses. It also repeats fields of the request, such as `tools` and `text`."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputFunctionCall]
    usage: ResponseUsage
    metrics: ResponseMetrics
    provenance: list[TokenProvenance] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    drafter: str
    """The server's drafter."""
    max_draft_tokens: int
    """Max tokens drafted for one sequence in one round."""
    number_format: str
    weight_bytes: int
    """Size of the weights on disk."""
    device: str
    cache_tokens: int
    """Tokens that the cache holds in all."""
    memory: str
    """How the device's memory is divided, for people to read; empty where that is not planned."""


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
