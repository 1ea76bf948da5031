"""The drafter's contract. A drafter is one file and one line in `registry.py`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

from outrider.core.draft import Draft, Verdict
from outrider.core.sequence import Sequence
from outrider.runners.device_state import DeviceState


class Drafter(Protocol):
    """Guesses ahead. May be wrong at will: a bad guess costs time, never correctness.

    A drafter never changes a sequence. Private state is keyed by `seq.id`, and must
    cope with a sequence that grew by any number of tokens since it was last seen,
    since a round may pass without this drafter being asked.

    A drafter whose guess costs about as much as it may save, such as a pass of a model,
    says so with a class attribute `dear = True` (see `is_dear`): `mix` asks it last, and
    only where the cheap ones expect little.
    """

    name: str
    """As registered; written into every draft's `source`."""
    max_tokens: int
    """Most tokens it proposes for one sequence in one round."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Guess at most budgets[i] tokens to follow seqs[i].tokens. Zero is a budget.

        In mode `distribution` a draft whose tokens were sampled states the laws they
        were sampled from (`Draft.probs`), and keeps every token it sampled.
        """
        ...

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """See what the target decided. The sequences hold the committed tokens by now.

        A drafter inside a `mix` whose draft did not win sees an empty draft, and a verdict
        with an empty path that carries all the tokens committed, however many.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """Drop all state of a finished sequence. Called exactly once, with its final text."""
        ...


class Follower(Protocol):
    """A drafter that can guess before the host knows what the round in flight brought: a method besides the others."""

    def follow(self, seqs: Seq[Sequence], budgets: Seq[int], standing: DeviceState) -> list[Draft] | None:
        """As `propose`, after where the device says that each text stands; chains only. None: wait and ask again.

        The sequences are as they were before the round in flight, whose outcome `observe` tells next.
        """
        ...


def follower(drafter: Drafter) -> Follower | None:
    """The drafter, if it can follow a round in flight."""
    return cast(Follower, drafter) if hasattr(drafter, "follow") else None


def is_dear(drafter: Drafter) -> bool:
    """Whether asking this drafter costs enough that it should be asked last."""
    return bool(getattr(drafter, "dear", False))


class ModelLoaded(NamedTuple):
    """A model that a drafter will load."""

    model: str
    device: str = ""
    """Empty: the target's."""
    vocab: int = 0
    """Rows of its head that will be copied."""


def models_loaded(config: DrafterConfig) -> tuple[ModelLoaded, ...]:
    """The models a drafter will load. Room must be left for them."""
    return getattr(config, "loads", ())


def most_drafted(config: DrafterConfig) -> int | None:
    """Most tokens the drafter will propose for one text in a round: its `max_tokens`, else its `k`; None: not said."""
    return getattr(config, "max_tokens", getattr(config, "k", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What a drafter may know of the engine it drafts for."""

    vocab_size: int
    context: int
    """Most tokens a text may have, prompt included."""
    mode: Literal["seeded", "distribution"] = "seeded"
    tokenizer: Any = None
    device: Any = "cpu"
    load_runner: Callable[..., Any] | None = None
    """Loads a draft model by name; only a drafter that runs a model calls it."""
    max_batch: int = 8
    """Most texts it is asked for at once."""


class DrafterConfig(Protocol):
    """The options of one drafter: frozen, checked when made. Nothing is loaded before `build`.

    A drafter that loads models names them in a property `loads`, see `models_loaded`. One whose most
    tokens are not an option `k` says them in a property `max_tokens`, see `most_drafted`.
    """

    def build(self, setting: DrafterContext) -> Drafter:
        """The drafter, ready to draft for an engine of this setting."""
        ...
