"""A block head that guesses, over a toy: the real `Block` above a runner that knows the target, in place on the host.

On a device tokens are copied to the host before they are overwritten; here whoever keeps some reads them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from drafter_cast import Loud
from repeating_toy import Guesser, RepeatingToy
from test_repeated_lookups import SharingToy
from torch import Tensor

from outrider.core.device_row import DeviceRow
from outrider.core.draft import Draft
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import Drafter, Evidence, RoundView, Traits
from outrider.drafters.block import Block
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.guard import draft_problem
from outrider.drafters.head_drafter import HeadDrafter
from outrider.drafters.hybrid import Hybrid
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import HeadDraft, Share
from outrider.runners.overlays import PlainOverlays
from outrider.testing.drafters import BrokenContract
from outrider.verify.block_sampling import share_chains

CHANCE = 0.67
"""What the head says of each token, and about how often it is right."""


class GuessingRunner:
    """Drafts as a `BlockRunner` does, by a `Guesser`: to one tensor, for as many texts as are asked for."""

    def __init__(self, target: RepeatingToy, k: int, max_batch: int) -> None:
        """max_batch: texts of one pass."""
        self.guesser = Guesser(target, k=k, rows=k + 2)
        self.rows, self.max_batch, self.pool = self.guesser.rows, max_batch, target.pool
        self.chances = torch.zeros(self.guesser.block.shape)
        self.views = [HeadDraft(tokens, confidence=self.chances[: len(tokens)]) for tokens in self.guesser.views]
        self.repeats = 0
        self.reads = self
        self._drafted: dict[int, int] = {}
        """By sequence: the round that was drafted for, as `Sequence.round` counts."""

    def is_drafted(self, seq: Sequence) -> bool:
        return self._drafted.get(seq.id) == seq.round

    def ready(self, seqs: Seq[Sequence], state: DeviceState | None) -> list[int]:
        lengths = [len(seq.tokens) for seq in seqs] if state is None else state.lengths.tolist()
        decode = [state is not None or seq.cached == len(seq.tokens) - 1 for seq in seqs]
        texts = enumerate(zip(seqs, lengths, decode, strict=True))
        return [i for i, (seq, n, reads) in texts if reads and self.pool.reserve(seq.id, n - 1 + self.rows)]

    def draft(
        self, seqs: Seq[Sequence], state: DeviceState | None, length: int = 0, share: Share | None = None
    ) -> HeadDraft:
        made = self._write(seqs, state)
        if share is not None and made.confidence is not None:
            share_chains(made.tokens, made.confidence, torch.tensor(share.room), torch.tensor([share.total]))
        return made

    def repeat(self, seqs: Seq[Sequence], state: DeviceState) -> HeadDraft | None:
        if len(seqs) > self.max_batch:
            return None
        for seq, length in zip(seqs, state.lengths.tolist(), strict=True):
            if len(self.pool.table(seq.id)) * self.pool.size < length - 1 + self.rows:
                raise BrokenContract(f"sequence {seq.id}: no pages for the draft")
        self.repeats += 1
        return self._write(seqs, state)

    def forget(self, seq: Sequence) -> None:
        self._drafted.pop(seq.id, None)

    def _write(self, seqs: Seq[Sequence], state: DeviceState | None) -> HeadDraft:
        self.guesser.write(RoundView(seqs, [0] * len(seqs), state))
        self.chances.fill_(CHANCE)
        for seq in seqs:
            self._drafted[seq.id] = seq.round + (state is not None)
        return self.views[len(seqs)]


class GuessingHead(Block):
    """The drafter itself, above that runner."""

    def __init__(self, target: RepeatingToy, *, k: int = 5, share: int = 0, max_batch: int = 8) -> None:
        """share: as `BlockConfig.share`."""
        self.runner: Any = GuessingRunner(target, k, max_batch)
        self.traits = Traits(
            name="head", max_tokens=k, runs_model=True, drafts_ahead=True, drafts_newcomers=True, pays_budget=True,
            shares=True,
        )  # fmt: skip
        HeadDrafter.__init__(self, k)
        self.lengths = (k,)
        graphs: Any = target
        self._graphs, self._share, self._confidences = graphs, share, {}
        self.forgotten = Counter[int]()

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self.forgotten[seq.id] += 1


class Noting(DeviceLookup):
    """Lookups that count what they are asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.forgotten, self.calls = Counter[int](), Counter[str]()

    def propose(self, view: RoundView) -> list[Draft] | None:
        self.calls["propose"] += 1
        return super().propose(view)

    def look_up_all(self, view: RoundView) -> HostCopy | None:
        found = super().look_up_all(view)
        self.calls["found" if found is not None else "not there"] += view.state is not None
        return found

    def watch(self, view: RoundView) -> None:
        self.calls["watch"] += 1
        super().watch(view)

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self.forgotten[seq.id] += 1


