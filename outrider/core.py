"""The nouns of a round: what is asked, guessed, scored, decided and told. Data only."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self, TypeGuard

from torch import Tensor

from outrider.errors import ConfigError, RequestError

Token = int
FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["accepted", "recovered", "bonus", "plain"]
LogitsProcessor = Callable[[Seq[Token], Tensor], Tensor]

MAX_TOKENS = 1 << 20  # an upper bound on every count a request may name
MAX_BATCH = 4096
MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_SEED = (1 << 64) - 1
MAX_BIAS = 1e9  # decides any choice, and float32 logits that have it added stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and where the text ends. Exact with speculation on or off."""

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
    """No end-of-text token, stop id or stop string before this many tokens."""
    max_tokens: int = 256
    """At most this many new tokens."""
    stop_token_ids: tuple[Token, ...] = ()
    """Tokens that end the text, beside the model's own end-of-text tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; never part of it."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-text tokens."""
    seed: int | None = None
    """Same seed, same text. None draws a fresh one."""
    n: int = 1
    """How many texts for each prompt, each with a seed of its own."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many alternatives; None reports none."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Called as f(tokens so far, logits [vocab]) -> logits, at every position."""

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
        """Nothing but temperature touches the logits."""
        return self.untouched and (self.greedy or self.untruncated)

    @property
    def untouched(self) -> bool:
        """No option changes logits before temperature."""
        return (
            self.repetition_penalty == 1
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.banned_token_ids
            and self.min_tokens == 0
            and not self.logits_processors
        )

    @property
    def untruncated(self) -> bool:
        """No option removes unlikely tokens."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0 and self.typical_p == 1


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    """What was given, one or several."""
    if isinstance(value, (str, int)):
        return (value,)
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} takes one or a list of them, got {shown(value)}; leave it out for none")
    return tuple(value)


def _check_params(p: SamplingParams) -> None:
    """Raise RequestError for the first field of the wrong type or outside its range."""

    def within(name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(p, name)
        if not is_finite(value):
            raise RequestError(f"{name} must be a finite number, got {shown(value)}")
        if not (low < value if above else low <= value) or value > high:
            least = "above" if above else "at least"
            raise RequestError(f"{name} must be {least} {low} and at most {high}, got {shown(value)}")

    def whole(name: str, low: int, high: int) -> None:
        value = getattr(p, name)
        if not is_whole(value):
            raise RequestError(f"{name} must be a whole number, got {shown(value)}")
        within(name, low, high)

    within("temperature", 0, 100)
    within("top_p", 0, 1, above=True)
    within("min_p", 0, 1)
    within("typical_p", 0, 1, above=True)
    within("repetition_penalty", 0, 100, above=True)
    within("presence_penalty", -100, 100)
    within("frequency_penalty", -100, 100)
    whole("top_k", 0, MAX_TOKENS)
    whole("min_tokens", 0, MAX_TOKENS)
    whole("max_tokens", 1, MAX_TOKENS)
    whole("n", 1, MAX_N)
    if p.seed is not None:
        whole("seed", 0, MAX_SEED)
    if p.logprobs is not None:
        whole("logprobs", 0, MAX_LOGPROBS)
    _check_lists(p)


def _check_lists(p: SamplingParams) -> None:
    if p.min_tokens > p.max_tokens:
        raise RequestError(f"min_tokens ({p.min_tokens}) is more than max_tokens ({p.max_tokens})")
    if len(p.stop) > MAX_STOPS:
        raise RequestError(f"at most {MAX_STOPS} stop strings, got {len(p.stop)}")
    for text in p.stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise RequestError(f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {shown(text)}")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise RequestError("allowed_token_ids is empty: no token could ever be chosen; leave it out to allow all")
    if not all(callable(each) for each in p.logits_processors):
        raise RequestError("logits_processors are functions of (tokens so far, logits); one of these cannot be called")
    if not isinstance(p.logit_bias, Mapping):
        raise RequestError(f"logit_bias maps token ids to numbers, got {shown(p.logit_bias)}; leave it out for none")
    for token, bias in p.logit_bias.items():
        if not is_whole(token) or not is_finite(bias) or abs(bias) > MAX_BIAS:
            raise RequestError(
                f"logit_bias maps token ids to finite numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                f"got {shown(token)}: {shown(bias)}"
            )


def is_whole(value: object) -> TypeGuard[int]:
    """An int, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """A number, however large, but no infinity; not True or False."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """ConfigError unless this option is a whole number from low to high."""
    if not is_whole(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {shown(value)}")


def shown(value: object) -> str:
    """A value as a message quotes it: short, whatever was given."""
    try:
        said = repr(value)
    except ValueError:  # Python spells out no number of thousands of digits
        return "a number of thousands of digits"
    return said if len(said) <= 80 else f"{said[:77]}..."


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError where params names a token the model does not have."""
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if not is_whole(token) or not 0 <= token < vocab_size:
                raise RequestError(f"{name}: {token!r} is no token of this model; ids run from 0 to {vocab_size - 1}")


