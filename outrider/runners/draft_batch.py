"""What drafting heads share on the device: their inputs, attention over the target's pages, and the capture of both."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.sequence import Sequence
from outrider.kernels import attention as reference
from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, uniform_rows
from outrider.runners.attention import AttentionLayers
from outrider.runners.cuda_graphs import PinnedInputs, capture
from outrider.runners.device_state import DeviceState
from outrider.runners.paged_model import PagedModel


class HeadDraft(NamedTuple):
    """What a head drafts for B sequences, N nodes each, all on the device."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor | None = None  # int64 [B, N], see core.draft.Draft; None: a chain
    probs: Tensor | None = None  # float64 [B, N, vocab]: what each token was drawn from
    confidence: Tensor | None = None  # float32 [B, N]: how likely each is accepted where those before it are


def joined(drafts: Seq[HeadDraft]) -> HeadDraft:
    """The drafts of one sequence after another."""
    columns = zip(*drafts, strict=True)
    return HeadDraft(*(None if each[0] is None else torch.cat(each) for each in columns))  # type: ignore[arg-type]


class HeadShape(NamedTuple):
    """What a head's attention computes."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class DraftBatch:
    """The inputs of drafts for up to B sequences. They stay where they are; work on them is captured where graphs are.

    Sequences beyond those given only pad, in the scratch page.
    """

    def __init__(self, model: PagedModel, batch: int, graph_pool: Any, *, sampled: bool) -> None:
        """graph_pool: where to capture; None: nothing is captured. sampled: mode `distribution`."""
        self.model, self.batch, self.graph_pool, self.sampled = model, batch, graph_pool, sampled
        self._inputs = PinnedInputs(5 * batch, model.device)
        self.table_ids, self.lengths, self.last, self.seeds, temperatures = self._inputs.ints.split(batch)
        """lengths: tokens of each text. last: its last token. seeds: of its noise. temperatures: of its request."""
        self.temperatures = temperatures.view(torch.float64)
        self._results: dict[int, HeadDraft] = {}
        self.fill()

    def fill(self, *columns: Any) -> None:
        """Write and send the inputs, by column."""
        array = self._inputs.array().reshape(5, self.batch)
        array[:] = [[self.model.tables.spare], [2], [0], [0], [0]]
        for row, values in zip(array, columns, strict=False):
            row[: len(values)] = values
        self._inputs.send()

    def fill_texts(self, table_ids: Seq[int], seqs: Seq[Sequence], state: DeviceState | None) -> None:
        """The inputs of these sequences. state: theirs, where the host is a round behind."""
        count = len(seqs)
        lengths, last = [len(seq.tokens) for seq in seqs], [seq.tokens[-1] for seq in seqs]
        own = [seq.draw_seed if self.sampled else seq.seed for seq in seqs]
        seeds = np.array(own, dtype=np.uint64).view(np.int64)
        temperatures = np.array([seq.params.temperature for seq in seqs], dtype=np.float64).view(np.int64)
        self.fill(table_ids, lengths, last, seeds, temperatures)
        if state is not None:
            self.lengths[:count].copy_(state.lengths)
            self.last[:count].copy_(state.last[:, 1])

    def keep(self, made: HeadDraft, length: int = 0) -> None:
        """Copy what was made to where `result` finds it: captured work writes to the same place each time.

        length: tells drafts of several lengths apart.
        """
        for out, new in zip(self._results.setdefault(length, made), made, strict=True):
            if out is not None and new is not None and out is not new:
                out.copy_(new)

    def result(self, count: int, length: int = 0) -> HeadDraft:
        """A copy of what was made for the first `count` sequences."""
        made = self._results[length]
        return HeadDraft(*(None if part is None else part[:count].clone() for part in made))  # type: ignore[arg-type]

    def graph(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        """Captured where graphs are, else as it is."""
        if self.graph_pool is None:
            return work
        graph = capture(work, self.graph_pool, name)
        return lambda: graph.replay()  # looked up at each call, so that a benchmark can watch replays

    def attention_batch(
        self,
        shape: HeadShape,
        rows: int,
        starts: Tensor,
        widths: Tensor | None = None,
        tree: tuple[Tensor, Tensor] | None = None,
        behind: int = 0,
    ) -> AttentionBatch:
        """R rows of each text from `starts` on, int64 [B]; widths int64 [B]: those that are real, all if None.

        tree: each row's ancestors and depth, int64 [B, R] both; None: of a chain. behind: rows from `starts` on that an
        earlier pass has written: the first bits of ancestors are theirs.
        """
        if tree is None:
            column = torch.arange(rows, device=starts.device).repeat(self.batch)
            tree = (2 << column) - 1, column
        ancestors, depths = tree[0].flatten(), tree[1].flatten()
        splits, chunk = 1, 0
        if self.model.fused:
            from outrider.kernels.triton_attention import choose_kv_splits

            splits, chunk = choose_kv_splits(self.batch, self.batch * rows, shape.kv_heads)
        real = torch.full_like(starts, behind + rows) if widths is None else widths
        return AttentionBatch(
            self.model.tables.pages, self.table_ids, starts, real, ancestors, depths,
            uniform_rows(self.batch, rows, starts.device), splits=splits, chunk=chunk,
        )  # fmt: skip


class BatchAttention:
    """Attention of a batch whose positions only the device knows, over a head's layers; see `models.decoder.Attend`."""

    def __init__(
        self,
        model: PagedModel,
        layers: AttentionLayers,
        batch: AttentionBatch,
        workspace: AttentionWorkspace | None,
        behind: int = 0,
    ) -> None:
        """workspace: for the fused kernel. behind: as for `DraftBatch.attention_batch`."""
        self.model, self.layers, self.batch, self.workspace, self.behind = model, layers, batch, workspace, behind
        self.positions = (batch.starts[:, None] + batch.depths.view(-1, batch.width)).flatten()

    @cached_property
    def slots(self) -> Tensor:
        """int64 [B * R]: where the key and value of each row go."""
        batch, size = self.batch, self.model.pool.size
        column = self.behind + torch.arange(batch.width, device=self.model.device)
        real = column < batch.widths[:, None]
        places = torch.where(real, batch.starts[:, None] + column, 0)  # [B, R]
        pages = batch.block_tables[batch.table_ids[:, None], places // size].long()
        return torch.where(real, pages * size + places % size, self.model.scratch_slot).flatten()

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values [B * R, kv_heads, dim] to the pages."""
        keys, values = self.layers.caches[layer]
        keys.index_copy_(0, self.slots, k)
        values.index_copy_(0, self.slots, v)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.store(layer, k, v)
        q = q.contiguous()
        out = torch.empty_like(q)
        kernels: Any = reference
        if self.model.fused:
            from outrider.kernels import triton_attention as kernels
        kernels.attend_pages(
            q, *self.layers.caches[layer], self.batch, out, self.workspace,
            scale=self.layers.scale, window=self.layers.windows[layer], skip=self.layers.skip,
            page=self.model.pool.size, pdl=False,
        )  # fmt: skip
        return out.view(len(q), -1)


def attention_workspace(model: PagedModel, shape: HeadShape) -> AttentionWorkspace | None:
    """Where the fused kernel keeps partial sums; None without it. ConfigError where it has no such head."""
    if not model.fused:
        return None
    if shape.head_dim not in (16, 32, 64, 128, 256):
        raise ConfigError(
            f"a drafting head whose attention has {shape.head_dim} dimensions cannot run on CUDA here; 16, 32, 64, 128 "
            "and 256 are supported: choose another drafter"
        )
    from outrider.kernels.triton_attention import MAX_ROW_SPLITS

    return AttentionWorkspace(MAX_ROW_SPLITS, shape.heads, shape.head_dim, model.device)
