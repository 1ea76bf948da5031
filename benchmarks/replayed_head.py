"""A block head that knows the recorded texts, for replay.py: nothing of it is computed, and it is right at random.

The drafter is the real one, and so is what knows how far the head has read each text; only its passes are not. A draft
takes what the table says, and is rewritten in the same place when a round is repeated. Texts are easy and hard by turns
of SPELL tokens; as often as the head is right, it is surer of a token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from replayed_target import CLOCK, WRONG, ReplayedTarget, even_rows, pass_rows, recorded_token

from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.drafters.base import Traits
from outrider.drafters.block import Block
from outrider.drafters.head_drafter import HeadDrafter
from outrider.kernels.share import share_tokens
from outrider.runners.block_heads import BlockRunner
from outrider.runners.cuda_graphs import MIN_PACKED_BATCH, padded_batch
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import DraftTexts, HeadDraft
from outrider.runners.head_reads import HeadReads
from outrider.runners.text_runner import TextRunner

TOKENS = 7
"""Of a block, which is drafted at once."""
SPELL, SPREAD = 12, 0.5
"""So many tokens of a text are as hard as each other; how often the head is right varies by so much between them."""
SURER = 0.1
"""By so much the head is surer than it should be of a token that is right, and less sure of one that is wrong."""


@dataclass(frozen=True)
class HeadTimes:
    """Milliseconds: of a block by the batch of the engine, of reading what it has no room for, and of the host."""

    block: Mapping[int, float]
    read: float = 0.05
    read_token: float = 0.0005
    launch: float = 0.08
    """The host's work where a draft is launched anew; beyond that, where texts are read before it."""
    reading: float = 0.06


class ReplayedHead(Block):
    """A block head's drafter, over a runner that computes nothing."""

    def __init__(self, target: ReplayedTarget, rates: Mapping[int, float], times: HeadTimes, *, share: int = 0) -> None:
        """rates: by sequence, how often it is right where all before was. share: as in `BlockConfig`."""
        self.traits = Traits(
            name="block", max_tokens=TOKENS, runs_model=True, drafts_ahead=True, drafts_newcomers=True,
            pays_budget=True, shares=True,
        )  # fmt: skip
        self.runner = cast(BlockRunner, ReplayedHeadRunner(target, rates, times))
        HeadDrafter.__init__(self, TOKENS)  # that of `Block` loads a head
        self.lengths, self._share, self._confidences = (TOKENS,), share, {}
        self._graphs = cast(Any, SimpleNamespace(shared_tokens=shared_tokens))


class ReplayedHeadRunner(TextRunner["ReplayedBlocks"]):
    """Knows what the head has read, and takes the time of the table for what it reads and drafts."""

    def __init__(self, target: ReplayedTarget, rates: Mapping[int, float], times: HeadTimes) -> None:
        self.target, self.rates, self.times = target, rates, times
        pages = -(-target.context // target.pool.size)
        model = SimpleNamespace(
            pool=target.pool, kept=(), threads=SimpleNamespace(count=None),
            tables=SimpleNamespace(width=pages, table_ids=lambda ids: ids),
        )  # fmt: skip
        config = SimpleNamespace(layers=0, heads=1, kv_heads=1, head_dim=1, window=0)
        reads = HeadReads(target.pool, 1 + TOKENS, last=False)
        super().__init__(cast(Any, model), cast(Any, config), reads, rows=1 + TOKENS, row_width=1 + TOKENS)

    def make_batch(self, size: int) -> ReplayedBlocks:
        return ReplayedBlocks(self, size)

    def length_of(self, length: int) -> int:
        return TOKENS

    def read(self, spans: Seq[Span]) -> None:
        CLOCK.now += self.times.reading / 1e3
        CLOCK.launch((self.times.read + self.times.read_token * sum(len(span.tokens) for span in spans)) / 1e3)

    def launch(self) -> None:
        """A pass of the head."""
        CLOCK.launch(self.times.block[self.target.batch] / 1e3)

    def guess(self, seq_id: int, place: int) -> tuple[Token, float]:
        """The token drafted at this place of a text, the same whenever it is asked, and how sure of it the head is."""
        hardness = random.Random(seq_id << 20 | place // SPELL).random()
        chance = min(0.97, max(0.02, self.rates[seq_id] + (hardness - 0.5) * SPREAD))
        right = random.Random(seq_id << 21 | place).random() < chance
        token = recorded_token(self.target.texts[seq_id], place) if right else WRONG
        return token, min(0.98, max(0.03, chance + (SURER if right else -SURER)))


class ReplayedBlocks:
    """The blocks of so many texts. They are always in the same place, as where they are captured."""

    def __init__(self, runner: ReplayedHeadRunner, batch: int) -> None:
        self.runner = runner
        with torch.inference_mode(False):  # made in that mode, and written to outside of it
            tokens = torch.zeros(batch, TOKENS, dtype=torch.int64)
            self.made = HeadDraft(tokens, confidence=torch.zeros(batch, TOKENS))
        self._texts: DraftTexts | None = None
        """Of the last draft."""

    def draft(self, texts: DraftTexts, length: int) -> HeadDraft:
        CLOCK.now += self.runner.times.launch / 1e3
        self._texts = texts
        return self._write(texts)

    def repeat(self, count: int, state: DeviceState) -> HeadDraft | None:
        if self._texts is None or self._texts.state is None or state.rows is not None:
            return None
        return self._write(self._texts._replace(state=state))

    def _write(self, texts: DraftTexts) -> HeadDraft:
        """Draft behind these texts; where drafts share rows, repeated ones share as many."""
        seqs, state, share = texts.seqs, texts.state, texts.share
        self.runner.launch()
        lengths = [len(seq.tokens) for seq in seqs] if state is None else state.lengths.tolist()
        guesses = [
            [self.runner.guess(seq.id, place) for place in range(length, length + TOKENS)]
            for seq, length in zip(seqs, lengths, strict=True)
        ]
        tokens, chances = self.made.tokens, cast(torch.Tensor, self.made.confidence)
        tokens.copy_(torch.tensor([[token for token, _ in row] for row in guesses]))
        chances.copy_(torch.tensor([[chance for _, chance in row] for row in guesses]))
        if share is not None:
            tokens.copy_(share_tokens(tokens, chances, torch.tensor(share.room), share.total))
        return self.made


def shared_tokens(lengths: Seq[int], longest: int) -> int:
    """As `GraphRunner.shared_tokens`, over the shapes of a `ReplayedTarget`: what a packed pass has beside texts."""
    count, widest = len(lengths), 1 + longest
    if padded_batch(count) < MIN_PACKED_BATCH or not any(lengths):
        return 0
    rows = pass_rows(count, widest, count + sum(lengths))
    return rows - count if rows < even_rows(count, widest) else 0
