"""The drafter's contract. A drafter is one file and one line in `registry.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from outrider.core.draft import Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence, Span
from outrider.runners.base import Runner, Scores
from outrider.runners.device_state import DeviceState


class ModelLoaded(NamedTuple):
    """A model that a drafter loads: memory is reserved for it."""

    model: str
    """Empty: the target's own checkpoint."""
    device: str = ""
    """Empty: the target's."""
    vocab: int = 0
    """Rows of its output head that are copied."""
    module: bool = False
    """Only its MTP module is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a drafter is and needs, as data: a drafter is not probed for what it can do."""

    name: str
    """As registered; written into every draft's `source`."""
    max_tokens: int
    """Max tokens it proposes for one sequence in one round."""
    aliases: tuple[str, ...] = ()
    """Other names it answers to."""
    runs_model: bool = False
    """A proposal costs about as much as it may save: `mix` asks such a drafter last."""
    drafts_ahead: bool = False
    """It can propose from a DeviceState, before the host knows the outcome of the round in flight."""
    drafts_newcomers: bool = False
    """It does so for sequences, too, that join a round behind one in flight; else it is not asked for them there."""
    pays_budget: bool = False
    """A pass is as wide as its budget, however few tokens it drafts: the host does not see them first."""
    limits_itself: bool = False
    """How far it drafts is its own choice for each text, nothing included: a budget only cuts that."""
    observes: bool = True
    """`observe` is called after rounds."""
    watches: bool = False
    """`watch` is called in rounds in which it is not asked."""
    follows_target: bool = False
    """`process` is called after every pass of the target."""
    ignores_scores: bool = False
    """Of what the target has read, `process` looks at the texts alone."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose outputs `process` gets."""
    kept_taps: tuple[int, ...] = ()
    """Layers of the target whose outputs it reads in the target's pages, when it is asked."""
    uses_prediction: bool = False
    """It drafts from `Sequence.prediction`."""
    shares: bool = False
    """Its drafts share the rows of a pass where a round has `room`: those tokens have one that it is surest of."""
    needs_prediction: bool = False
    """It drafts nothing for a sequence without one, and need not be asked."""
    states_probs: bool = False
    """In mode `distribution` its drafts carry the distributions they were sampled from."""
    guards_itself: bool = False
    """Nothing that it is made of can make it fail: it is asked without a guard around it."""
    loads: tuple[ModelLoaded, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundView:
    """A round to draft for."""

    seqs: Seq[Sequence]
    budgets: Seq[int]
    """Max tokens to draft for each; 0 is a budget."""
    state: DeviceState | None = None
    """Where the device already is, in the order of seqs: the host's sequences lack the round in flight.

    None: the sequences are up to date.
    """
    compared: bool = True
    """Whether anybody reads what drafts expect and how sure they are: on a device that is a copy to the host."""
    room: Seq[int] | None = None
    """Max tokens of each where drafts may share the budgets of all, see `Draft.share`; None: they may not."""

    @property
    def newcomers(self) -> int:
        """How many sequences at the end join a round behind one in flight: all of their texts is known."""
        return 0 if self.state is None else self.state.newcomers

    @property
    def takes_choices_alone(self) -> bool:
        """Whether the target's choices are all that is read of its rows: no option looks at logits."""
        return all(seq.plain_logits and seq.params.logprobs is None for seq in self.seqs)

    def take(self, rows: Seq[int]) -> RoundView:
        """The same round for some of its sequences."""
        state = None if self.state is None else self.state.take(rows)
        room = None if self.room is None else [self.room[i] for i in rows]
        return RoundView([self.seqs[i] for i in rows], [self.budgets[i] for i in rows], state, self.compared, room)


@dataclass(frozen=True, slots=True)
class TargetPass:
    """What the target has read in one round, and where that leaves its sequences."""

    seqs: Seq[Sequence]
    spans: Seq[Span]
    """What was read of each. Where the host was behind, only `draft` and `wanted` hold."""
    scores: Scores
    state: DeviceState | None
    """Of the sequences whose spans are `wanted`, in their order; None where there are none, or no layer is tapped."""


class Evidence(NamedTuple):
    """A draft that was not scored, judged by the text that came."""

    seq_id: int
    length: int
    """Its tokens, at least 1."""
    accepted: int
    """How many of them came."""


class Drafter(ABC):
    """Proposes what comes next. It may be wrong: a bad draft costs time, never correctness.

    A drafter cannot change a sequence: it gets a `SequenceView`. Private state is keyed by `seq.id`, and copes with a
    sequence that grew by any number of tokens since it was last seen. An exception, or a draft
    that is not well-formed, is no draft in that round: the text continues without one.
    """

    traits: Traits
    parts: tuple[Drafter, ...] = ()
    """Drafters that a controller may ask one by one in its place; empty: it is asked itself."""
    includes: tuple[Drafter, ...] = ()
    """Drafters that take part in what it drafts: they are not asked beside it for the same round."""
    compares: bool = False
    """It asks others, and chooses among their drafts by what those expect."""
    step_model: Runner | None = None
    """The model of its own that it runs for every token of a draft, if it does."""
    rows: int = 0
    """Rows of the target's pages that a draft writes, the one of the text's last token first."""
    lengths: tuple[int, ...] = ()
    """The lengths that its model or head drafts, others being cut from the next longer; empty: any."""

    def rehearse(self, seqs: Seq[Sequence]) -> bool:
        """Draft the first of `lengths`, or one token, for made-up texts whose pages are reserved, to be timed.

        False: nothing was done, since drafts take next to no time, or `step_model` is what to time.
        """
        return False

    @abstractmethod
    def propose(self, view: RoundView) -> Seq[Draft] | None:
        """A draft for each sequence of the view, of at most its budget.

        None, only where `view.state` is given: the round in flight must complete first.
        In mode `distribution` a draft whose tokens were sampled states the distributions they
        were sampled from (`Draft.probs`), and keeps every token it sampled.
        """

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        """Draft as in the last round, for the same sequences and lengths, by as little work as that takes.

        drafts: the last ones, all in one block of the device. Returns the new ones, being copied to the host, which
        are in the very same tensor. None where nothing was done, and `propose` has to be asked.
        """
        return None

    def process(self, work: TargetPass) -> None:
        """See what the target read, once a round and before `propose`; only where `traits.follows_target`."""

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """See what the target decided. The sequences hold the committed tokens by now.

        A member of a `mix` whose draft was not used sees an empty draft, and a verdict
        with an empty path that carries all the tokens committed, however many.
        """

    def watch(self, view: RoundView) -> None:
        """See a round in which nothing is drafted: what can be guessed at no cost may be, to be judged by the text."""

    def take_evidence(self) -> Seq[Evidence]:
        """Drafts that were not scored and that the text has judged since the last call; only where `traits.watches`."""
        return ()

    def take_failures(self, seq_id: int) -> int:
        """How often members of this drafter failed for a forgotten sequence; the count is dropped with that."""
        return 0

    def forget(self, seq: Sequence) -> None:
        """Drop all state of a finished sequence. Called exactly once, with its final text."""


def included_in(drafter: Drafter, others: Seq[Drafter]) -> frozenset[int]:
    """Which of these drafters it includes, by index."""
    return frozenset(i for i, other in enumerate(others) if other in drafter.includes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What a drafter may know of the engine it drafts for."""

    vocab_size: int
    context: int
    """Max tokens a text may have, prompt included."""
    mode: Literal["seeded", "distribution"] = "seeded"
    tokenizer: Any = None
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""
    device: Any = "cpu"
    load_runner: Callable[..., Any] | None = None
    """Loads a draft model by name; only a drafter that runs a model calls it."""
    target: Runner | None = None
    """The target's runner, for a drafter that reads its layers or adds some to its cache."""
    target_folder: Path | None = None
    """The target's checkpoint, for a drafter that finds its weights there."""
    max_batch: int = 8
    """Max sequences it is asked for at once."""
    max_round_tokens: int = 512
    """Max tokens that a drafter's own model reads in one round."""
    row_price: float | None = None
    """What a further row of a target pass costs, in passes of one row; None where it is not measured."""


@runtime_checkable
class DrafterConfig(Protocol):
    """The options of one drafter: frozen, checked when made. Nothing is loaded before `build`."""

    @property
    def traits(self) -> Traits: ...

    def build(self, context: DrafterContext) -> Drafter:
        """The drafter, ready to draft for an engine of this context."""
        ...


@runtime_checkable
class TargetedConfig(Protocol):
    """A configuration that is complete only once the target is known."""

    def for_target(self, folder: Path) -> DrafterConfig:
        """The configuration for the model in this folder."""
        ...


def for_target(config: DrafterConfig, folder: Path) -> DrafterConfig:
    """The configuration, completed for the model in this folder where it depends on that."""
    return config.for_target(folder) if isinstance(config, TargetedConfig) else config
