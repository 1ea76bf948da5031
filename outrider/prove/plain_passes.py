"""The target's own logits after given texts, from passes without drafts; and how far rounding moves logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from itertools import count

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.runners.base import Runner

PIECE = 128  # tokens read in one pass
BATCH = 8
MAX_KEPT_BYTES = 1 << 29
MAX_ROUNDING = {"bfloat16": 2.0, "float16": 0.5}
MAX_FINE_ROUNDING = 1e-2  # for all other formats, whose activations are float32
ROUNDING_TOKENS = 24
_ids = count(-(1 << 40), -1)  # apart from the ids of engines, and of `Scoring`

Text = tuple[Token, ...]


class PlainPasses:
    """Logits after texts, kept for later calls. No engine may run on the target at the same time."""

    def __init__(self, target: Runner) -> None:
        self.target = target
        self._known: OrderedDict[Text, Tensor] = OrderedDict()

    def logits_after(self, texts: Seq[Text]) -> list[Tensor]:
        """The logits after each text: float32 [vocab] on the CPU."""
        found = {text: self._known[text] for text in texts if text in self._known}
        missing = list(dict.fromkeys(text for text in texts if text not in found))
        for at in range(0, len(missing), BATCH):
            piece = missing[at : at + BATCH]
            found |= zip(piece, read_texts(self.target, piece), strict=True)
        self._known |= found
        most = max(1, MAX_KEPT_BYTES // (4 * self.target.vocab_size))
        while len(self._known) > most:
            self._known.popitem(last=False)
        return [found[text] for text in texts]


def read_texts(target: Runner, texts: Seq[Text]) -> list[Tensor]:
    """Read texts together, without drafts. Returns the logits after the end of each: float32 [vocab] on the CPU."""
    readers = [_Reader(target, text) for text in texts]
    try:
        while open_readers := [reader for reader in readers if reader.logits is None]:
            spans = [reader.next_span() for reader in open_readers]
            logits = target.score(spans).logits.float().cpu()
            row = 0
            for reader, span in zip(open_readers, spans, strict=True):
                reader.take(span, logits[row : row + span.rows])
                row += span.rows
        return [reader.logits for reader in readers if reader.logits is not None]
    finally:
        for reader in readers:
            target.release(reader.id)


class _Reader:
    """One text that the target reads piece by piece."""

    def __init__(self, target: Runner, text: Text) -> None:
        self.target, self.text, self.id = target, text, next(_ids)
        self.cached = target.pool.open(self.id, text, "prove")
        self.logits: Tensor | None = None

    def next_span(self) -> Span:
        piece = self.text[self.cached : self.cached + PIECE]
        end = self.cached + len(piece)
        _reserve(self.target, self.id, end)
        return Span(self.id, self.cached, piece, EMPTY, wanted=end == len(self.text))

    def take(self, span: Span, rows: Tensor) -> None:
        self.cached = self.target.keep(span, ())
        self.target.pool.publish(self.id, self.text, self.cached)
        if span.wanted:
            self.logits = rows[0].clone()


def measure_rounding(target: Runner, prompts: Seq[Text]) -> float:
    """The largest difference of any logit between reading a text alone token by token, and reading it in a batch or in
    one pass."""
    texts = [prompt[:ROUNDING_TOKENS] for prompt in prompts]
    alone = [_token_by_token(target, [text])[0] for text in texts]
    batched = _token_by_token(target, texts)
    whole = [_at_once(target, text) for text in texts]
    pairs = [pair for others in (batched, whole) for pair in zip(alone, others, strict=True)]
    return max(float((one - other).abs().nan_to_num(torch.inf).max()) for one, other in pairs)


def max_rounding(number_format: str) -> float:
    """The largest difference between two ways of reading a text that can be rounding, by number format."""
    return MAX_ROUNDING.get(number_format, MAX_FINE_ROUNDING)


def _token_by_token(target: Runner, texts: Seq[Text]) -> list[Tensor]:
    """The logits after every token of each text, [tokens, vocab]; each pass reads one token of every text."""
    ids, rows = [next(_ids) for _ in texts], [[] for _ in texts]
    for seq_id in ids:
        target.pool.open(seq_id, ())
    try:
        for at in range(max(map(len, texts))):
            active = [i for i, text in enumerate(texts) if at < len(text)]
            for i in active:
                _reserve(target, ids[i], at + 1)
            spans = [Span(ids[i], at, (texts[i][at],)) for i in active]
            logits = target.score(spans).logits.float().cpu()
            for row, (i, span) in enumerate(zip(active, spans, strict=True)):
                target.keep(span, ())
                rows[i].append(logits[row].clone())
    finally:
        for seq_id in ids:
            target.release(seq_id)
    return [torch.stack(each) for each in rows]


def _at_once(target: Runner, text: Text) -> Tensor:
    """The logits after every token of one text, [tokens, vocab], from one pass that scores all but the first token as a
    draft."""
    seq_id = next(_ids)
    target.pool.open(seq_id, ())
    try:
        _reserve(target, seq_id, len(text))
        return target.score([Span(seq_id, 0, text[:1], Draft(text[1:]))]).logits.float().cpu().clone()
    finally:
        target.release(seq_id)


def _reserve(target: Runner, seq_id: int, length: int) -> None:
    if not target.pool.reserve(seq_id, length):
        raise OutriderError(
            f"the cache has no room for a text of {length} tokens; enlarge it (--cache-tokens) or give shorter prompts"
        )