def derive_seeds(params: SamplingParams) -> list[int]:
    """The seed of each of the n texts: the first keeps the given one, the rest follow from it."""
    first = secrets.randbits(64) if params.seed is None else params.seed
    return [(first + i * 0x9E3779B97F4A7C15) & MAX_SEED for i in range(params.n)]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens guessed to come next: a chain, or a tree. Empty is always a legal guess.

    Node i follows node parents[i]; -1 is the text's last token. Parents come before
    their children. Without parents, each node follows the one before it. Siblings
    hold different tokens.
    """

    tokens: Seq[Token] = ()
    """They may still be on a device: their number is known, and reading them waits."""
    parents: tuple[int, ...] | None = None
    probs: Tensor | None = None
    """[len(tokens), vocab]: the law each token was drawn from; None: certain of each token.

    In a tree, the law at the node's parent before any sibling was drawn.
    """
    source: str = ""
    """The drafter's registered name."""
    expected: float = 0.0
    """How many of these tokens the drafter expects to stand; what `mix` compares."""
    known: bool = False
    """Every token is one of the target's: nobody needs to look."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents is None or all(p == i - 1 for i, p in enumerate(self.parents))

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first guess down to this one."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parent(node)
        return tuple(reversed(nodes))

    def depths(self) -> tuple[int, ...]:
        """How far each node lies beyond the text: 1 for a first guess."""
        if self.parents is None:
            return tuple(range(1, len(self.tokens) + 1))
        out: list[int] = []
        for p in self.parents:
            out.append(1 if p < 0 else out[p] + 1)
        return tuple(out)

    def children(self, node: int) -> list[int]:
        return [i for i in range(node + 1, len(self.tokens)) if self.parent(i) == node]

    def first_nodes(self, count: int) -> Draft:
        """The draft cut to its first `count` nodes; still a tree, since parents come first."""
        if count >= len(self.tokens):
            return self
        return replace(
            self,
            tokens=self.tokens[:count],
            parents=None if self.parents is None else self.parents[:count],
            probs=None if self.probs is None else self.probs[:count],
        )

    def first_chain(self) -> Draft:
        """The chain of first children: what a target that scores no trees can check."""
        if self.is_chain:
            return self
        nodes: list[int] = []
        while children := self.children(nodes[-1] if nodes else -1):
            nodes.append(children[0])
        return replace(
            self,
            tokens=tuple(self.tokens[i] for i in nodes),
            parents=None,
            probs=None if self.probs is None else self.probs[list(nodes)],
        )


EMPTY = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft: the kept tokens, then one of its own."""

    tokens: tuple[Token, ...]
    path: tuple[int, ...] = ()
    """The kept nodes of the draft, in order; tokens has one more."""

    @property
    def accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the target's own law (temperature 1, no options)."""

    token: Token
    logprob: float
    rank: int
    top: tuple[tuple[Token, float], ...] = ()
    """The most likely tokens there, best first."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who brought a token: drafted and accepted, the target's correction, or its bonus."""

    origin: Origin
    drafter: str
    """Empty where nobody drafted."""
    position: int
    """Place in the draft, from 0; where the target spoke, how many had been accepted."""
    round: int
    drafted: int
    """Tokens drafted in that round."""
    draft_prob: float | None = None
    """What the drafter gave an accepted token; None where it stated no law."""


class Constraint(Protocol):
    """What one text may say: a grammar, and how far the text has come in it.

    Kept with the sequence, so that a preempted text loses nothing. Asking changes nothing:
    the same text and path always give the same answer, whatever was asked in between.
    """

    @property
    def done(self) -> bool:
        """The text is complete and nothing may follow it: it ends here, stop token or not."""
        ...

    @property
    def problem(self) -> str:
        """Why the grammar cannot be followed any further; empty where it can."""
        ...

    def allowed(self, paths: Seq[tuple[Token, ...]], stops: frozenset[Token]) -> Tensor:
        """bool [len(paths), vocab] on the CPU: the tokens that may follow the text and then each path.

        `stops` end the text: allowed exactly where the grammar can end and could also go on.
        Where the text is done, and behind a path that breaks the grammar or holds a stop,
        nothing is allowed: such rows are never reached.
        """
        ...

    def advance(self, tokens: Seq[Token]) -> None:
        """Take in committed text, each token of it allowed; no stop token among them."""
        ...

    def forced(self) -> tuple[Token, ...]:
        """The tokens that must come next, a run of them; empty where there is a choice. To draft from."""
        ...

    def fork(self) -> Self:
        """A copy that goes its own way from here."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One text in the making: the request, and where it stands. Only the engine changes it."""

    id: int
    tokens: list[Token]
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[Token] = frozenset()
    limit: int = MAX_TOKENS
    """Most tokens in all, prompt included."""
    prediction: tuple[Token, ...] = ()
    """Text the caller expects, for the prediction drafter."""
    max_draft: int | None = None
    """Most tokens drafted a round for this request; None leaves it to the drafter."""
    salt: str = ""
    """Caches are never shared between sequences of different salt."""
    constraint: Constraint | None = None
    """What the text may say; None: anything."""
    cached: int = 0
    """How many of tokens have keys and values in the target's cache."""
    round: int = 0
    finish: FinishReason | None = None
    stop_reason: Token | str | None = None
    """The stop id or string that ended the text, where one did."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def plain_logits(self) -> bool:
        """Neither options nor a constraint touch the logits; temperature may."""
        return self.constraint is None and self.params.plain_logits

    @property
    def untouched(self) -> bool:
        """Neither options nor a constraint change logits before temperature."""
        return self.constraint is None and self.params.untouched

    @property
    def pending(self) -> int:
        """Tokens the target has yet to read: 1 while decoding, more while reading the prompt."""
        return len(self.tokens) - self.cached

    @property
    def room(self) -> int:
        """How many more tokens the text may take."""
        return self.limit - len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a pass: text to read, then a draft to score.

    `start` tokens are in the cache already. Logits come back for the last text token
    and for every draft node, in that order; none where `wanted` is False.
    """

    seq_id: int
    start: int
    tokens: tuple[Token, ...]
    draft: Draft = EMPTY
    wanted: bool = True

    @property
    def width(self) -> int:
        return len(self.tokens) + len(self.draft)

    @property
    def rows(self) -> int:
        """How many rows of logits this span asks for."""
        return 1 + len(self.draft) if self.wanted else 0
