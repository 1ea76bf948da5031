"""A toy whose passes are launched and not waited for, as on a GPU, and the testbed of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from testbed import CONTEXT, VOCAB, Testbed
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from toy_world import WORLD

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence, Span
from outrider.kernels.accept import accept_trees
from outrider.runners.base import ChainStart, Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.toy import ToyRunner
from outrider.verify.seeded import choose_tokens


class AsyncToyRunner(ToyRunner):
    """Its passes count as launched: the engine keeps one in flight, and launches others behind it.

    Accepted nodes of trees are moved together by `advance`, as on a device, and by nobody else.
    """

    asynchronous = joins = True
    followed = 0
    """Passes that were launched behind another."""

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self.followed += after is not None
        return super().score(spans, after)

    def advance(self, scores: Scores, choices: Tensor) -> DeviceState | None:
        spans = scores.spans
        if not all(len(span.tokens) == 1 and span.wanted for span in spans):
            return None
        ids = _padded([[*span.tokens, *span.draft.tokens] for span in spans])
        parents = _padded([[span.draft.parent(node) for node in range(len(span.draft))] for span in spans])
        starts, widths = torch.tensor([span.start for span in spans]), torch.tensor([span.width for span in spans])
        lengths, last, path, accepted = accept_trees(ids, parents, starts, widths, choices)
        for span, nodes, count in zip(spans, path.tolist(), accepted.tolist(), strict=True):
            kept = [self.slots[self._slot(span.seq_id, span.start + 1 + node)] for node in nodes[:count]]
            for i, token in enumerate(kept):
                self.slots[self._slot(span.seq_id, span.start + 1 + i)] = token
        rows = torch.cat([torch.zeros_like(starts)[:, None], path.clamp(min=0) + 1], 1)
        return DeviceState(lengths, last, ids.gather(1, rows), accepted)

    def draft_chains(self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None) -> list[list[Token]]:
        chains: list[list[Token]] = []
        for i, start in enumerate(starts):
            length = start.length if after is None else int(after.lengths[i])
            last = start.last if after is None else tuple(after.last[i].tolist())
            logits, chain = super().score([Span(start.seq_id, length - 2, last)]).logits, []
            for step in range(steps):
                params = SamplingParams(temperature=start.temperature)
                here = Sequence(start.seq_id, [0] * (length + step), 1, params, start.seed)
                ((token,),) = choose_tokens(logits, [here], [Draft()])
                chain.append(token)
                if step + 1 < steps:
                    logits = super().score([Span(start.seq_id, length + step, (token,))]).logits
            chains.append(chain)
        return chains


def _padded(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)


def target(cache_tokens: int = 4096, order: int = 2) -> AsyncToyRunner:
    return AsyncToyRunner(VOCAB, context=CONTEXT, cache_tokens=cache_tokens, order=order)


def draft(name: str) -> AsyncToyRunner:
    return target(64 if name == "cramped" else 4096, order=2 if name == "draft" else 1)


ASYNC_TOY = Testbed(WORLD, target, draft)
