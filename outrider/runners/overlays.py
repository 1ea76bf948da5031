"""Replaces a head's drafts by those of lookups where more of them should be accepted; then drafts share their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

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
    """Replaces drafts of a round by those of lookups, in place."""

    def run(self, made: HeadDraft, found: Tensor, share: Share | None) -> None:
        """made: drafts of B texts, with confidences. found int64 [B, columns]: by a lookup of the same texts."""
        ...

    def again(self, made: HeadDraft, found: Tensor) -> None:
        """Repeat the last run, for drafts and findings at the same addresses."""
        ...


class PlainOverlays:
    """The reference, in plain PyTorch on any device."""

    def __init__(self, k: int) -> None:
        """k: max tokens of a lookup."""
        self._k, self._share = k, None

    def run(self, made: HeadDraft, found: Tensor, share: Share | None) -> None:
        self._share: Share | None = share
        self.again(made, found)

    def again(self, made: HeadDraft, found: Tensor) -> None:
        tokens, chances, share = made.tokens, cast(Tensor, made.confidence), self._share
        overlay_chains(tokens, chances, found, self._k)
        if share is not None:
            tokens.copy_(share_tokens(tokens, chances, tokens.new_tensor(share.room), share.total))


class GraphedOverlay:
    """Captured for up to B texts, with inputs at fixed addresses, which are sent only when they change."""

    def __init__(self, made: HeadDraft, found: Tensor, k: int) -> None:
        """made, found: the tensors of B texts, at fixed addresses."""
        batch = len(made.tokens)
        self._made, self._found, self._k = made, found, k
        self._inputs = PinnedInputs(batch + 1, found.device)
        self._sent: Share | None = Share([0] * batch, 0)
        self._graph = capture(self._launch, None, f"overlays of {batch}")

    def run(self, share: Share | None) -> None:
        if share != self._sent:
            array = self._inputs.array()
            array[:] = ALL if share is None else 0
            if share is not None:
                array[: len(share.room)], array[-1] = share.room, share.total
            self._inputs.send()
            self._sent = share
        self._graph.replay()

    def again(self) -> None:
        self._graph.replay()

    def _launch(self) -> None:
        """The launches that are captured."""
        from outrider.kernels import triton_overlay, triton_share

        tokens, chances = self._made.tokens, cast(Tensor, self._made.confidence)
        triton_overlay.overlay_chains(tokens, chances, self._found, self._k)
        if len(tokens) >= MIN_PACKED_BATCH:
            triton_share.share_tokens(tokens, chances, self._inputs.ints[:-1], self._inputs.ints[-1:])


class GraphedOverlays:
    """Overlays captured for every batch size that drafts and lookups are captured for."""

    def __init__(self, runner: BlockRunner, lookups: GraphedLookups, k: int, max_batch: int) -> None:
        """k: max tokens of a lookup."""
        sizes = capture_batches(min(max_batch, runner.max_batch))
        self._by_batch = {size: GraphedOverlay(runner.place(size), lookups.place(size), k) for size in sizes}

    def run(self, made: HeadDraft, found: Tensor, share: Share | None) -> None:
        self._by_batch[padded_batch(len(found))].run(share)

    def again(self, made: HeadDraft, found: Tensor) -> None:
        self._by_batch[padded_batch(len(found))].again()