class Chosen(NamedTuple):
    """What was chosen from in a round; by row."""

    seqs: Seq[Sequence]
    lengths: list[int]
    """Of the texts, where the device was."""
    head: list[list[Token]]
    chances: list[list[float]]
    found: Tensor
    share: Share | None
    at: int
    """The pass, as `ScoredToy.scored` counts, that comes next."""
    repeated: bool


class NotedOverlays(PlainOverlays):
    """Keeps what it is given."""

    given: tuple[Tensor, Tensor, Tensor] | None = None

    def again(self, made: HeadDraft, found: Tensor) -> HeadDraft:
        assert made.confidence is not None
        self.given = made.tokens.clone(), made.confidence.clone(), found.clone()
        return super().again(made, found)

    @property
    def share(self) -> Share | None:
        return self._share


class NotedHybrid(Hybrid):
    """Reads its drafts at once, and keeps what they were chosen from."""

    overlays: NotedOverlays

    def __init__(self, head: GuessingHead, lookups: Noting, target: RepeatingToy) -> None:
        super().__init__(head, lookups, NotedOverlays(lookups.k))
        self.runner, self.calls = cast(GuessingRunner, head.runner), lookups.calls
        self.target, self.rounds = target, list[Chosen]()

    def propose(self, view: RoundView) -> Seq[Draft]:
        drafts = super().propose(view)
        for draft in drafts:
            if isinstance(draft.tokens, DeviceRow):
                draft.tokens.block.list()
            if draft.confidence is not None:
                draft.confidence.read()
        self._note(view, repeated=False)
        return drafts

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        block = super().repeat(view, drafts)
        if block is not None:
            block.list()
        self._note(view, repeated=True)
        return block

    def _note(self, view: RoundView, *, repeated: bool) -> None:
        given, self.overlays.given = self.overlays.given, None
        if given is None or view.state is None:
            return
        tokens, chances, found = given
        at = len(self.target.scored) if isinstance(self.target, Scored) else 0
        texts = tuple(view.seqs), view.state.lengths.tolist()
        made = Chosen(*texts, tokens.tolist(), chances.tolist(), found, self.overlays.share, at, repeated)
        self.rounds.append(made)


class Scored(RepeatingToy):
    """Keeps the drafts of each pass that has any, by sequence, as the device had them."""

    def __init__(self, cache_tokens: int = 4096) -> None:
        super().__init__(cache_tokens)
        self.scored: list[dict[int, list[Token]]] = []

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self._keep_drafts(spans)
        return super().score(spans, after)

    def repeat(self, scores: Scores) -> Scores:
        self._keep_drafts(scores.handle.spans)
        return super().repeat(scores)

    def _keep_drafts(self, spans: Seq[Span]) -> None:
        kept: dict[int, list[Token]] = {}
        for span in spans:
            tokens = span.draft.tokens
            if isinstance(tokens, DeviceRow):
                kept[span.seq_id] = tokens.block.tokens[tokens.row, : len(tokens)].tolist()
        if kept:
            self.scored.append(kept)


class ScoredSharing(Scored, SharingToy):
    """The same, of a toy with passes whose rows drafts share."""


class Louder(Loud):
    """That shows what an engine reads of a drafter that is repeated or watches, and lets drafts share their room."""

    def __init__(self, drafter: Drafter, rows: int = 0) -> None:
        super().__init__(drafter)
        self.rows, self.lengths = rows or drafter.rows, drafter.lengths
        self.parts = tuple(Louder(part) for part in drafter.parts)

    def propose(self, view: RoundView) -> Seq[Draft] | None:
        drafts = self._call(self.drafter.propose, view)
        for draft, budget, room in zip(
            drafts or (), view.budgets, view.room or view.budgets, strict=drafts is not None
        ):
            problem = draft_problem(draft if view.room is None else replace(draft, share=None))
            if problem or len(draft) > (budget if draft.share is None else room) or draft.scored > budget:
                raise BrokenContract(problem or f"{len(draft)} tokens drafted of {budget}")
        return drafts

    def watch(self, view: RoundView) -> None:
        self._call(self.drafter.watch, view)

    def take_evidence(self) -> Seq[Evidence]:
        return self._call(self.drafter.take_evidence)
