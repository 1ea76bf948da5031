"""From a client's request to the engine's: sampling options, prompts as ids, and what comes beside them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.sampling import MAX_SEED, SamplingParams, Token, derive_seeds
from outrider.core.sequence import Constraint
from outrider.engine.request import Request, validate_request
from outrider.llm import LLM
from outrider.server.body import parse
from outrider.server.fitting import least_tokens
from outrider.server.problems import Problem
from outrider.server.schema import ChatRequest, Common, CompletionRequest, Content, Message, Prediction, Speculation

SAME_NAME = (
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
MAX_TEXTS = 1024  # of one request; a server's queue may hold fewer
MAX_ECHOED = 1 << 20  # log-probabilities in an answer that cost no round each: those of echoed prompts
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions; a chat may go on to the end of the context


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request, translated."""

    prompts: tuple[tuple[Token, ...], ...]
    requests: tuple[Request, ...]
    """One for each choice: the n choices of the first prompt, then those of the next."""
    n: int


def translate_chat(body: ChatRequest, llm: LLM, salt: str, constraint: Constraint | None = None) -> Asked:
    """RequestError or Problem where it cannot be served."""
    if body.top_logprobs is not None and not body.logprobs:
        raise Problem(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    given = [template_message(message) for message in body.messages]
    text = llm.tokenizer.chat(given, tools=None if body.tool_choice == "none" else tools or None)
    check_length(text, llm, "messages")
    prompt = tuple(llm.tokenizer.encode(text, special=False))
    room = room_for(prompt, llm, "messages")
    most = min(body.max_completion_tokens or room, body.max_tokens or room)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = _asked(body, [prompt], sampling(body, min(most, room), logprobs), llm, salt)
    if constraint is None:
        return asked
    validate_request(replace(asked.requests[0], constraint=constraint), llm.engine.target)
    return replace(asked, requests=tuple(replace(each, constraint=constraint.fork()) for each in asked.requests))


def count_texts(body: CompletionRequest) -> int:
    """The choices of every prompt. A Problem where they are too many for any server."""
    n, several = body.n or 1, isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    prompts = len(body.prompt) if several else 1
    if prompts * n > MAX_TEXTS:
        raise Problem(400, f"{prompts} prompts with n {n}: at most {MAX_TEXTS} texts at once", param="n")
    return prompts * n


def translate_completion(body: CompletionRequest, llm: LLM, salt: str) -> Asked:
    """RequestError or Problem where it cannot be served. Without tokens to write, there are no requests."""
    n = body.n or 1
    if body.best_of not in (None, n):
        raise Problem(400, f"best_of is not offered; leave it out or let it equal n ({n})", param="best_of")
    if body.suffix:
        raise Problem(400, "suffix is not offered: this server writes on from a prompt's end", param="suffix")
    most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0:
        _check_echo_alone(body, n)
    prompts = completion_prompts(body, llm)
    room = max(room_for(prompt, llm, "prompt") for prompt in prompts)
    if body.echo:
        _check_echoed(sum(map(len, prompts)), n, body.logprobs or 0)
    # an echo alone is checked like any other: as if one token came after it
    asked = _asked(body, prompts, sampling(body, max(1, min(most, room)), body.logprobs), llm, salt)
    return asked if most else replace(asked, requests=())


def completion_prompts(body: CompletionRequest, llm: LLM) -> list[tuple[Token, ...]]:
    """The prompts as ids, whichever of four ways they came."""
    given: Any = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
    for each in given:
        if isinstance(each, str):
            check_length(each, llm, "prompt")
    return [tuple(llm.tokenizer.encode(each)) if isinstance(each, str) else tuple(each) for each in given]


def _check_echo_alone(body: CompletionRequest, n: int) -> None:
    """Whether a prompt can be told with nothing after it."""
    if not body.echo:
        raise Problem(400, "max_tokens: 0 needs echo: true, or nothing is left to answer", param="max_tokens")
    if n > 1:
        raise Problem(400, f"max_tokens: 0 with n {n}: all choices would be the prompt; leave n out", param="n")
    if body.min_tokens:
        raise Problem(400, f"min_tokens ({body.min_tokens}) is more than max_tokens (0)", param="min_tokens")


def _check_echoed(tokens: int, n: int, top: int) -> None:
    """Whether the prompts' part of an answer stays within what one answer may hold."""
    if tokens * n * (1 + top) > MAX_ECHOED:
        raise Problem(
            400,
            f"echo: {tokens} tokens of prompts, n {n} and logprobs {top} make {tokens * n * (1 + top)} values to tell, "
            f"and an answer holds at most {MAX_ECHOED}: send fewer prompts at once, or ask for less of each",
            param="echo",
            code="invalid_value",
        )


def sampling(body: Common, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """The engine's options; OpenAI's defaults where the client says nothing."""
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.include_provenance and logprobs is None:
        logprobs = 0  # the target's own probability of each token is part of its provenance
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


def context_of(llm: LLM) -> int:
    """Most tokens of a text, its prompt included: the model's context, or the cache where that is smaller."""
    target = llm.engine.target
    return min(target.context, target.pool.count * target.pool.size)


def check_length(text: str, llm: LLM, param: str) -> None:
    """A Problem where a text has more bytes than could ever fit; others are encoded to find out."""
    context = context_of(llm)
    if len(text) > context and (least := least_tokens(text, llm.tokenizer)) >= context:
        raise _too_long(context, f"at least {least}", param)


def room_for(prompt: Seq[Token], llm: LLM, param: str) -> int:
    """Tokens the model may still write after this prompt; a Problem with both numbers where there are none."""
    context = context_of(llm)
    if len(prompt) >= context:
        raise _too_long(context, str(len(prompt)), param)
    return context - len(prompt)


def _too_long(context: int, tokens: str, param: str) -> Problem:
    what = "prediction" if param == "prediction" else "prompt"
    return Problem(
        400,
        f"this model's maximum context length is {context} tokens, and the {what} has {tokens}: "
        "shorten it so that at least one more fits",
        code="context_length_exceeded",
        param=param,
    )


def template_message(message: Message) -> dict[str, Any]:
    """A message as a chat template expects it. `developer` is the newer word for `system`."""
    given = message.model_dump(exclude_none=True)
    if message.role == "developer":
        given["role"] = "system"
    for call in given.get("tool_calls", ()):
        call["function"]["arguments"] = _as_object(call["function"]["arguments"])
    if message.content is None and not message.tool_calls:
        raise Problem(400, "a message has no content; send a string, an empty one at least", param="messages")
    return given


def _as_object(arguments: str) -> Any:
    """A call's arguments as templates want them: an object, which they write out as JSON themselves."""
    try:
        value = parse(arguments.encode())
    except Problem:
        return arguments
    return value if isinstance(value, dict) else arguments


def joined(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _asked(
    body: ChatRequest | CompletionRequest, prompts: list[Any], params: SamplingParams, llm: LLM, salt: str
) -> Asked:
    predicted = _predicted(body.prediction)
    if predicted is not None:
        check_length(predicted, llm, "prediction")
    # made once, for it encodes the prediction
    first = llm.request(
        prompts[0], params, prediction=predicted, max_draft=_max_draft(body.speculation, llm), salt=salt
    )
    requests: list[Request] = []
    for prompt in prompts:
        request = replace(first, prompt=prompt)
        validate_request(request, llm.engine.target)
        requests += [replace(request, params=replace(params, n=1, seed=seed)) for seed in derive_seeds(params)]
    return Asked(tuple(prompts), tuple(requests), params.n)


def _predicted(prediction: Prediction | None) -> str | None:
    return None if prediction is None else joined(prediction.content) or None


def _max_draft(speculation: Speculation | None, llm: LLM) -> int | None:
    if speculation is None:
        return None
    if speculation.drafter not in (None, "none") and not _is_own(speculation.drafter, llm):
        raise Problem(
            400,
            f"this server drafts with {llm.drafter.name!r}; drafter may be that or 'none'",
            param="speculation.drafter",
        )
    return 0 if speculation.off or speculation.drafter == "none" else speculation.max_tokens


def _is_own(name: str, llm: LLM) -> bool:
    """Whether the server's drafter goes by this name: its own, its members' in any order, or another it has."""
    own, aliases = llm.drafter.name, getattr(llm.drafter, "aliases", ())
    return name in aliases or sorted(name.split("+")) == sorted(own.split("+"))
