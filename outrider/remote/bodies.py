"""From a checked request to the body that a replica is sent."""

from __future__ import annotations

import hashlib
from typing import Any

from outrider.remote.replica import ReplicaCard
from outrider.server.openai.request_schema import ChatRequest, CompletionFields, CompletionRequest
from outrider.server.openai.responses_request import ResponsesRequest
from outrider.server.openai.translate import DEFAULT_COMPLETION_TOKENS, DEFAULT_TEMPERATURE

DEFAULTS: dict[str, Any] = {
    "temperature": DEFAULT_TEMPERATURE,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sent where a client leaves them out: vLLM would take them from the model's generation_config.json."""
_OWN_FORMATS = ("regex", "choice")
"""Types of response_format that vLLM has in `structured_outputs`."""


def body_fields(body: CompletionFields) -> dict[str, Any]:
    """The fields of a request for a replica. Unknown ones are left out, and a header of the response names them."""
    own = {"model", "cache_salt", "stream_options", *(body.model_extra or ())}
    return body.model_dump(by_alias=True, exclude_none=True, exclude=own)


def replica_body(fields: dict[str, Any], body: CompletionFields, card: ReplicaCard, salt: str) -> dict[str, Any]:
    """The request with the fields that the replica's engine has. fields: `body_fields(body)`, which is not changed.

    A stream always ends with its usage, which is left out of the response where the client did not ask for it.
    salt: from `RequestChecks.salt`.
    """
    made = {**fields, "model": card.model}
    if salt:
        made["cache_salt"] = hashlib.sha256(salt.encode()).hexdigest()  # hashed: it holds the client's name
    if body.stream and not isinstance(body, ResponsesRequest):
        made["stream_options"] = {"include_usage": True}
    return _for_vllm(made, body) if card.kind == "vllm" else made


def _for_vllm(made: dict[str, Any], body: CompletionFields) -> dict[str, Any]:
    made = {**DEFAULTS, **made}
    made["top_k"] = max(0, made["top_k"])
    if isinstance(body, ChatRequest):
        lengths = [made.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in made]
        made |= {"max_completion_tokens": min(lengths)} if lengths else {}
        wanted = made.get("response_format", {})
        if wanted.get("type") in _OWN_FORMATS:
            del made["response_format"]
            made["structured_outputs"] = {wanted["type"]: wanted[wanted["type"]]}
        if made.get("add_generation_prompt") is None and body.continue_final_message:
            made["add_generation_prompt"] = False  # vLLM refuses both together
    elif isinstance(body, CompletionRequest):
        made.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
        made.pop("best_of", None)
        made.pop("suffix", None)
    elif isinstance(body, ResponsesRequest):
        made["store"] = False
        made.pop("n", None)
    return made
