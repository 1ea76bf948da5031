"""From a client's request to the engine's: prompts as token ids, sampling parameters, prediction and draft length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outrider.core.errors import RequestError
from outrider.core.sampling import MAX_SEED, SamplingParams, Token, derive_seeds
from outrider.core.sequence import Constraint
from outrider.engine.client import EngineClient, EngineFacts
from outrider.engine.request import CheckedRequest, Request, encode_prediction
from outrider.server.http.errors import APIError
from outrider.server.openai.chat_prompt import chat_prompt
from outrider.server.openai.field_types import Content
from outrider.server.openai.length_bounds import min_token_count
from outrider.server.openai.request_schema import (
    AllowedToolsChoice,
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    SpeculationOptions,
)

SHARED_FIELDS = (
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "banned_token_ids",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "n",
)
"""Fields that SamplingParams has under the same name and with the same meaning."""
MAX_REQUEST_SEQUENCES = 1024  # of one request; a server's queue may hold fewer
MAX_ECHOED = 1 << 20  # log-probabilities of echoed prompts in one response
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions; a chat may fill the context


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A client's request as the engine takes it, validated."""

    prompts: tuple[CheckedRequest, ...]
    """One for each prompt, with all its n choices."""
    requests: tuple[CheckedRequest, ...]
    """One for each choice: the n choices of the first prompt, then those of the next. Empty: nothing to generate."""
    n: int

    @property
    def prompt_tokens(self) -> list[tuple[Token, ...]]:
        return [each.request.prompt for each in self.prompts]


def translate_chat(
    body: ChatRequest,
    engine: EngineClient,
    salt: str,
    constraint: Constraint | None = None,
    allow_special_tokens: bool = False,
) -> TranslatedRequest:
    """The engine's request for a chat. Special tokens in messages are text unless allowed. RequestError or APIError
    where it cannot be served."""
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    listed = None if body.tool_choice == "none" else tools or None
    rendered = chat_prompt(body, engine.tokenizer, listed, allow_special_tokens=allow_special_tokens)
    _check_length(rendered.text, engine, "messages")
    prompt = tuple(engine.tokenizer.encode_rendered(rendered))
    room = _max_new_tokens(prompt, engine.facts, "messages")
    max_tokens = min(body.max_completion_tokens or room, body.max_tokens or room)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = _base_request(body, sampling_params(body, min(max_tokens, room), logprobs), engine, salt)
    return _validated(replace(request, constraint=constraint), [prompt], engine)


def callable_tools(body: ChatRequest) -> ChatRequest:
    """The request with only the tools that `allowed_tools` names, for its constraint; the prompt still lists all."""
    choice = body.tool_choice
    if not isinstance(choice, AllowedToolsChoice):
        return body
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    tools = [tool for tool in body.tools or () if tool.function.name in names]
    unknown = sorted(names - {tool.function.name for tool in tools})
    if unknown:
        raise APIError(
            400,
            f"tool_choice allows {unknown[0]!r}, which is none of the tools; name those that the request has",
            param="tool_choice",
            code="invalid_value",
        )
    return body.model_copy(update={"tools": tools, "tool_choice": choice.allowed_tools.mode})


def count_sequences(body: CompletionRequest) -> int:
    """The number of choices of all prompts. APIError where it is above MAX_REQUEST_SEQUENCES."""
    n, several = body.n or 1, isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    prompts = len(body.prompt) if several else 1
    if prompts * n > MAX_REQUEST_SEQUENCES:
        raise APIError(400, f"{prompts} prompts with n {n}: at most {MAX_REQUEST_SEQUENCES} texts at once", param="n")
    return prompts * n


def translate_completion(
    body: CompletionRequest, engine: EngineClient, salt: str, allow_special_tokens: bool = True
) -> TranslatedRequest:
    """The engine's requests for a completion; with max_tokens 0 nothing is generated. RequestError or APIError where it
    cannot be served."""
    check_completion(body)
    n = body.n or 1
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = _completion_prompts(body, engine, allow_special_tokens)
    room = max(_max_new_tokens(prompt, engine.facts, "prompt") for prompt in prompts)
    if body.echo:
        _check_echo_size(sum(map(len, prompts)), n, body.logprobs or 0)
    # an echo alone is validated like any completion: as if one token followed it
    params = sampling_params(body, max(1, min(max_tokens, room)), body.logprobs)
    translated = _validated(_base_request(body, params, engine, salt), prompts, engine)
    return translated if max_tokens else replace(translated, requests=())


def check_completion(body: CompletionRequest) -> None:
    """APIError where the request asks for something that is not offered, whatever the model."""
    n = body.n or 1
    if body.best_of not in (None, n):
        raise APIError(400, f"best_of is not offered; leave it out or let it equal n ({n})", param="best_of")
    if body.suffix:
        raise APIError(400, "suffix is not offered: this server writes on from a prompt's end", param="suffix")
    if body.max_tokens == 0:
        _check_echo_only(body, n)


