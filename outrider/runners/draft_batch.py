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
from outrider.core.pinned_inputs import PinnedInputs
from outrider.core.sequence import Sequence
from outrider.kernels import attention as reference
from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, RowPlaces, uniform_rows
from outrider.runners.attention import AttentionLayers
from outrider.runners.cuda_graphs import capture
from outrider.runners.device_state import DeviceState
from outrider.runners.paged_model import PagedModel, TappedPages, tapped_pages

COLUMNS, STATE = 8, 3
"""The int64 inputs of a batch: COLUMNS numbers for each sequence, then STATE numbers for all (the addresses of a
state's lengths and last tokens, and the tokens that drafts share)."""
ALL = 1 << 30
"""More tokens than any draft has: no limit."""


class HeadDraft(NamedTuple):
    """What a head drafts for B sequences, N nodes each, all on the device."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor | None = None  # int64 [B, N], see core.draft.Draft; None: a chain
    probs: Tensor | None = None  # float64 [B, N, vocab]: the distribution each token was drawn from
    confidence: Tensor | None = None  # float32 [B, N]: probability that each is accepted, given those before it

    def copied(self) -> HeadDraft:
        """A copy that no later draft overwrites."""
        return HeadDraft(*(None if part is None else part.clone() for part in self))  # type: ignore[arg-type]


def joined(drafts: Seq[HeadDraft]) -> HeadDraft:
    """One draft of all sequences, from the drafts of consecutive parts of them."""
    columns = zip(*drafts, strict=True)
    return HeadDraft(*(None if each[0] is None else torch.cat(each) for each in columns))  # type: ignore[arg-type]


class Share(NamedTuple):
    """How drafts share the rows of a pass, see `kernels.share`."""

    room: Seq[int]
    """Max tokens of each draft."""
    total: int
    """Max tokens of all drafts together."""


class DraftTexts(NamedTuple):
    """The sequences to draft for."""

    table_ids: Seq[int]
    seqs: Seq[Sequence]
    firsts: Seq[int]
    """For each sequence, the first position that the drafting pass reads."""
    state: DeviceState | None
    """The sequences' state, where the host is a round behind the device."""
    share: Share | None = None
    """How drafts share rows, for a head that pads what it cuts off its drafts; None: nothing is cut."""


class UnreadRows(NamedTuple):
    """The rows that a drafting pass reads of B texts: W rows of each, of which the first `counts` are real."""

    ids: Tensor  # int64 [B, W]
    features: Tensor  # [B * W, taps * hidden]: at the positions before the rows', or at the rows'
    firsts: Tensor  # int64 [B]: the position of each text's first row
    counts: Tensor  # int64 [B]
    ends: Tensor  # int64 [B]: the index of the row of each text's last token


