"""A toy that launches its last pass again, as captured ones are, and a drafter whose tokens stay where they are.

What a device would overwrite is overwritten here: the state of a pass of one shape, and the drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from async_toy import AsyncToyRunner
from plain_decoding import choice
from testbed import CONTEXT, VOCAB
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.draws import Draws
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.kernels.accept import accept_chains
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState, row_positions
from outrider.testing.drafters import BrokenContract
from outrider.verify.seeded import SeededVerifier

WIDTHS = (1, 2, 4, 6, 8, 12, 16)
"""Rows of a sequence that passes are captured for."""


@dataclass(eq=False)
class CapturedPass:
    """A pass of one shape: where it leaves its sequences, and what it was launched with last."""

    lengths: Tensor  # int64 [B]
    last: Tensor  # int64 [B, 2]
    tokens: Tensor  # int64 [B, W]: read
    accepted: Tensor  # int64 [B]
    spans: Seq[Span] = ()
    draws: Draws | None = None
    fetched: Tensor | None = None
    """The lengths that it read; None where the host knew the texts."""


class RepeatingToy(AsyncToyRunner):
    """Chooses in the pass, keeps its state in place, and can launch the last pass again."""

    repeated = 0
    """Passes that were."""
    refuses = False
    """No pass is launched again."""

    def __init__(self, cache_tokens: int = 4096) -> None:
        super().__init__(VOCAB, context=CONTEXT, cache_tokens=cache_tokens)
        self._captured: dict[tuple[int, int], CapturedPass] = {}
        self._last: CapturedPass | None = None

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self._last = None
        return super().score(spans, after)

    def read(self, spans: Seq[Span], after: DeviceState | None = None) -> DeviceState | None:
        """As pinned passes do, overwrites the states that others left."""
        after = after and after.copied()
        super().read(spans)
        for made in self._captured.values():
            made.lengths.fill_(1)
            made.last.fill_(0)
        return after

    def score_and_choose(self, spans: Seq[Span], after: DeviceState | None, draws: Draws) -> Scores:
        scores = self.score(spans, after)
        choices = _choices(scores, draws)
        logits = scores.logits if draws.logits else scores.logits[:0]
        scores = replace(scores, logits=logits, choices=choices)
        if any(span.draft.parents is not None for span in spans):
            return scores
        made = self._pass_of(scores.spans)
        made.spans, made.draws, made.fetched = spans, draws, None if after is None else after.lengths
        _accept(made, scores.spans, choices)
        self._last = made
        return replace(scores, handle=made)

    def advance(self, scores: Scores, choices: Tensor) -> DeviceState | None:
        made = scores.handle
        if made is None or choices is not scores.choices:
            return super().advance(scores, choices)
        return DeviceState(made.lengths, made.last, made.tokens, made.accepted)

    def can_repeat(self, scores: Scores, after: DeviceState) -> bool:
        made = scores.handle
        if self.refuses or made is None or made is not self._last or scores.choices is None:
            return False
        return made.fetched is not None and after.lengths is made.lengths

    def repeat(self, scores: Scores) -> Scores:
        made = self._last
        if made is None or made is not scores.handle or made.draws is None:
            raise BrokenContract("only the last pass is launched again")
        self.repeated += 1
        texts = zip(made.spans, made.lengths.tolist(), made.last.tolist(), strict=True)
        spans = [Span(span.seq_id, length - 1, (last[1],), _on_device(span.draft)) for span, length, last in texts]
        if any(span.start + span.width > self.context for span in spans):
            raise BrokenContract("a text goes on behind the context")
        new = super().score(spans)
        choices = _choices(new, made.draws)
        _accept(made, spans, choices)
        logits = new.logits if made.draws.logits else new.logits[:0]
        return replace(scores, logits=logits, choices=choices)

    def _pass_of(self, spans: Seq[Span]) -> CapturedPass:
        shape = len(spans), next(width for width in WIDTHS if width >= max(span.width for span in spans))
        if shape not in self._captured:
            sizes = shape[:1], (shape[0], 2), shape, shape[:1]
            self._captured[shape] = CapturedPass(*(torch.zeros(size, dtype=torch.int64) for size in sizes))
        return self._captured[shape]


def _on_device(draft: Draft) -> Draft:
    """A draft as the device has it now."""
    tokens = draft.tokens
    if not isinstance(tokens, DeviceRow):
        return draft
    return Draft(tuple(tokens.block.tokens[tokens.row, : len(tokens)].tolist()))


def _choices(scores: Scores, draws: Draws) -> Tensor:
    """The target's choice after each row of logits, by its seed, temperature and place: int64 [rows]."""
    seqs = [
        Sequence(span.seq_id, [], 0, SamplingParams(temperature=warmth), seed)
        for span, seed, warmth in zip(scores.spans, draws.seeds, draws.temperatures, strict=True)
    ]
    drafts = [span.draft for span in scores.spans]
    made = SeededVerifier().decide(seqs, drafts, scores.logits, lambda: row_positions(scores.spans))
    assert made is not None
    return made.tokens


