"""For each text a head's draft or a lookup's, whichever should have more accepted; then these drafts share rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from outrider.core.pinned_inputs import PinnedInputs
from outrider.kernels.overlay import overlay_chains
from outrider.kernels.share import share_tokens
from outrider.runners.cuda_graphs import MIN_PACKED_BATCH, capture, capture_batches, padded_batch
from outrider.runners.draft_batch import ALL, HeadDraft, Share

if TYPE_CHECKING:
    from outrider.runners.block_heads import BlockRunner
    from outrider.runners.graphed_lookup import GraphedLookups


class Overlays(Protocol):
    """Chooses between the drafts of a head and of lookups."""

    def run(self, made: HeadDraft, found: Tensor, share: Share | None) -> HeadDraft:
        """The drafts of a round, valid on the device until the next call.

        made: a head's, of B texts, with confidences. found int64 [B, columns]: by a lookup of the same texts.
        """
        ...

    def again(self, made: HeadDraft, found: Tensor) -> HeadDraft:
        """Repeat the last run for drafts and findings at the same addresses; the result is at the same address too."""
        ...


class PlainOverlays:
    """The reference, in plain PyTorch on any device."""

    def __init__(self, k: int) -> None:
        """k: max tokens of a lookup."""
        self.k = k
        self._share: Share | None = None
        self._drafts = torch.empty(0, 0, dtype=torch.int64)

    def run(self, made: HeadDraft, found: Tensor, share: Share | None) -> HeadDraft:
        self._share, self._drafts = share, made.tokens.new_empty(len(found), max(made.tokens.shape[1], self.k))
        return self.again(made, found)

    def again(self, made: HeadDraft, found: Tensor) -> HeadDraft:
        tokens, chances = overlay_chains(made.tokens, cast(Tensor, made.confidence), found, self.k)
        share = self._share
        if share is not None:
            tokens = share_tokens(tokens, chances, tokens.new_tensor(share.room), share.total)
        return HeadDraft(self._drafts.copy_(tokens), confidence=chances)


class GraphedOverlay:
    """Captured for up to B texts, with inputs at fixed addresses, which are sent only when they change."""

    def __init__(self, made: HeadDraft, found: Tensor, k: int) -> None:
        """made, found: the tensors of B texts, at fixed addresses."""
        batch, levels = made.tokens.shape
        self._made, self._found, self._k = made, found, k
        width, chances = max(levels, k), cast(Tensor, made.confidence)
        self._drafts = made.tokens.new_empty(batch, width), chances.new_empty(batch, width)
        """Drafts of B texts and their chances."""
        self._views: dict[int, HeadDraft] = {}
        """The first of these, by their number."""
        self._inputs = PinnedInputs(batch + 1, found.device)
        self._sent: Share | None = Share([0] * batch, 0)
        self._graph = capture(self._launch, None, f"overlays of {batch}")

    def run(self, count: int, share: Share | None) -> HeadDraft:
        """The drafts of the first `count` texts. share: as in `Overlays.run`."""
        if share != self._sent:
            array = self._inputs.array()
            array[:] = ALL if share is None else 0
            if share is not None:
                array[: len(share.room)], array[-1] = share.room, share.total
            self._inputs.send()
            self._sent = share
        return self.again(count)

    def again(self, count: int) -> HeadDraft:
        """As `run`, with rows shared as before."""
        self._graph.replay()
        if count not in self._views:
            tokens, chances = (part[:count] for part in self._drafts)
            self._views[count] = HeadDraft(tokens, confidence=chances)
        return self._views[count]

    def _launch(self) -> None:
        """The launches that are captured."""
        from outrider.kernels import triton_overlay, triton_share

        own, chances = self._made.tokens, cast(Tensor, self._made.confidence)
        triton_overlay.overlay_chains(own, chances, self._found, self._k, self._drafts)
        if len(own) >= MIN_PACKED_BATCH:
            triton_share.share_tokens(*self._drafts, self._inputs.ints[:-1], self._inputs.ints[-1:])


class GraphedOverlays:
    """Overlays captured for every batch size that drafts and lookups are captured for."""

    def __init__(self, runner: BlockRunner, lookups: GraphedLookups, k: int, max_batch: int) -> None:
        """k: max tokens of a lookup."""
        sizes = capture_batches(min(max_batch, runner.max_batch))
        self._by_batch = {size: GraphedOverlay(runner.place(size), lookups.place(size), k) for size in sizes}

    def run(self, made: HeadDraft, found: Tensor, share: Share | None) -> HeadDraft:
        return self._by_batch[padded_batch(len(found))].run(len(found), share)

    def again(self, made: HeadDraft, found: Tensor) -> HeadDraft:
        return self._by_batch[padded_batch(len(found))].again(len(found))
