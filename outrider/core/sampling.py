"""Sampling parameters of a request, validated, and the bounds of every count a caller may give."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeGuard

from torch import Tensor

from outrider.core.errors import ConfigError, RequestError

Token = int
LogitsProcessor = Callable[[Seq[Token], Tensor], Tensor]

NO_TOKEN = -1  # in place of a token where none can be chosen

MAX_TOKENS = 1 << 20  # an upper bound on every count a request may name
MAX_BATCH = 4096
MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_SEED = (1 << 64) - 1
MAX_BIAS = 1e9  # decides any choice, and float32 logits stay finite when it is added

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "best_of": "n",
    "temp": "temperature",
    "do_sample": "temperature",
    "typical": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "bad_words_ids": "banned_token_ids",
    "eos_token_id": "stop_token_ids",
    "top_logprobs": "logprobs",
    "random_seed": "seed",
}
"""Names that other engines have for fields of SamplingParams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and where the text ends. The same with speculation on or off."""

    temperature: float = 0.0
    """0 takes the best token; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the best one; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the most typical tokens (information nearest the entropy) up to this mass; 1 keeps all."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it occurs in the output."""
    logit_bias: Mapping[Token, float] = field(default_factory=dict[Token, float])
    """Added to the logits of these tokens; -1e9 to 1e9."""
    allowed_token_ids: tuple[Token, ...] | None = None
    """Only these tokens may be chosen."""
    banned_token_ids: tuple[Token, ...] = ()
    """These tokens are never chosen."""
    min_tokens: int = 0
    """No end-of-text token, stop id or stop string ends the text before this many tokens."""
    max_tokens: int = 256
    """At most this many new tokens."""
    stop_token_ids: tuple[Token, ...] = ()
    """Tokens that end the text, besides the model's own end-of-text tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; never part of it."""
    ignore_eos: bool = False
    """Continue past the model's own end-of-text tokens."""
    seed: int | None = None
    """The same seed gives the same text. None draws a random one."""
    n: int = 1
    """How many texts for each prompt, each with a seed of its own."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many alternatives; None reports none."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Called as f(tokens so far, logits [vocab]) -> logits, at every position."""

    def __new__(cls, *args: object, **given: object) -> SamplingParams:
        """Refuse the names that other engines use; `__init__` refuses all others."""
        for name in given.keys() & OTHER_NAMES:
            raise RequestError(f"SamplingParams has no {name}; it is called {OTHER_NAMES[name]} here")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "banned_token_ids", "allowed_token_ids", "logits_processors"):
            if name != "allowed_token_ids" or self.allowed_token_ids is not None:
                object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        _check_params(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain_logits(self) -> bool:
        """Whether nothing but temperature changes the logits."""
        return self.unprocessed and (self.greedy or self.untruncated)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def unprocessed(self) -> bool:
        """Whether no option changes the logits before temperature."""
        return (
            not self.has_penalties
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.banned_token_ids
            and self.min_tokens == 0
            and not self.logits_processors
        )

    @property
    def untruncated(self) -> bool:
        """Whether no option removes unlikely tokens."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0 and self.typical_p == 1


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    """One value or several, as a tuple."""
    if isinstance(value, (str, int)):
        return (value,)
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} takes one or a list of them, got {short_repr(value)}; leave it out for none")
    return tuple(value)


def _check_params(p: SamplingParams) -> None:
    """Raise RequestError for the first field of the wrong type or outside its range."""

    def within(name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(p, name)
        if not is_finite(value):
            raise RequestError(f"{name} must be a finite number, got {short_repr(value)}")
        if not (low < value if above else low <= value) or value > high:
            least = "above" if above else "at least"
            raise RequestError(f"{name} must be {least} {low} and at most {high}, got {short_repr(value)}")

    def integer(name: str, low: int, high: int) -> None:
        value = getattr(p, name)
        if not is_int(value):
            raise RequestError(f"{name} must be a whole number, got {short_repr(value)}")
        within(name, low, high)

    within("temperature", 0, 100)
    within("top_p", 0, 1, above=True)
    within("min_p", 0, 1)
    within("typical_p", 0, 1, above=True)
    within("repetition_penalty", 0, 100, above=True)
    within("presence_penalty", -100, 100)
    within("frequency_penalty", -100, 100)
    integer("top_k", 0, MAX_TOKENS)
    integer("min_tokens", 0, MAX_TOKENS)
    integer("max_tokens", 1, MAX_TOKENS)
    integer("n", 1, MAX_N)
    if p.seed is not None:
        integer("seed", 0, MAX_SEED)
    if p.logprobs is not None:
        integer("logprobs", 0, MAX_LOGPROBS)
    _check_lists(p)


def _check_lists(p: SamplingParams) -> None:
    if p.min_tokens > p.max_tokens:
        raise RequestError(f"min_tokens ({p.min_tokens}) is more than max_tokens ({p.max_tokens})")
    if len(p.stop) > MAX_STOPS:
        raise RequestError(f"at most {MAX_STOPS} stop strings, got {len(p.stop)}")
    for text in p.stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise RequestError(f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {short_repr(text)}")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise RequestError("allowed_token_ids is empty: no token could ever be chosen; leave it out to allow all")
    if not all(callable(each) for each in p.logits_processors):
        raise RequestError("logits_processors are functions of (tokens so far, logits); one of these cannot be called")
    if not isinstance(p.logit_bias, Mapping):
        raise RequestError(
            f"logit_bias maps token ids to numbers, got {short_repr(p.logit_bias)}; leave it out for none"
        )
    for token, bias in p.logit_bias.items():
        if not is_int(token) or not is_finite(bias) or abs(bias) > MAX_BIAS:
            raise RequestError(
                f"logit_bias maps token ids to finite numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                f"got {short_repr(token)}: {short_repr(bias)}"
            )


def is_int(value: object) -> TypeGuard[int]:
    """Whether the value is an int, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether the value is a finite number, and not True or False."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless the option is a whole number from low to high."""
    if not is_int(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {short_repr(value)}")


def short_repr(value: object) -> str:
    """`repr` of a value, at most 80 characters long: for error messages."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError where the parameters name a token the model does not have."""
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if not is_int(token) or not 0 <= token < vocab_size:
                raise RequestError(f"{name}: {token!r} is no token of this model; ids run from 0 to {vocab_size - 1}")


def derive_seeds(params: SamplingParams) -> list[int]:
    """The seed of each of the n texts: the first is the given one, the rest are derived from it."""
    first = secrets.randbits(64) if params.seed is None else params.seed
    return [(first + i * 0x9E3779B97F4A7C15) & MAX_SEED for i in range(params.n)]
