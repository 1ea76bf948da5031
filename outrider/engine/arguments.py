"""The arguments of LLM's calls as people type them: prompts, conversations, and sampling parameters by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from difflib import get_close_matches
from numbers import Integral
from typing import Any, cast

from outrider.core.errors import RequestError
from outrider.core.sampling import OTHER_NAMES, SamplingParams, Token, short_repr

Message = Mapping[str, Any]
Conversation = str | Seq[Message]
"""Messages with a role and content; a text is what a user says first."""
Prompt = str | Seq[Token] | Seq[Message]
"""Text, token ids (whole numbers of any type), or the messages of a conversation."""
Params = SamplingParams | Seq[SamplingParams] | None
"""One for all prompts, or one for each; None takes the defaults."""

CALL_OPTIONS = ("prediction", "max_draft", "salt", "response_format", "constraint", "allow_special_tokens")
SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
ROLES = ("system", "developer", "user", "assistant", "tool")


def is_token_id(value: object) -> bool:
    """A whole number of any type, numpy's among them; not True or False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def encode_prompt(tokenizer: Any, prompt: Prompt, allow_special_tokens: bool | None = None) -> list[Token]:
    """A prompt as token ids. RequestError if it is not a prompt."""
    options = {} if allow_special_tokens is None else {"allow_special_tokens": allow_special_tokens}
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, **options)
    if not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is text, token ids or messages; got {short_repr(prompt)}")
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        messages = cast(Seq[Message], prompt)
        check_roles(messages, lambda: tokenizer.template_text())
        return tokenizer.encode_chat(messages, **options)
    for token in prompt:
        if not is_token_id(token):
            raise RequestError(f"a prompt of token ids holds whole numbers, got {short_repr(token)}")
    return [int(cast(Token, token)) for token in prompt]


def split_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts of `generate`, and whether it was given a single one. RequestError if they are not prompts."""
    if not isinstance(prompts, str | Seq) and not hasattr(prompts, "__array__"):
        raise RequestError(f"a prompt is text or token ids, or a list of either; got {short_repr(prompts)}")
    if len(prompts) > 0 and isinstance(prompts[0], Mapping):
        raise RequestError("generate completes text or token ids; chat answers messages")
    single = isinstance(prompts, str) or (len(prompts) > 0 and is_token_id(prompts[0]))
    return ([prompts], True) if single else (list(prompts), False)


def split_conversations(messages: Any) -> tuple[list[Seq[Message]], bool]:
    """The conversations of `chat`, and whether it was given a single one. RequestError if they are not such."""
    single = isinstance(messages, str | Mapping) or not isinstance(messages, Seq)
    single = single or all(isinstance(each, Mapping) for each in messages)
    return [_read_conversation(each) for each in ([messages] if single else messages)], single


def _read_conversation(messages: Any) -> Seq[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Seq) or not all(isinstance(each, Mapping) for each in messages):
        raise RequestError(
            "chat takes a text, a list of messages with a role and content, or a list of such conversations; "
            f"got {short_repr(messages)}"
        )
    return messages


def check_roles(messages: Seq[Message], template: Callable[[], str]) -> None:
    """RequestError for a role that is neither a usual one nor in the chat template, which may write it out anyway."""
    for i, message in enumerate(messages):
        role = message.get("role")
        if isinstance(role, str) and role and role not in ROLES and role not in template():
            near = get_close_matches(role, ROLES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(ROLES)}"
            raise RequestError(f"message {i} has the role {role!r}; {hint}")


def params_for(params: Any, count: int) -> list[Any]:
    """The sampling parameters of each of `count` prompts."""
    if not isinstance(params, Seq) or isinstance(params, str):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} SamplingParams for {count} prompts; give one for each, or one for all")
    return list(params)


def merge_params(params: object, given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of one prompt, with the fields given by name in their place."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"the second argument is SamplingParams, or a list of them; got {short_repr(params)}")
    for name in given:
        if name in SAMPLING_FIELDS:
            continue
        known = OTHER_NAMES.get(name) or next(iter(get_close_matches(name, (*CALL_OPTIONS, *SAMPLING_FIELDS), 1)), "")
        hint = f"did you mean {known}? " if known else ""
        raise RequestError(
            f"no option {name!r}; {hint}there are {', '.join(CALL_OPTIONS)} and the fields of SamplingParams"
        )
    return replace(params or SamplingParams(), **given)
