"""The nouns of a round: what is asked, guessed, scored, decided and told. Data only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from torch import Tensor

from outrider.sampling import MAX_TOKENS, SamplingParams, Token

FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["accepted", "recovered", "bonus", "plain"]


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
