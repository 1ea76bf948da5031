"""The DeviceState that a pass leaves, without captured passes: by the reference, or from the host's verdicts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core.draft import Verdict
from outrider.kernels.accept import accept_trees, compact_kept
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.runners.paged_model import PagedModel


def accept_plainly(model: PagedModel, scores: Scores, choices: Tensor) -> DeviceState:
    """As `GraphedForward.accept`, in plain PyTorch, for spans of one token and a draft each."""
    spans = scores.spans
    ids = _padded([[*span.tokens, *span.draft.tokens] for span in spans])
    parents = _padded([[span.draft.parent(node) for node in range(len(span.draft))] for span in spans])
    starts, widths = torch.tensor([s.start for s in spans]), torch.tensor([s.width for s in spans])
    lengths, last, path, accepted = accept_trees(ids, parents, starts, widths, choices)
    table_ids = torch.tensor(model.tables.table_ids([span.seq_id for span in spans]))
    for keys, values in model.groups:
        compact_kept(keys, values, model.tables.pages, table_ids, starts, path, accepted, page=model.pool.size)
    rows = torch.cat([torch.zeros_like(starts)[:, None], path.clamp(min=0) + 1], 1)
    if scores.features is None:
        return DeviceState(lengths, last, ids.gather(1, rows), accepted)
    kept = pad_sequence(list(scores.features), batch_first=True)
    kept = kept.gather(1, rows[:, :, None].expand(-1, -1, kept.shape[-1]))
    return DeviceState(lengths, last, ids.gather(1, rows), accepted, kept)


def state_of_verdicts(
    model: PagedModel, scores: Scores, features: Seq[Tensor], verdicts: Seq[Verdict]
) -> DeviceState | None:
    """The state after verdicts that the host knows, one for each span that asks for logits; None if there is none.
    features: the tapped outputs of every span."""
    wanted = [(span, own) for span, own in zip(scores.spans, features, strict=True) if span.wanted]
    if not wanted:
        return None
    kept: list[Tensor] = []
    tokens: list[list[int]] = []
    for (span, own), verdict in zip(wanted, verdicts, strict=True):
        first = len(span.tokens) - 1
        kept.append(own[[first, *(first + 1 + node for node in verdict.path)]])
        tokens.append([span.tokens[-1], *verdict.tokens])
    accepted = torch.tensor([verdict.accepted for verdict in verdicts])
    starts = torch.tensor([span.start + len(span.tokens) - 1 for span, _ in wanted])
    return DeviceState(
        (starts + 2 + accepted).to(model.device),
        torch.tensor([each[-2:] for each in tokens], device=model.device),
        _padded([each[:-1] for each in tokens]).to(model.device),
        accepted.to(model.device),
        pad_sequence(kept, batch_first=True),
    )


def _padded(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
