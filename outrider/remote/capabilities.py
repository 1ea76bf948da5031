"""Request fields that other engines lack: refused by name, with what works instead."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.remote.replica import EngineKind
from outrider.server.http.errors import APIError
from outrider.server.openai.request_schema import AllowedToolsChoice, ChatRequest, CompletionFields
from outrider.server.openai.responses_request import AllowedFunctions, ResponsesRequest

VLLM_MISSING: Mapping[str, str] = {
    "prediction": "vLLM drafts from no predicted output; leave it out",
    "include_provenance": "vLLM does not tell where a token comes from; metrics.speculative_decoding has its counts",
    "speculation": "vLLM drafts for all requests alike; choose the drafter when the server starts",
    "typical_p": "vLLM has no typical sampling; use top_p or top_k",
    "banned_token_ids": "vLLM bans no ids; without a drafter it takes a logit_bias of -100",
    "response_format.grammar": "vLLM reads no Lark grammars; use json_schema, regex or choice",
    "tool_choice.allowed_tools": "vLLM has no allowed_tools; send only the tools that may be called",
}
"""Fields of requests that vLLM lacks, and what to do."""
VLLM_DRAFTING_MISSING: Mapping[str, str] = {
    "logit_bias": "vLLM takes none while it drafts; use allowed_token_ids, or serve without a drafter",
    "min_p": "vLLM takes none while it drafts; use top_p or top_k, or serve without a drafter",
}
"""Further fields that vLLM lacks while it drafts."""
VLLM_RESPONSES_MISSING: Mapping[str, str] = {
    "min_tokens": "vLLM's /v1/responses has no min_tokens; use /v1/chat/completions",
    "allowed_token_ids": "vLLM's /v1/responses has no allowed_token_ids; use /v1/chat/completions",
}
"""Further fields that vLLM lacks on /v1/responses."""
VLLM_DIFFERENT: Mapping[str, str] = {
    "seed": "with a drafter a text is not repeated by its seed; without one it is, beside the same other requests",
    "special tokens": "those that clients write in messages are control tokens",
    "target passes, prediction tokens, decisions": "vLLM does not count them, and no figures show them",
}
"""What works differently with vLLM."""


def lacks(kind: EngineKind, *, drafts: bool = False) -> dict[str, Mapping[str, str]]:
    """What a server with a replica of this kind lacks or does differently, for /v1/models and the page.

    drafts: whether it is known to draft.
    """
    if kind != "vllm":
        return {"missing": {}, "different": {}}
    return {"missing": {**VLLM_MISSING, **(VLLM_DRAFTING_MISSING if drafts else {})}, "different": VLLM_DIFFERENT}


def check_supported(body: CompletionFields, kind: EngineKind, *, drafts: bool = False) -> None:
    """APIError for the first requested field that the engine lacks."""
    if kind != "vllm":
        return
    missing = lacks(kind, drafts=drafts)["missing"]
    table = {**missing, **(VLLM_RESPONSES_MISSING if isinstance(body, ResponsesRequest) else {})}
    asked = {name for name in body.model_fields_set & table.keys() if getattr(body, name) not in (None, False, [], {})}
    if isinstance(body, ChatRequest) and body.response_format and body.response_format.type == "grammar":
        asked.add("response_format.grammar")
    choice = body.tool_choice if isinstance(body, (ChatRequest, ResponsesRequest)) else None
    if isinstance(choice, (AllowedToolsChoice, AllowedFunctions)):
        asked.add("tool_choice.allowed_tools")
    for name, why in table.items():
        if name in asked:
            raise APIError(400, f"{name} is not offered with this engine: {why}", param=name, code="not_supported")