class HeadShape(NamedTuple):
    """The dimensions of a head's attention, and its scale."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class DraftBatch:
    """The inputs of drafts for up to B sequences, at fixed addresses; work on them is captured if there are graphs.

    Sequences beyond those given are padding, in the scratch page.
    """

    def __init__(self, model: PagedModel, batch: int, graph_pool: Any, *, sampled: bool) -> None:
        """graph_pool: the memory pool of captured graphs; None: nothing is captured. sampled: mode `distribution`."""
        self.model, self.batch, self.graph_pool, self.sampled = model, batch, graph_pool, sampled
        self._inputs = PinnedInputs(COLUMNS * batch + STATE, model.device)
        columns, self._state = self._inputs.ints[:-STATE].view(COLUMNS, batch), self._inputs.ints[-STATE:]
        self.table_ids, self.lengths, self.last, self.firsts, self.seeds, temperatures, self.room, self._rows = columns
        """For each sequence, lengths: tokens of its text. last: its last token. firsts: the first position that the
        head reads. seeds: of its noise. temperatures: of its request. room: max tokens of its draft, where drafts share
        rows. _rows: its row in the state from which length and last token are fetched; negative: both are given."""
        self.shared = self._state[-1:]
        """int64 [1]: max tokens of all drafts together, where they share rows."""
        self.temperatures = temperatures.view(torch.float64)
        self.starts = torch.zeros_like(self.lengths)
        """The position of each text's last token, once `fetch` is done."""
        self._results: dict[int, HeadDraft] = {}
        self._views: dict[tuple[int, int], HeadDraft] = {}
        """Views of results, by the number of sequences and the length."""
        self._sent: tuple[Any, ...] | None = None
        """All that determines the inputs on the device, where texts are fetched by address; else None."""
        self._fetched: tuple[Tensor, Tensor] | None = None
        """The tensors that the next draft fetches by address: kept alive until the draft after it."""
        self._constants: dict[tuple[str, int], Tensor] = {}
        self._padding = np.array([[model.tables.spare], [2], [0], [1], [0], [0], [0], [-1]])
        self.fill()

    def fill(self, *columns: Any, fetched: Seq[Tensor] = (), shared: int = 0) -> None:
        """Write the inputs by column, and send them in one copy. fetched: lengths and last tokens of a state."""
        array = self._inputs.array()
        rows = array[:-STATE].reshape(COLUMNS, self.batch)
        rows[:] = self._padding
        for row, values in zip(rows, columns, strict=False):
            row[: len(values)] = values
        array[-STATE:] = *([each.data_ptr() for each in fetched] or [0, 0]), shared
        self._inputs.send()

    def fetch(self) -> None:
        """Launch the first part of captured work, which completes the inputs by what only the device knows."""
        if self.model.fused:
            from outrider.kernels.triton_heads import fetch_texts

            fetch_texts(self._state, self._rows, self.lengths, self.last, self.starts)
        else:
            torch.sub(self.lengths, 1, out=self.starts)

    def fill_texts(self, texts: DraftTexts) -> None:
        """Set the inputs for these texts.

        With a state, the fused kernels fetch lengths and last tokens by address, and read each text from as far back as
        a drafting pass has room for: what is read again is written with the same values. So the inputs stay the same
        while the sequences do, and are not sent again.
        """
        table_ids, seqs, firsts, state, share = texts
        own = [seq.draw_seed if self.sampled else seq.seed for seq in seqs]
        warmth = [seq.params.temperature for seq in seqs]
        room, shared = share or ([ALL] * len(seqs), ALL)
        key, rows, fetched = None, [-1] * len(seqs), ()
        lengths, last = [len(seq.tokens) for seq in seqs], [seq.tokens[-1] for seq in seqs]
        if state is not None and self.model.fused:
            fetched = self._fetched = state.origin.lengths.contiguous(), state.origin.last.contiguous()
            key = [*table_ids], own, warmth, *(each.data_ptr() for each in fetched), state.rows, room, shared
            if key == self._sent:
                return
            places = range(len(seqs)) if state.rows is None else state.rows
            rows, firsts = [at if isinstance(at, int) else -1 for at in places], [0] * len(seqs)
        seeds = np.array(own, dtype=np.uint64).view(np.int64)
        temperatures = np.array(warmth, dtype=np.float64).view(np.int64)
        self.fill(table_ids, lengths, last, firsts, seeds, temperatures, room, rows, fetched=fetched, shared=shared)
        self._sent = key
        if state is not None and not self.model.fused:
            self.lengths[: len(state)].copy_(state.lengths)
            self.last[: len(state)].copy_(state.last[:, 1])

    def fetch_again(self, state: DeviceState, count: int) -> bool:
        """Have the device fetch the texts of the last draft from this state, all of whose `count` sequences they are.

        Inputs are sent only if the texts were fetched from elsewhere. Returns False where they were not fetched by
        address, or where the state is a part of another.
        """
        if self._sent is None or self._fetched is None or state.rows is not None:
            return False
        if self._fetched[0] is state.lengths and self._sent[5] is None:
            return True
        last, array = self._inputs.arrays[self._inputs.current], self._inputs.array()
        array[:] = last
        self._fetched = state.lengths.contiguous(), state.last.contiguous()
        addresses = [each.data_ptr() for each in self._fetched]
        array[:-STATE].reshape(COLUMNS, self.batch)[-1, :count] = range(count)
        array[-STATE:-1] = addresses
        self._inputs.send()
        self._sent = (*self._sent[:3], *addresses, None, *self._sent[6:])
        return True

    def unread(self, width: int, *, before: bool) -> UnreadRows:
        """The rows of each text from `firsts` on, at most `width`, with the outputs that the target keeps in its pages.

        before: outputs are those at the position before each row, zeros where there is none, and rows go up to the
        text's last token; else outputs are those at the row's own position, and rows go up to what is cached.
        """
        kept = tapped_pages(self.model)
        if self.model.fused:
            return self._unread_by_kernel(kept, width, before)
        end, shift = self.lengths - 1, int(before)
        first = self.firsts.clamp(end - width + shift, end)
        column = torch.arange(width, device=self.model.device)
        places = torch.minimum(first[:, None] + column, end[:, None])  # [B, W]
        ids = torch.where(places < end[:, None], kept.tokens[self.slots(places)], self.last[:, None])
        features = kept.features[self.slots((places - shift).clamp(min=0))]
        features = torch.where(places[..., None] >= shift, features, 0).flatten(0, 1)
        ends = uniform_rows(self.batch, width, end.device).offsets + end - first
        return UnreadRows(ids, features, first, end - first + shift, ends)

    def unread_located(self, width: int, cos_sin: Tensor) -> tuple[UnreadRows, RowPlaces]:
        """As `unread` with `before` False, by the fused kernels, and the places of the rows' keys and values.

        cos_sin: the rotations of positions, [positions, D/2, 2].
        """
        places = RowPlaces.empty(self.batch * width, 2 * cos_sin.shape[1], self.model.device)
        return self._unread_by_kernel(tapped_pages(self.model), width, False, places, cos_sin), places

    def _unread_by_kernel(
        self,
        kept: TappedPages,
        width: int,
        before: bool,
        places: RowPlaces | None = None,
        cos_sin: Tensor | None = None,
    ) -> UnreadRows:
        from outrider.kernels.triton_heads import gather_unread

        made = UnreadRows(
            self.last.new_empty(self.batch, width),
            kept.features.new_empty(self.batch * width, kept.features.shape[1]),
            *(torch.empty_like(self.last) for _ in range(3)),
        )
        texts = self.table_ids, self.lengths, self.last, self.firsts
        gather_unread(
            self.model.tables.pages, texts, kept, made, before=before, page=self.model.pool.size,
            places=places, cos_sin=cos_sin, scratch_slot=self.model.scratch_slot,
        )  # fmt: skip
        return made

    def slots(self, positions: Tensor) -> Tensor:
        """The slots of these positions of each text: int64 [B, N] both."""
        size = self.model.pool.size
        pages = self.model.tables.pages[self.table_ids[:, None], positions // size].long()
        return pages * size + positions % size

    def keep(self, made: HeadDraft, length: int = 0) -> None:
        """Copy a draft to where `result` finds it: captured work writes to the same addresses each time.

        length: selects the tensors, where drafts of several lengths are made.
        """
        for out, new in zip(self._results.setdefault(length, made), made, strict=True):
            if out is not None and new is not None and out is not new:
                out.copy_(new)

    def kept(self, length: int = 0) -> HeadDraft | None:
        """The tensors that `keep` copies to, None before its first call: a draft written there is not copied."""
        return self._results.get(length)

    def result(self, count: int, length: int = 0) -> HeadDraft:
        """The draft of the first `count` sequences. On CUDA it is valid until the next draft, unless it has `probs`."""
        made = self._results[length]
        if not made.tokens.is_cuda or made.probs is not None:
            return HeadDraft(*(None if part is None else part[:count] for part in made)).copied()  # type: ignore[arg-type]
        if (count, length) not in self._views:
            parts = (None if part is None else part[:count] for part in made)
            self._views[count, length] = HeadDraft(*parts)  # type: ignore[arg-type]
        return self._views[count, length]

    def graph(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        """A function that runs `fetch` and then `work`: the replay of a captured graph where there is a graph pool."""

        def fetched() -> None:
            self.fetch()
            work()

        if self.graph_pool is None:
            return fetched
        graph = capture(fetched, self.graph_pool, name)
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
        """What R rows of each text attend to, from `starts` on, int64 [B]. widths int64 [B]: real rows; None: all.

        tree: each row's ancestors and depth, int64 [B, R] both; None: a chain. behind: the number of rows from `starts`
        on that an earlier pass has written, to which the first bits of ancestors belong.
        """
        if tree is None:
            tree = self._constant("ancestors", rows), self._constant("depths", rows)
        ancestors, depths = tree[0].flatten(), tree[1].flatten()
        splits, chunk = 1, 0
        if self.model.fused:
            from outrider.kernels.triton_attention import choose_kv_splits

            splits, chunk = choose_kv_splits(self.batch, self.batch * rows, shape.kv_heads)
        real = self._constant("widths", behind + rows) if widths is None else widths
        return AttentionBatch(
            self.model.tables.pages, self.table_ids, starts, real, ancestors, depths,
            uniform_rows(self.batch, rows, starts.device), splits=splits, chunk=chunk,
        )  # fmt: skip

    def _constant(self, name: str, rows: int) -> Tensor:
        """Ancestors or depths [B * rows] or widths [B] of chains, int64. Made once, outside of captured work."""
        if (name, rows) not in self._constants:
            column = torch.arange(rows, device=self.model.device).repeat(self.batch)
            made = {"ancestors": (2 << column) - 1, "depths": column, "widths": torch.full_like(self.table_ids, rows)}
            self._constants.update({(key, rows): value for key, value in made.items()})
        return self._constants[name, rows]


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

    @cached_property
    def positions(self) -> Tensor:
        """int64 [B * R]"""
        return (self.batch.starts[:, None] + self.batch.depths.view(-1, self.batch.width)).flatten()

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
        return self.attend(layer, q.contiguous())

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q [N, heads, dim], contiguous, over keys and values already in the cache: [N, heads * dim]"""
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
    """The fused kernel's memory for partial sums; None without it. ConfigError where it does not support the head."""
    if not model.fused:
        return None
    if shape.head_dim not in (16, 32, 64, 128, 256):
        raise ConfigError(
            f"a drafting head whose attention has {shape.head_dim} dimensions cannot run on CUDA here; 16, 32, 64, 128 "
            "and 256 are supported: choose another drafter"
        )
    from outrider.kernels.triton_attention import MAX_ROW_SPLITS

    return AttentionWorkspace(MAX_ROW_SPLITS, shape.heads, shape.head_dim, model.device)
