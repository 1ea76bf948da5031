"""From what a head drafted on the device to the drafts of a round."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.device_row import DeviceRow
from outrider.core.draft import Draft
from outrider.core.host_copy import HostCopy
from outrider.drafters.base import RoundView
from outrider.runners.draft_batch import HeadDraft


def drafts_of(made: HeadDraft, view: RoundView, name: str, expected: Seq[float]) -> list[Draft]:
    """A draft for each sequence of the view, cut to its budget. Nothing is waited for.

    name: the drafter's. expected: how many tokens of each draft should be accepted.
    """
    tokens, nodes = HostCopy(made.tokens), made.tokens.shape[1]
    parents = None if made.parents is None else HostCopy(made.parents)
    return [
        Draft(
            DeviceRow(tokens, at, nodes),
            None if parents is None else DeviceRow(parents, at, nodes),
            None if made.probs is None or seq.params.greedy else made.probs[at],
            name,
            expected[at],
            known=True,
        ).first_nodes(view.budgets[at])
        for at, seq in enumerate(view.seqs)
    ]
