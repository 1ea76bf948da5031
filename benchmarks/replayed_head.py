"""A block head for replay.py, of which nothing is computed: it drafts what a real head did, or is right at random.

The drafter is the real one, and so is what knows how far the head has read each text; only its passes are not. A draft
takes what the table says, and is rewritten in the same place when a round is repeated. Where no drafts were recorded,
texts are easy and hard by turns of SPELL tokens; as often as the head is right, it is surer of a token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from replayed_target import CLOCK, WIDTHS, WRONG, ReplayedTarget, even_rows, pass_rows, recorded_token

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


class Known(NamedTuple):
    """What is known of a text, for those who draft it."""

    prompt: int
    """Tokens of its prompt."""
    rate: float
    """How often who drafts is right, where all before was."""
    drafts: Seq[Seq[int]] = ()
    """Of a recorded head, behind 1, 2, ... tokens of the answer: how many tokens of its draft came, and how sure it was
    of each, in hundredths."""


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

    def __init__(self, target: ReplayedTarget, known: Mapping[int, Known], times: HeadTimes, *, share: int = 0) -> None:
        """known: by sequence. share: as in `BlockConfig`."""
        self.traits = Traits(
            name="block", max_tokens=TOKENS, runs_model=True, drafts_ahead=True, drafts_newcomers=True,
            pays_budget=True, shares=True,
        )  # fmt: skip
        self.runner = cast(BlockRunner, ReplayedHeadRunner(target, known, times))
        HeadDrafter.__init__(self, TOKENS)  # that of `Block` loads a head
        self.lengths, self._share, self._confidences = (TOKENS,), share, {}
        self._graphs = cast(Any, SimpleNamespace(shared_tokens=shared_tokens))


class ReplayedHeadRunner(TextRunner["ReplayedBlocks"]):
    """Knows what the head has read, and takes the time of the table for what it reads and drafts."""

    def __init__(self, target: ReplayedTarget, known: Mapping[int, Known], times: HeadTimes) -> None:
        self.target, self.known, self.times = target, known, times
        pages = -(-target.context // target.pool.size)
        model = SimpleNamespace(
            pool=target.pool, kept=(), threads=SimpleNamespace(count=None),
            tables=SimpleNamespace(width=pages, table_ids=lambda ids: ids),
        )  # fmt: skip
        config = SimpleNamespace(layers=0, heads=1, kv_heads=1, head_dim=1, window=0)
        reads = HeadReads(target.pool, WIDTHS[-1], last=False)
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

    def draft_behind(self, seq_id: int, length: int) -> tuple[list[Token], list[float]]:
        """What is drafted behind so many tokens of a text, and how sure of each token the head is."""
        known, text = self.known[seq_id], self.target.texts[seq_id]
        if known.drafts:
            return recorded_draft(known, text, length)
        guesses = [self._guess(seq_id, place) for place in range(length, length + TOKENS)]
        right = next((n for n, (is_right, _) in enumerate(guesses) if not is_right), TOKENS)
        return _draft_of(text, length, right), [chance for _, chance in guesses]

    def _guess(self, seq_id: int, place: int) -> tuple[bool, float]:
        """Whether the token drafted at this place of a text is right, the same whenever it is asked, and how sure of it
        the head is."""
        hardness = random.Random(seq_id << 20 | place // SPELL).random()
        chance = min(0.97, max(0.02, self.known[seq_id].rate + (hardness - 0.5) * SPREAD))
        right = random.Random(seq_id << 21 | place).random() < chance
        return right, min(0.98, max(0.03, chance + (SURER if right else -SURER)))


def recorded_draft(known: Known, text: Seq[Token], length: int) -> tuple[list[Token], list[float]]:
    """What a recorded head drafted behind so many tokens of a text, and how sure of each token it was."""
    behind = length - known.prompt - 1
    right, *hundredths = known.drafts[behind] if 0 <= behind < len(known.drafts) else (0,)
    chances = ([n / 100 for n in hundredths] + [0.0] * TOKENS)[:TOKENS]  # shorter at an answer's end
    return _draft_of(text, length, right), chances


def _draft_of(text: Seq[Token], length: int, right: int) -> list[Token]:
    """A draft of which so many tokens come."""
    return [recorded_token(text, length + n) if n < right else WRONG for n in range(TOKENS)]


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
        drafts = [self.runner.draft_behind(seq.id, length) for seq, length in zip(seqs, lengths, strict=True)]
        tokens, chances = self.made.tokens, cast(torch.Tensor, self.made.confidence)
        tokens.copy_(torch.tensor([drafted for drafted, _ in drafts]))
        chances.copy_(torch.tensor([sure for _, sure in drafts]))
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
