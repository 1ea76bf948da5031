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
    """The number of rows of its output head that are copied for a reduced vocabulary; 0: none."""
    module: bool = False
    """Only its MTP module is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a drafter declares of itself, as data: nobody probes its class for what it can do."""

    name: str
    """As registered; written into every draft's `source`."""
    max_tokens: int
    """Max tokens it proposes for one sequence in one round."""
    aliases: tuple[str, ...] = ()
    """Other names it answers to."""
    runs_model: bool = False
    """It runs a model or a head to propose, which takes real time: `mix` asks such a drafter last."""
    drafts_ahead: bool = False
    """It can propose from a DeviceState, before the host knows the outcome of the round in flight."""
    drafts_newcomers: bool = False
    """It can also do so for sequences that join behind a round in flight; else it is not asked for them there."""
    pays_budget: bool = False
    """A pass has a row for each token of its budget, however few it drafts: the host does not see the draft first."""
    limits_itself: bool = False
    """It decides itself how many tokens to draft for each sequence, possibly none; a budget only caps that number."""
    observes: bool = True
    """`observe` is called after rounds."""
    watches: bool = False
    """`watch` may be called in rounds in which the drafter is not asked."""
    follows_target: bool = False
    """`process` is called after passes of the target: after every pass where `taps` are given."""
    ignores_scores: bool = False
    """`process` uses only the texts that the target has read, not its logits or features."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose outputs `process` gets."""
    kept_taps: tuple[int, ...] = ()
    """Layers of the target whose outputs are kept in the target's pages, to be read when the drafter is asked."""
    uses_prediction: bool = False
    """It drafts from `Sequence.prediction`."""
    shares: bool = False
    """Its drafts share the rows of a pass where `RoundView.room` is given: the tokens it is surest of get a row."""
    needs_prediction: bool = False
    """It drafts nothing for a sequence without a prediction, and need not be asked for it."""
    states_probs: bool = False
    """In mode `distribution` its drafts carry the distributions they were sampled from."""
    guards_itself: bool = False
    """It guards every drafter that it calls itself, so it is asked without a `GuardedDrafter` around it."""
    loads: tuple[ModelLoaded, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundView:
    """A round to draft for."""

    seqs: Seq[Sequence]
    budgets: Seq[int]
    """Max tokens to draft for each sequence; may be 0."""
    state: DeviceState | None = None
    """The device's state after the round in flight, whose tokens `seqs` lack; in the order of `seqs`.

    None: `seqs` are up to date.
    """
    compared: bool = True
    """Whether `expected` and `confidence` of drafts are read; if not, confidences need not be copied to the host."""
    room: Seq[int] | None = None
    """Max tokens of each draft where drafts may share the sum of the budgets (`Draft.share`); None: they may not."""

    @property
    def newcomers(self) -> int:
        """The number of sequences at the end that join behind the round in flight: the host has their whole texts."""
        return 0 if self.state is None else self.state.newcomers

    @property
    def takes_choices_alone(self) -> bool:
        """Whether only the target's choices are read: no sequence has a constraint or an option that needs logits."""
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
    """What was read of each sequence. Where the host was a round behind, only `draft` and `wanted` are valid."""
    scores: Scores
    state: DeviceState | None
    """The state of the sequences whose spans are `wanted`, in order. None: there are none, or no layer is tapped."""


class Evidence(NamedTuple):
    """A draft that was not scored, compared with the text that the target generated."""

    seq_id: int
    length: int
    """The number of its tokens, at least 1."""
    accepted: int
    """The number of its first tokens that agree with the text."""
    committed: int = 1
    """The number of tokens that the text grew by in the round in which it was made."""

    @property
    def rounds(self) -> float:
        """The rounds that it stands for, were such guesses scored: those of good guesses are fewer."""
        return max(1, self.committed) / (1 + max(0, self.accepted))


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
    """Drafters that take part in its drafts: in a round that it drafts for, they are not asked separately."""
    compares: bool = False
    """It asks other drafters and chooses among their drafts by `Draft.expected`."""
    step_model: Runner | None = None
    """The runner of its own model, if it runs one pass of it for each token of a draft."""
    rows: int = 0
    """The number of slots in the target's pages that a draft writes, from the position of the text's last token on."""
    lengths: tuple[int, ...] = ()
    """The draft lengths that its model or head computes, others being cut from the next longer one; empty: any."""

    def rehearse(self, seqs: Seq[Sequence]) -> bool:
        """Draft the first of `lengths`, or one token, for artificial sequences with reserved pages, to be timed.

        Returns False if nothing was done: drafting takes next to no time, or `step_model` is what to time.
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
        """Make the last round's drafts anew for the round behind it: same sequences, same lengths, the least work.

        drafts: those of the last round, all in one block of the device. Returns the new drafts, written to the same
        tensor, while their copy to the host is under way. None: nothing was done, and `propose` must be called.
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
        """See a round in which this drafter is not asked. It may note what it would have drafted, where that costs next
        to nothing; `take_evidence` reports how such guesses compared with the text."""

    def take_evidence(self) -> Seq[Evidence]:
        """Drafts that were not scored and that the text has judged since the last call; only where `traits.watches`."""
        return ()

    def take_failures(self, seq_id: int) -> int:
        """The number of failures of this drafter's members for a sequence; the call resets it."""
        return 0

    def forget(self, seq: Sequence) -> None:
        """Drop all state of a finished sequence. Called exactly once, with its final text."""


def included_in(drafter: Drafter, others: Seq[Drafter]) -> frozenset[int]:
    """The indices in `others` of the drafters that take part in this drafter's drafts."""
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
    longest_draft: int = 0
    """Where several drafters draft together: max tokens in a row of any of them; 0: this one drafts alone."""
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