def _completion_prompts(
    body: CompletionRequest, engine: EngineClient, allow_special_tokens: bool
) -> list[tuple[Token, ...]]:
    """The prompts as token ids: one or several, each text or ids."""
    given: Any = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
    for each in given:
        if isinstance(each, str):
            _check_length(each, engine, "prompt")
    encode = partial(engine.tokenizer.encode, allow_special_tokens=allow_special_tokens)
    return [tuple(encode(each)) if isinstance(each, str) else tuple(each) for each in given]


def _check_echo_only(body: CompletionRequest, n: int) -> None:
    """APIError where a prompt cannot be echoed with nothing after it."""
    if not body.echo:
        raise APIError(400, "max_tokens: 0 needs echo: true, or nothing is left to answer", param="max_tokens")
    if n > 1:
        raise APIError(400, f"max_tokens: 0 with n {n}: all choices would be the prompt; leave n out", param="n")
    if body.min_tokens:
        raise APIError(400, f"min_tokens ({body.min_tokens}) is more than max_tokens (0)", param="min_tokens")


def _check_echo_size(tokens: int, n: int, top: int) -> None:
    """APIError where the echoed prompts are more than one response holds."""
    if tokens * n * (1 + top) > MAX_ECHOED:
        raise APIError(
            400,
            f"echo: {tokens} tokens of prompts, n {n} and logprobs {top} make {tokens * n * (1 + top)} values to tell, "
            f"and an answer holds at most {MAX_ECHOED}: send fewer prompts at once, or ask for less of each",
            param="echo",
            code="invalid_value",
        )


def sampling_params(body: CompletionFields, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """The engine's parameters; OpenAI's defaults where a field is absent."""
    given = {name: value for name in SHARED_FIELDS if (value := getattr(body, name)) is not None}
    return SamplingParams(
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        seed=None if body.seed is None else body.seed & MAX_SEED,
        max_tokens=max_tokens,
        logprobs=logprobs,
        **given,
    )


def _check_length(text: str, engine: EngineClient, param: str) -> None:
    """APIError where the text's bytes alone show that it cannot fit; any other text is encoded to find out."""
    limit = engine.facts.max_length
    if len(text) > limit and (count := min_token_count(text, engine.tokenizer)) >= limit:
        raise _too_long(limit, f"at least {count}", param)


def _max_new_tokens(prompt: Seq[Token], facts: EngineFacts, param: str) -> int:
    """Tokens that may follow this prompt; APIError with both numbers where there is room for none."""
    if len(prompt) >= facts.max_length:
        raise _too_long(facts.max_length, str(len(prompt)), param)
    return facts.max_length - len(prompt)


def _too_long(limit: int, tokens: str, param: str) -> APIError:
    return APIError(
        400,
        f"this model's maximum context length is {limit} tokens, and the prompt has {tokens}: "
        "shorten it so that at least one more fits",
        code="context_length_exceeded",
        param=param,
    )


def _joined(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _base_request(
    body: ChatRequest | CompletionRequest, params: SamplingParams, engine: EngineClient, salt: str
) -> Request:
    """The request without its prompt, so that a prediction is encoded once for all prompts."""
    facts, text = engine.facts, _joined(body.prediction.content) if body.prediction else ""
    max_draft = _draft_limit(body.speculation, facts)
    if text and not facts.uses_prediction:
        raise RequestError(
            f"drafter {facts.drafter!r} drafts from no prediction; use 'prediction' or 'suffix+prediction'"
        )
    encode = partial(engine.tokenizer.encode, special=False)
    prediction = encode_prediction(text, encode, facts.max_length) if text else ()
    return Request(prompt=(), params=params, prediction=prediction, max_draft=max_draft, salt=salt)


def _validated(base: Request, prompts: Seq[tuple[Token, ...]], engine: EngineClient) -> TranslatedRequest:
    """Each prompt's request, validated once, and a request with its own seed for each of its choices."""
    params = base.params
    checked = tuple(engine.validate(replace(base, prompt=prompt)) for prompt in prompts)
    requests = [
        replace(each, request=replace(each.request, params=replace(params, n=1, seed=seed)))
        for each in checked
        for seed in derive_seeds(params)
    ]
    return TranslatedRequest(checked, tuple(requests), params.n)


def _draft_limit(speculation: SpeculationOptions | None, facts: EngineFacts) -> int | None:
    """Max tokens to draft in a round; None: the drafter's own. APIError for a drafter that is not the server's."""
    if speculation is None:
        return None
    if speculation.drafter not in (None, "none") and not _is_drafter(speculation.drafter, facts):
        raise APIError(
            400,
            f"this server drafts with {facts.drafter!r}; drafter may be that or 'none'",
            param="speculation.drafter",
        )
    return 0 if speculation.off or speculation.drafter == "none" else speculation.max_tokens


def _is_drafter(name: str, facts: EngineFacts) -> bool:
    """Whether the server's drafter has this name: its own, an alias, or its members' in any order."""
    return name in facts.drafter_aliases or sorted(name.split("+")) == sorted(facts.drafter.split("+"))