def _accept(made: CapturedPass, spans: Seq[Span], choices: Tensor) -> None:
    """Overwrite the state of a pass by what it leaves."""
    ids = pad_sequence([torch.tensor([*span.tokens, *span.draft.tokens]) for span in spans], batch_first=True)
    starts, widths = torch.tensor([span.start for span in spans]), torch.tensor([span.width for span in spans])
    lengths, last, accepted = accept_chains(ids, starts, widths, choices)
    made.lengths.copy_(lengths)
    made.last.copy_(last)
    made.accepted.copy_(accepted)
    made.tokens[:, : ids.shape[1]] = ids


class Guesser(Drafter):
    """Knows the target, and is wrong about one token in three. Its tokens lie in one tensor, which it overwrites.

    As a head does it takes pages for `rows` rows behind each text, and is never asked again without them.
    """

    def __init__(self, target: RepeatingToy, *, k: int = 4, rows: int = 7, batch: int = 8) -> None:
        self.target, self.k, self.rows = target, k, rows
        self.traits = Traits(name="guesser", max_tokens=k, drafts_ahead=True)
        self.block = torch.zeros(batch, k, dtype=torch.int64)
        self.views = [self.block[:count] for count in range(batch + 1)]
        self.repeats = 0
        """Calls of `repeat`."""
        self.forgotten: list[int] = []

    def propose(self, view: RoundView) -> Seq[Draft] | None:
        pool = self.target.pool
        lengths, _ = _texts(view)
        ready = [pool.reserve(seq.id, n - 1 + self.rows) for seq, n in zip(view.seqs, lengths, strict=True)]
        budgets = [min(self.k, budget) if there else 0 for budget, there in zip(view.budgets, ready, strict=True)]
        tokens = self.write(view)
        return [self.draft(tokens, i, count) if count else EMPTY for i, count in enumerate(budgets)]

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        self.repeats += 1
        pool = self.target.pool
        for seq, length in zip(view.seqs, _texts(view)[0], strict=True):
            if len(pool.table(seq.id)) * pool.size < length - 1 + self.rows:
                raise BrokenContract(f"sequence {seq.id}: no pages for the draft")
        return self.write(view)

    def write(self, view: RoundView) -> HostCopy:
        """The drafts of a round, in place; their values are kept for the host."""
        lengths, last = _texts(view)
        for row, (seq, length, pair) in enumerate(zip(view.seqs, lengths, last, strict=True)):
            self.block[row] = torch.tensor(self._guess(seq, length, pair))
        tokens = HostCopy(self.views[len(view.seqs)])
        tokens.list()
        return tokens

    def draft(self, tokens: HostCopy, row: int, count: int) -> Draft:
        return Draft(DeviceRow(tokens, row, count), source="guesser", known=True)

    def _guess(self, seq: Sequence, length: int, last: list[Token]) -> list[Token]:
        text, rng = list(last), random.Random(length * 1009 + last[-1])
        for place in range(length, length + self.k):
            here = Sequence(0, [0] * place, 0, SamplingParams(temperature=seq.params.temperature), seq.seed)
            right = choice(self.target.logits_after(text), here) or 0
            text.append(right if rng.random() < 2 / 3 else rng.randrange(VOCAB))
        return text[len(last) :]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
            if tuple(draft.tokens[node] for node in verdict.path) != verdict.tokens[: len(verdict.path)]:
                raise BrokenContract(f"sequence {seq.id}: the verdict's path is not its tokens")

    def forget(self, seq: Sequence) -> None:
        if seq.id in self.forgotten:
            raise BrokenContract(f"sequence {seq.id} was forgotten twice")
        self.forgotten.append(seq.id)


def _texts(view: RoundView) -> tuple[list[int], list[list[Token]]]:
    """The length and the last two tokens of each text, where the device is."""
    if view.state is None:
        return [len(seq.tokens) for seq in view.seqs], [list(seq.tokens[-2:]) for seq in view.seqs]
    return view.state.lengths.tolist(), view.state.last.tolist()
