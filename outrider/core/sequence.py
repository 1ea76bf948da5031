"""One text being generated, and its part of a pass. Data only."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol, Self, overload

from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import MAX_TOKENS, SamplingParams, Token

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Constraint(Protocol):
    """What one text may contain: a grammar, and how far the text has come in it.

    Kept with the sequence, so that a preempted text loses nothing. Asking changes nothing:
    the same text and path always give the same result, whatever was asked in between.
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

        `stops` end the text: allowed exactly where the grammar can end and could also continue.
        Where the text is done, and behind a path that breaks the grammar or holds a stop,
        nothing is allowed: such rows are never reached.
        """
        ...

    def advance(self, tokens: Seq[Token]) -> None:
        """Advance by committed tokens, each of which is allowed and none a stop token."""
        ...

    def forced(self) -> tuple[Token, ...]:
        """The run of tokens that must come next, to draft from; empty where there is a choice."""
        ...

    def fork(self) -> Self:
        """A copy that advances independently from here."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One text being generated: the request, and its progress. Only the engine changes it."""

    id: int
    tokens: list[Token]
    prompt_len: int
    params: SamplingParams
    seed: int
    """The seed of the noise in mode `seeded`."""
    stop_ids: frozenset[Token] = frozenset()
    limit: int = MAX_TOKENS
    """Max tokens in all, prompt included."""
    prediction: tuple[Token, ...] = ()
    """Text the caller expects, for the prediction drafter."""
    max_draft: int | None = None
    """Max tokens drafted per round for this request; None leaves it to the drafter."""
    salt: str = ""
    """Caches are never shared between sequences of different salt."""
    constraint: Constraint | None = None
    """What the text may contain; None: anything."""
    cached: int = 0
    """The number of `tokens` whose keys and values are in the target's cache."""
    round: int = 0
    finish: FinishReason | None = None
    stop_reason: Token | str | None = None
    """The stop id or string that ended the text, where one did."""
    nonce: int = 0
    """Differs between sequences of an engine, even with equal seeds, see `draw_seed`. 0: nothing is drafted."""

    @property
    def draw_seed(self) -> int:
        """The seed of draws in mode `distribution`: independent of earlier sequences, whatever is drafted from them."""
        return self.seed ^ self.nonce

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def plain_logits(self) -> bool:
        """Whether neither options nor a constraint change the logits; temperature may."""
        return self.constraint is None and self.params.plain_logits

    @property
    def unprocessed(self) -> bool:
        """Whether neither options nor a constraint change the logits before temperature."""
        return self.constraint is None and self.params.unprocessed

    @property
    def reads_text(self) -> bool:
        """Whether the effect of options or the constraint on the next logits depends on the text."""
        params = self.params
        early = bool(self.stop_ids) and self.generated < params.min_tokens
        return self.constraint is not None or early or params.has_penalties or bool(params.logits_processors)

    @property
    def pending(self) -> int:
        """Tokens the target has yet to read: 1 while decoding, more while reading the prompt."""
        return len(self.tokens) - self.cached

    @property
    def room(self) -> int:
        """The number of tokens that the text may still gain."""
        return self.limit - len(self.tokens)


class TokensView(Seq[Token]):
    """A read-only view of a sequence's tokens: always those it has now, and never copied as a whole."""

    __slots__ = ("_seq",)

    def __init__(self, seq: Sequence) -> None:
        self._seq = seq

    @overload
    def __getitem__(self, at: int) -> Token: ...
    @overload
    def __getitem__(self, at: slice) -> list[Token]: ...
    def __getitem__(self, at: int | slice) -> Token | list[Token]:
        return self._seq.tokens[at]

    def __len__(self) -> int:
        return len(self._seq.tokens)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._seq.tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._seq.tokens

    def __add__(self, tokens: list[Token]) -> list[Token]:
        return self._seq.tokens + tokens

    def __eq__(self, other: object) -> bool:
        return self._seq.tokens == (list(other) if isinstance(other, TokensView) else other)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as a list's


class ConstraintView:
    """A read-only view of a constraint: it can be asked but not advanced. A fork of it can be advanced."""

    __slots__ = ("_constraint", "allowed", "forced", "fork")

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self.allowed, self.forced, self.fork = constraint.allowed, constraint.forced, constraint.fork

    @property
    def done(self) -> bool:
        return self._constraint.done

    @property
    def problem(self) -> str:
        return self._constraint.problem

    def advance(self, tokens: Seq[Token]) -> None:
        raise AttributeError(
            "a constraint belongs to its sequence, which only the engine changes; advance a fork of it"
        )


_FIXED = ("id", "params", "seed", "limit")
"""Fields that never change and are read most often: views hold copies of them."""


class SequenceView(Sequence):
    """A read-only view of a sequence, as drafters get it: always as the sequence is now. Changing it raises."""

    __slots__ = ("_seq", "_tokens")

    def __init__(self, seq: Sequence) -> None:
        object.__setattr__(self, "_seq", seq)
        object.__setattr__(self, "_tokens", TokensView(seq))
        for name in _FIXED:
            object.__setattr__(self, name, getattr(seq, name))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"only the engine changes a sequence: {name} of sequence {self.id} is to be read")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    @property
    def tokens(self) -> TokensView:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._tokens

    @property
    def constraint(self) -> Constraint | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        own = self._seq.constraint
        return None if own is None else ConstraintView(own)  # pyright: ignore[reportReturnType] - its forks are free

    def shows(self, seq: Sequence) -> bool:
        """Whether this is a view of that very sequence."""
        return self._seq is seq


for _name in (field.name for field in fields(Sequence) if field.name not in ("tokens", "constraint", *_FIXED)):
    setattr(SequenceView, _name, property(attrgetter(f"_seq.{_name}")))


class Span(NamedTuple):
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
        return len(self.tokens) + len(self.draft.tokens)

    @property
    def scored(self) -> int:
        """The number of rows counted for this span: its width, or less where its draft shares rows with others."""
        return len(self.tokens) + self.draft.scored

    @property
    def rows(self) -> int:
        """The number of rows of logits that this span asks for."""
        return 1 + len(self.draft.tokens) if self.wanted else 0
