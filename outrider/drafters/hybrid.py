"""A head and lookups combined: for each sequence and round the device takes the draft that is worth more.

Only the device has both before scoring. Lookups draft text that repeats, exactly and far ahead; a head drafts new text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from outrider.core.draft import Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, RoundView
from outrider.drafters.block import Block
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.head_drafter import Overlay, copy_of_same
from outrider.runners.overlays import GraphedOverlays, Overlays, PlainOverlays


class Hybrid(Drafter):
    """The head drafts; a lookup's draft replaces the head's where it is worth more, before drafts share rows.

    Only in rounds behind one in flight, in mode `seeded`, with all texts on the device: else the head drafts alone. The
    lookups remain a drafter of their own: `forget` is not passed on.
    """

    def __init__(self, head: Block, lookups: DeviceLookup, overlays: Overlays) -> None:
        self.head, self.lookups, self.overlays = head, lookups, overlays
        self.includes = (lookups,)
        self._longest = max(head.traits.max_tokens, lookups.k)
        self.traits = replace(head.traits, name=f"{head.traits.name}+{lookups.traits.name}", max_tokens=self._longest)
        self.rows, self.lengths = head.rows, head.lengths
        self._overlaid = False
        """Whether the last round's drafts were chosen from both."""

    def rehearse(self, seqs: Seq[Sequence]) -> bool:
        return self.head.rehearse(seqs)

    def propose(self, view: RoundView) -> Seq[Draft]:
        rows, most = self.head.drafted_rows(view), self.head.runner.max_batch
        together = view.state is not None and any(view.budgets) and len(rows) == len(view.seqs) <= most
        found = self.lookups.look_up_all(view) if together else None
        self._overlaid = found is not None
        if found is None:
            return self.head.propose_for(view, rows)
        tokens = found.tokens
        self.head.overlay = Overlay(self._longest, lambda made, share: self.overlays.run(made, tokens, share))
        try:
            return self.head.propose_for(view, rows)
        finally:
            self.head.overlay = None

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        """As `Drafter.repeat`; None also where the head drafted alone: in the next round the lookups may take part."""
        found = self.lookups.repeat(view, drafts) if self._overlaid else None
        made = None if found is None or view.state is None else self.head.runner.repeat(view.seqs, view.state)
        if found is None or made is None:
            return None
        return copy_of_same(self.overlays.again(made, found.tokens), drafts)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        self.head.observe(seqs, drafts, verdicts)
        self.lookups.observe(seqs, drafts, verdicts)

    def forget(self, seq: Sequence) -> None:
        self.head.forget(seq)


def with_hybrid(drafters: Seq[Drafter], max_batch: int) -> list[Drafter]:
    """The drafters, with a hybrid in place of a head that shares rows, if lookups on the device are among them."""
    heads = [each for each in drafters if each.traits.shares]
    lookups = [each for each in drafters if each.traits.limits_itself and not each.traits.needs_prediction]
    if len(heads) != 1 or not lookups:
        return [*drafters]
    hybrid = make_hybrid(cast(Block, heads[0]), cast(DeviceLookup, lookups[0]), max_batch)
    return [hybrid if each is heads[0] else each for each in drafters]


def make_hybrid(head: Block, lookups: DeviceLookup, max_batch: int) -> Hybrid:
    """A hybrid of these two, for rounds of up to `max_batch` sequences."""
    graphs, k = lookups.store.graphs, lookups.k
    overlays = PlainOverlays(k) if graphs is None else GraphedOverlays(head.runner, graphs, k, max_batch)
    return Hybrid(head, lookups, overlays)
